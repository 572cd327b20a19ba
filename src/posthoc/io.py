"""Files that are whole or not there: safetensors with a versioned JSON config inside, written atomically; locks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import reprlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import FileError, PosthocWarning

__all__ = [
    "atomic_folder",
    "atomic_path",
    "changed",
    "check_config",
    "check_tensors",
    "contents_sha256",
    "head_sha256",
    "lock",
    "read_head",
    "read_tensors",
    "require_folder",
    "require_writable",
    "sync_folder",
    "write_head",
    "write_tensors",
    "writing",
]

HEAD = "posthoc-head"
VERSION, HEAD_VERSION = 1, 2
LONGEST_HEADER = 2**24
"""The largest number of characters in the header of a file."""
UMASK = os.umask(0o022)
os.umask(UMASK)  # it can only be read by setting it: once, here, before there are threads


def require_writable(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be written there: to be asked before the work, not after it."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileError(
            f"Expected a folder to write {target.name} into, found none at {target.parent}: create it first."
        )
    if target.is_dir():
        raise FileError(f"Expected the path of a file to write, found a folder: {target}.")
    if not os.access(target.parent, os.W_OK):
        raise FileError(f"Expected a folder that can be written to, found one that cannot: {target.parent}.")
    return target


def require_folder(path: str | os.PathLike[str]) -> Path:
    """A folder that can be written to, made if it is not there."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileError(f"Expected a folder, found a file: {folder}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"Expected a folder that can be made, found that {folder} cannot be ({error.strerror})."
        ) from error
    if not os.access(folder, os.W_OK):
        raise FileError(f"Expected a folder that can be written to, found one that cannot: {folder}.")
    return folder


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path`, moved onto it at the end; on an error `path` stays as it was."""
    target = require_writable(path)
    suffix = f".tmp{target.suffix}"
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~UMASK)  # mkstemp makes files private; this is what any new file would have
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a folder to make beside `path`, moved into its place at the end; on an error `path` stays as it
    was."""
    target = Path(path)
    if not target.is_dir():
        require_writable(target)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    new, old = beside / "new", beside / "old"
    try:
        yield new
        replaces = target.is_dir()  # a folder cannot be renamed onto one that is not empty
        if replaces:
            os.replace(target, old)
        try:
            os.replace(new, target)
        except OSError:
            if replaces:
                os.replace(old, target)
            raise
        sync_folder(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: str | os.PathLike[str], then: str) -> Iterator[None]:
    """Tells what the system refuses inside (a full disk, no permission) as a `FileError` that says what to do then."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Expected to write {path}, found that it cannot be ({error}). {then}") from error


HELD: set[int] = set()
"""The lock files this process has open."""


@contextmanager
def lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a lock file against every other writer. The system lets it go when the process ends, however it ends; the
    file itself stays."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    HELD.add(handle)
    try:
        try:
            seize(handle)
        except BlockingIOError as error:
            raise FileError(
                f"Expected to be the only one writing to {Path(path).parent}, found another who does: wait until it "
                "has ended, or write elsewhere."
            ) from error
        yield
    finally:
        if handle in HELD:
            HELD.remove(handle)
            os.close(handle)


def seize(handle: int) -> None:
    """Locks an open file for this process alone, or raises BlockingIOError at once."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(*error.args) from error
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        warnings.warn(
            "This file system has no locks: see to it that only one process writes to the folder.",
            PosthocWarning,
            stacklevel=4,
        )


def release_in_child() -> None:
    # A lock lives as long as any copy of its handle: the workers of a killed process must not keep it.
    for handle in HELD:
        os.close(handle)
    HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=release_in_child)


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    format: str,
    config: Mapping[str, Any],
    *,
    version: int = VERSION,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Writes tensors and config; equal contents give equal bytes. `check` may refuse the file before it is there."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    document = {"format": format, "version": version, **config}
    # One metadata key: the order of several would not be fixed.
    metadata = {"posthoc": json.dumps(document, sort_keys=True)}
    plain = {k: v.detach().cpu().contiguous().clone() for k, v in sorted(tensors.items())}
    with writing(path, "Make room, or write elsewhere."), atomic_path(path) as temporary:
        try:
            save_file(plain, temporary, metadata)
        except SafetensorError as error:  # which is how it tells of a full disk
            raise OSError(str(error)) from error
        if check is not None:
            check(temporary)


def read_tensors(
    path: str | os.PathLike[str], format: str, *, version: int = VERSION
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and config of a file that `write_tensors` wrote in this format."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileError(f"Expected a saved {format.removeprefix('posthoc-')}, found no file at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise FileError(
            f"Expected a safetensors file written by posthoc, found something else in {path} ({error}). "
            "Check the path; a truncated file must be saved again."
        ) from error
    try:
        text = metadata["posthoc"]
        config = json.loads(text) if len(text) <= LONGEST_HEADER else None
    except (KeyError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or config.get("format") != format:
        what = format.removeprefix("posthoc-")
        raise FileError(f"Expected a {what} that posthoc saved, found a safetensors file of another origin: {path}.")
    if config.get("version") != version:
        raise FileError(
            f"Expected format version {version}, found {config.get('version')} in {path}: "
            "load it with the posthoc that wrote it, or fit and save again with this one."
        )
    return tensors, config


HEAD_PARTS = {
    "method": str,
    "config": dict,
    "likelihood": dict,
    "shapes": dict,
    "rounding": list | None,
    "network": str | None,
    "columns": list | None,
    "classes": list | None,
    "sha256": str,
}
"""The types in the header of a head file."""


def head_sha256(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """The SHA-256 of the tensors of a head and of the rest of its header."""
    return contents_sha256(tensors, {k: v for k, v in header.items() if k in HEAD_PARTS and k != "sha256"})


def contents_sha256(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """The SHA-256 of tensors and of a config."""
    hashed = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.detach().cpu().reshape(-1).repeat(1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def write_head(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    *,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Writes a fitted head; `check` may refuse the file before it is there."""
    require_finite_tensors(path, tensors)
    header = {**header, "sha256": head_sha256(tensors, header)}
    write_tensors(path, tensors, HEAD, header, version=HEAD_VERSION, check=check)


def read_head(path: str | os.PathLike[str], method: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write_head` wrote, for this method unless for any."""
    tensors, header = read_tensors(path, HEAD, version=HEAD_VERSION)
    check_config(path, header, HEAD_PARTS)
    if method is not None and header["method"] != method:
        raise FileError(f"Expected a head of method {method!r}, found one of {header['method']!r} in {path}.")
    if header["sha256"] != head_sha256(tensors, header):
        raise FileError(
            f"Expected contents with the SHA-256 {header['sha256']:.12}, found others in {path}: the file was changed "
            "or damaged; save it again."
        )
    require_finite_tensors(path, tensors)
    return tensors, header


def require_finite_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuses a head with NaN or infinity."""
    # The bounds that GPyTorch keeps beside its parameters may be infinite.
    reals = {k: t for k, t in tensors.items() if t.is_floating_point() and not k.endswith("_bound")}
    wrong = [k for k, tensor in reals.items() if not bool(tensor.isfinite().all())]
    if wrong:
        raise FileError(
            f"Expected finite parameters, found NaN or infinity in {', '.join(wrong)} of {path}: fit again."
        )


