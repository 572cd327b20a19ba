"""Files: written whole or not at all, locks, and safetensors with a versioned JSON config inside."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posthoc.errors import FileError, PosthocError

StrPath = str | os.PathLike[str]
Check = Callable[[Path], object]
"""A function of the path of a file that is written; if it raises, nothing is written."""

HEAD = "posthoc-head"
VERSION = 2
OUTPUTS_MANIFEST = "outputs.json"
"""The file that makes a folder one of outputs."""
LEFTOVER_SECONDS = 86400.0
"""Temporary files of this age were left by a process that was killed."""


def require_writable(path: StrPath) -> Path:
    """Returns the path if a file can be written there; call it before the work whose result the file takes.

    Raises:
        FileError: If there is no folder, or something else than a regular file at the path (a link, a device).
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileError(f"Expected a folder to write {target.name} into, found none at {target.parent}: create it.")
    if target.is_dir():
        raise FileError(f"Expected the path of a file to write, found a folder: {target}.")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise FileError(f"Expected the path of a regular file to write, found a link or a device: {target}.")
    require_access(target.parent)
    return target


def require_outside_outputs(path: Path) -> None:
    """Refuses a place inside a folder of outputs, or such a folder itself."""
    for folder in (path, *path.absolute().parents):
        if (folder / OUTPUTS_MANIFEST).exists() and (folder / "outputs.npy").exists():
            raise FileError(f"Expected a place outside folders of outputs, got {path}: write elsewhere.")


def require_folder(path: StrPath) -> Path:
    """Returns a folder that can be written to, and makes it if it is not there."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = "a file" if folder.is_file() else f"none that could be made ({error.strerror})"
        raise FileError(f"Expected a folder, found {found}: {folder}. Name another.") from error
    require_access(folder)
    return folder


def require_access(folder: Path) -> None:
    """Raises `FileError` for a folder that cannot be written to."""
    if not os.access(folder, os.W_OK):
        raise FileError(f"Expected a folder that can be written to, found one that cannot: {folder}.")


def require_regular(path: Path) -> None:
    """Refuses to read what may never end: pipes, devices, sockets."""
    if path.exists() and not path.is_file():
        raise FileError(f"Expected a regular file, found a pipe or a device: {path}. Save the data to a file first.")


@contextmanager
def atomic_path(path: StrPath) -> Iterator[Path]:
    """Gives a temporary path beside `path`, which is moved onto it at the end; after an error `path` is as it was.

    Temporary files that killed processes left beside `path` are removed after a day.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, atomic_path(f"{folder}/a.txt") as temporary:
        ...     _ = temporary.write_text("whole or not at all")
    """
    target = require_writable(path)
    temporary = temporary_beside(target, target.suffix)
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(target)
        raise
    finally:
        remove(temporary)


@contextmanager
def atomic_folder(path: StrPath) -> Iterator[Path]:
    """Gives the path of a folder to make beside `path`, which is moved into its place at the end; after an error `path`
    is as it was."""
    target = Path(path)
    if not target.is_dir():
        require_writable(target)
    new, old = temporary_beside(target, ""), temporary_beside(target, "")
    try:
        yield new
        if target.is_dir():  # a folder cannot be renamed onto one that is not empty
            os.replace(target, old)
        os.replace(new, target)
    finally:
        if old.exists() and not target.exists():
            os.replace(old, target)
        remove(new)
        remove(old)


def temporary_beside(target: Path, suffix: str) -> Path:
    """A new temporary name; leftovers of earlier ones are removed."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.tmp*"):
        with suppress(FileNotFoundError):  # of a process that ends just now
            if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                remove(path)
    return target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp{suffix}"


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def writing(path: StrPath, advice: str) -> Iterator[None]:
    """Turns an `OSError` inside (a full disk, say) into a `FileError` that names the path and gives advice."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"Expected to write {path}, found that it cannot be ({error}). {advice}") from error


@contextmanager
def lock(path: StrPath) -> Iterator[None]:
    """Holds a lock file against all other writers, until the process ends at the latest. The file itself stays."""
    from filelock import FileLock, Timeout

    try:
        held = FileLock(path, timeout=0).acquire()
    except Timeout as error:
        place = Path(path).parent
        raise FileError(f"Expected to be the only one writing to {place}, found another: wait for it.") from error
    with held:
        yield


def write_tensors(
    path: StrPath, tensors: Mapping[str, Tensor], format: str, config: Mapping[str, Any], check: Check | None = None
) -> None:
    """Writes tensors and a config, which is JSON, as safetensors of a format such as "posthoc-head".

    Equal contents give equal bytes. `check` gets the path of the complete temporary file.
    """
    from safetensors.torch import save

    document = {"format": format, "version": VERSION, **config, "sha256": contents_sha256(tensors, config)}
    # One metadata key: the order of several would not be fixed.
    metadata = {"posthoc": json.dumps(document, sort_keys=True)}
    plain = {k: v.detach().cpu().contiguous().clone() for k, v in sorted(tensors.items())}
    with writing(path, "Make room, or write elsewhere."), atomic_path(path) as temporary:
        temporary.write_bytes(save(plain, metadata))
        if check is not None:
            check(temporary)


def read_tensors(path: StrPath, format: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
            document = json.loads((file.metadata() or {}).get("posthoc", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError) as error:
        raise FileError(f"Expected a {kind} that posthoc saved, found another or a damaged file: {path}.") from error
    if document.pop("format", None) != format:
        raise FileError(f"Expected a {kind} that posthoc saved, found a safetensors file of another origin: {path}.")
    if (version := document.pop("version")) != VERSION:
        raise FileError(f"Expected format version {VERSION}, found {version} in {path}: use the posthoc that wrote it.")
    if document.pop("sha256") != contents_sha256(tensors, document):
        raise FileError(f"Expected a {kind} as it was written, found a damaged or changed one: {path}. Make it again.")
    return tensors, document


def contents_sha256(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """The SHA-256 of tensors and of a config."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).repeat(1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_head(
    path: StrPath, tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, check: Check | None = None
) -> None:
    """Writes a fitted head, whose parameters must be finite; for `check` see `write_tensors`."""
    # The bounds that GPyTorch keeps beside its parameters may be infinite.
    reals = {k: t for k, t in tensors.items() if t.is_floating_point() and not k.endswith("_bound")}
    if wrong := [k for k, tensor in reals.items() if not bool(tensor.isfinite().all())]:
        raise FileError(f"Expected finite parameters, found NaN or infinity in {', '.join(wrong)}: fit again.")
    write_tensors(path, tensors, HEAD, header, check)


def read_head(path: StrPath, method: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write_head` wrote, of this method unless it is None."""
    tensors, header = read_tensors(path, HEAD)
    if method is not None and header["method"] != method:
        raise FileError(f"Expected a head of method {method!r}, found one of {header['method']!r} in {path}.")
    return tensors, header


@contextmanager
def parsing(path: Path, form: str) -> Iterator[None]:
    """Makes one error of the many that a damaged file may raise."""
    try:
        yield
    except PosthocError:
        raise
    except Exception as error:
        raise FileError(f"Expected {form}, found that {path} cannot be read ({error}): save it again.") from error


@contextmanager
def reading(path: StrPath) -> Iterator[None]:
    """Names the file in an error; errors that may be about the caller's arguments or the device keep their type."""
    try:
        yield
    except (PosthocError, torch.cuda.OutOfMemoryError) as error:
        error.add_note(f"This was while loading {path}.")
        raise
    except Exception as error:
        raise FileError(f"{path} cannot be read by this version of posthoc: {error!r:.500}") from error
