"""Files that are whole or not there: safetensors with a versioned JSON config inside, written atomically."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from posthoc.errors import FileError

__all__ = ["atomic_path", "check_shapes", "read_head", "require_writable", "write_head"]

FORMAT = "posthoc-head"
VERSION = 1
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


def write_head(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Writes tensors and config; equal contents give equal bytes."""
    from safetensors.torch import save_file

    document = {"format": FORMAT, "version": VERSION, **config}
    # One metadata key: the order of several would not be fixed.
    metadata = {"posthoc": json.dumps(document, sort_keys=True)}
    with atomic_path(path) as temporary:
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in sorted(tensors.items())}, temporary, metadata)


def read_head(path: str | os.PathLike[str], method: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and config of a file that `write_head` wrote for this method."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileError(f"Expected a saved {method} head, found no file at {path}.")
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
        config = json.loads(metadata["posthoc"])
    except (KeyError, ValueError):
        config = None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise FileError(
            f"Expected a file written by posthoc's save(), found a safetensors file of another origin: {path}."
        )
    if config.get("version") != VERSION:
        raise FileError(
            f"Expected format version {VERSION}, found {config.get('version')} in {path}: "
            "load it with the posthoc that wrote it, or fit and save again with this one."
        )
    if missing := {"method", "options", "likelihood", "layer", "width", "network"} - config.keys():
        names = ", ".join(sorted(missing))
        raise FileError(f"Expected a config with {names}, found none in {path}: the file was changed; save it again.")
    if config["method"] != method:
        raise FileError(f"Expected a head of method {method!r}, found one of {config['method']!r} in {path}.")
    return tensors, config


def check_shapes(
    path: str | os.PathLike[str], found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses a file whose tensors are not the ones its config describes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    if shapes == dict(expected):
        return
    describe: Callable[[Mapping[str, Any]], str] = lambda d: ", ".join(f"{k} {v}" for k, v in sorted(d.items()))  # noqa: E731
    wrong = {k for k in shapes.keys() | expected.keys() if shapes.get(k) != expected.get(k)}
    raise FileError(
        f"Expected tensors {describe({k: expected.get(k, 'none') for k in wrong})}; "
        f"found {describe({k: shapes.get(k, 'none') for k in wrong})} in {path}: the file was changed; save it again."
    )
