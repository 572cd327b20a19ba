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

from posthoc.errors import FileError, LayerError, MissingExtraError, OptionError, PosthocError

HEAD = "posthoc-head"
VERSION = 2
MAX_OUTPUTS = 2**20
"""Outputs that a head may have whatever its tensors."""
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
    check: Callable[[Path], object] | None = None,
) -> None:
    """Writes tensors and a config as safetensors. Equal contents give equal bytes.

    Args:
        path: The file.
        tensors: Tensors by name.
        format: What kind of file it is, "posthoc-head" for example.
        config: JSON to store beside the tensors.
        check: Called with the path of the complete temporary file. If it raises, nothing is written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    document = {"format": format, "version": VERSION, **config, "sha256": contents_sha256(tensors, config)}
    # One metadata key: the order of several would not be fixed.
    metadata = {"posthoc": json.dumps(document, sort_keys=True)}
    plain = {k: v.detach().cpu().contiguous().clone() for k, v in sorted(tensors.items())}
    with writing(path, "Make room, or write elsewhere."), atomic_path(path) as temporary:
        try:
            save_file(plain, temporary, metadata)
        except SafetensorError as error:  # which is how a full disk is reported
            raise OSError(str(error)) from error
        if check is not None:
            check(temporary)


def read_tensors(path: str | os.PathLike[str], format: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the config of a file that `write_tensors` wrote in this format.

    Raises:
        FileError: It is another file, of another version, or was changed since it was written.
    """
    from safetensors import SafetensorError, safe_open

    path, kind = Path(path), format.removeprefix("posthoc-")
    if not path.is_file():
        raise FileError(f"Expected a saved {kind}, found no file at {path}.")
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
        document = json.loads(metadata["posthoc"])
    except (KeyError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.pop("format", None) != format:
        raise FileError(f"Expected a {kind} that posthoc saved, found a safetensors file of another origin: {path}.")
    if (version := document.pop("version", None)) != VERSION:
        raise FileError(
            f"Expected format version {VERSION}, found {version!s:.20} in {path}: "
            "load it with the posthoc that wrote it, or fit and save again with this one."
        )
    if document.pop("sha256", None) != contents_sha256(tensors, document):
        raise FileError(
            f"Expected the {kind} as it was written, found a SHA-256 that differs from its contents in {path}: the "
            "file was damaged or changed. Make it again."
        )
    return tensors, document


def contents_sha256(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """The SHA-256 of tensors and of a config."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).repeat(1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


HEADER = {
    "method": str,
    "config": dict,
    "likelihood": dict,
    "shapes": dict,
    "rounding": list | None,
    "network": str | None,
    "columns": list | None,
    "classes": list | None,
}
"""The types in the header of a head file."""


def write_head(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    header: Mapping[str, Any],
    *,
    check: Callable[[Path], object] | None = None,
) -> None:
    """Writes a fitted head; for `check` see `write_tensors`."""
    require_finite_tensors(path, tensors)
    write_tensors(path, tensors, HEAD, header, check=check)


def read_head(path: str | os.PathLike[str], method: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write_head` wrote, of this method unless it is None."""
    tensors, header = read_tensors(path, HEAD)
    for name, kind in HEADER.items():
        if name not in header or not isinstance(header[name], kind):
            found = reprlib.repr(header.get(name))
            raise FileError(f"Expected a valid {name} in the header of {path}, found {found}: save it again.")
    if method is not None and header["method"] != method:
        raise FileError(f"Expected a head of method {method!r}, found one of {header['method']!r} in {path}.")
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


def check_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuses tensors of other names, shapes or dtypes than those expected."""
    found, wanted = described(tensors), described(expected)
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if wrong:
        expected_text, found_text = (
            ", ".join(f"{name} {side.get(name, 'none')}" for name in wrong) for side in (wanted, found)
        )
        raise FileError(
            f"Expected tensors {expected_text}; found {found_text} in {path}: the file was changed; save it again."
        )


def described(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The shape and dtype of each tensor."""
    return {name: f"{tuple(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()}


def sound_shapes(shapes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """The shapes in a header, if no number in them is larger than the tensors, so that nothing larger is allocated."""
    most = max([64, *(tensor.numel() for tensor in tensors.values())])
    widths, widest = shapes["outputs"] or (), max(most, MAX_OUTPUTS)  # temperatures have no number for each output
    if not all(type(size) is int and size > 0 for size in widths):
        raise ValueError(f"outputs of width {widths}")
    too_large = any(isinstance(number, int) and not -1 <= number <= most for number in leaves(shapes["fitted"]))
    if tensors and (too_large or max(widths, default=0) > widest):
        raise ValueError("shapes that are larger than its tensors")
    return shapes


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and mappings."""
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(part)
    else:
        yield value


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an error inside into one that names the file; those that may be about the caller's arguments are kept."""
    try:
        yield
    except (FileError, LayerError, MissingExtraError, torch.cuda.OutOfMemoryError):
        raise
    except OptionError as error:
        error.add_note(f"This was while loading {path}.")
        raise
    except Exception as error:
        found = str(error) if isinstance(error, PosthocError) else repr(error)
        raise FileError(f"{path} cannot be read by this version of posthoc: {found:.500}") from error
