"""Files: written whole or not at all, locks, and safetensors with a versioned JSON config inside."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import platform
import reprlib
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import FileError

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
    "require_regular",
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
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Errors of a disk that are reported with the name of the file that was to be written."""


def require_writable(path: str | os.PathLike[str]) -> Path:
    """Returns the path if a file can be written there; call it before the work whose result the file takes.

    Raises:
        FileError: If there is no folder, or something else than a regular file at the path (a link, a device).
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileError(
            f"Expected a folder to write {target.name} into, found none at {target.parent}: create it first."
        )
    if target.is_dir():
        raise FileError(f"Expected the path of a file to write, found a folder: {target}.")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise FileError(f"Expected the path of a regular file to write, found a link or a device: {target}.")
    if not os.access(target.parent, os.W_OK):
        raise FileError(f"Expected a folder that can be written to, found one that cannot: {target.parent}.")
    return target


def require_folder(path: str | os.PathLike[str]) -> Path:
    """Returns a folder that can be written to, and makes it if it is not there."""
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


def require_regular(path: Path) -> None:
    """Refuses to read what may never end: pipes, devices, sockets."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise FileError(f"Expected a regular file, found a pipe or a device: {path}. Save the data to a file first.")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path beside `path`, which is moved onto it at the end; after an error `path` is as it was.

    Temporary files that killed processes left beside `path` are removed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, atomic_path(f"{folder}/a.txt") as temporary:
        ...     _ = temporary.write_text("whole or not at all")
    """
    target = require_writable(path)
    remove_leftovers(target)
    temporary = temporary_beside(target, target.suffix)
    try:
        temporary.touch(exist_ok=False)
        permissions = stat.S_IMODE(temporary.stat().st_mode)
        yield temporary
        temporary.chmod(permissions)  # those of any new file, also where a library made the file anew
        os.replace(temporary, target)
    except OSError as error:
        if isinstance(error, FileError) or error.errno not in NO_ROOM:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives the path of a folder to make beside `path`, which is moved into its place at the end; after an error `path`
    is as it was."""
    target = Path(path)
    if not target.is_dir():
        require_writable(target)
    remove_leftovers(target)
    new, old = temporary_beside(target, ""), temporary_beside(target, "")
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
        for each in (new, old):
            shutil.rmtree(each, ignore_errors=True)


def temporary_beside(target: Path, suffix: str) -> Path:
    """A new name that says which process on which machine it belongs to."""
    owner = f"{machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.parent / f".{target.name}.{owner}.tmp{suffix}"


def remove_leftovers(target: Path) -> None:
    """Removes temporary files and folders of processes that ended without doing so."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.{machine()}-*.tmp*"):
        number = path.name.removeprefix(f".{target.name}.").split("-")[1]
        if number.isdigit() and not is_running(int(number)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def machine() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"


def is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # to ask would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


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
def writing(path: str | os.PathLike[str], advice: str) -> Iterator[None]:
    """Turns an `OSError` inside (a full disk, say) into a `FileError` that names the path and gives advice."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Expected to write {path}, found that it cannot be ({error}). {advice}") from error


@contextmanager
def lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a lock file against all other writers, until the process ends at the latest. The file itself stays."""
    from filelock import FileLock, Timeout

    held = FileLock(path, timeout=0)
    try:
        held.acquire()
    except Timeout as error:
        raise FileError(
            f"Expected to be the only one writing to {Path(path).parent}, found another who does: wait until it "
            "has ended, or write elsewhere."
        ) from error
    try:
        yield
    finally:
        held.release()


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