def check_config(path: str | os.PathLike[str], config: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Refuses a config whose parts are missing, or of other types than were written."""
    if missing := parts.keys() - config.keys():
        names = ", ".join(sorted(missing))
        raise FileError(f"Expected a config with {names}, found none in {path}: the file was changed; save it again.")
    for name, kind in parts.items():
        value = config[name]
        number = isinstance(value, bool) and kind in (int, int | None)  # to Python, True is one
        if number or not isinstance(value, kind):
            raise changed(path, f"{name} {reprlib.repr(value)}, not of type {getattr(kind, '__name__', kind)}")


def check_tensors(
    path: str | os.PathLike[str], found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...] | Tensor]
) -> None:
    """Refuses a file whose tensors are not the ones its config describes: each of a shape, or like another tensor in
    its dtype too."""
    wrong = sorted(k for k in found.keys() | expected.keys() if not fits(found.get(k), expected.get(k)))
    if wrong:
        wanted = ", ".join(f"{k} {described(expected.get(k))}" for k in wrong)
        raise FileError(
            f"Expected tensors {wanted}; found {', '.join(f'{k} {described(found.get(k))}' for k in wrong)} in {path}: "
            "the file was changed; save it again."
        )


def fits(found: Tensor | None, expected: tuple[int, ...] | Tensor | None) -> bool:
    if found is None or expected is None:
        return False
    if isinstance(expected, Tensor):
        return found.shape == expected.shape and found.dtype == expected.dtype
    return tuple(found.shape) == expected


def described(what: tuple[int, ...] | Tensor | None) -> str:
    if isinstance(what, Tensor):
        return f"{tuple(what.shape)} of {str(what.dtype).removeprefix('torch.')}"
    return "none" if what is None else str(what)


def changed(path: str | os.PathLike[str], found: object) -> FileError:
    """The error for a file whose config cannot be what was written, with what was found in it."""
    return FileError(
        f"Expected a config that this version can read, found one in {path} that it cannot ({found}): "
        "the file was changed; save it again."
    )
