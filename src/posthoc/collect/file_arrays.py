"""Files of named arrays that are read whole, `.npz` and `.safetensors`; arrays as tensors and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, FileError

__all__ = [
    "NAMES",
    "TEXT_ADVICE",
    "read_npz",
    "read_safetensors",
    "stored",
    "tensor_of",
    "write_npz",
    "write_safetensors",
]

Array = np.ndarray[Any, Any]

NAMES = tuple(field.name for field in fields(Outputs))

TEXT_ADVICE = "map the classes to integers from 0 (their places in the sorted list of names, say) and save again"


def tensor_of(array: Array, name: str) -> Tensor:
    """An array of a file as a tensor; half precision, which is for the disk, becomes float32."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind in "US":
        raise DataError(f"Expected numbers as {name}, got text ({array.dtype}): {TEXT_ADVICE}.")
    if kind not in "fiub":
        raise DataError(f"Expected numbers as {name}, got an array of {array.dtype}.")
    if kind == "u":
        array = array.astype(np.int64)
    elif kind == "f" and size not in (4, 8):
        array = array.astype(np.float32 if size < 4 else np.float64)
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(array, native, ["C_CONTIGUOUS", "WRITEABLE"]))


def stored(outputs: Outputs) -> dict[str, Array]:
    """The arrays to put into a file. What NumPy has no type for becomes the next wider one that it has: bfloat16
    becomes float32, without loss."""
    if not isinstance(outputs, Outputs):
        raise DataError(f"Expected posthoc.Outputs to write, got {type(outputs).__name__}.")
    parts = {name: getattr(outputs, name) for name in NAMES}
    return {name: array_of(part, name) for name, part in parts.items() if part is not None}


def array_of(tensor: Tensor, name: str) -> Array:
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        raise DataError(f"Expected real numbers as {name}, got {tensor.dtype}.")
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    array: Array = tensor.contiguous().numpy()
    return array.astype(np.int64) if array.dtype.kind == "u" else array


def read_npz(path: Path) -> dict[str, Tensor]:
    """The arrays of a file that `np.savez` wrote; names that are not ours are left alone."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = file.files
            arrays = {name: file[name] for name in NAMES if name in found}
    except Exception as error:  # a damaged archive fails in many ways
        raise FileError(
            f"Expected an .npz file of arrays of numbers, found one in {path} that cannot be read ({error}). "
            "A truncated file must be saved again; arrays of objects must be turned into numbers first."
        ) from error
    require_outputs(path, found)
    if foreign := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise FileError(f"Expected arrays in {path}, found something else as {', '.join(foreign)}: save it again.")
    return {name: tensor_of(array, name) for name, array in arrays.items()}


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """As `np.savez` does."""
    named: dict[str, Any] = dict(arrays)
    np.savez(path, **named)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; names that are not ours are left alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in NAMES if name in found}
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"Expected a safetensors file, found one in {path} that cannot be read ({error}). "
            "A truncated file must be saved again."
        ) from error
    require_outputs(path, found)
    return {name: tensor.float() if is_half(tensor) else tensor for name, tensor in tensors.items()}


def write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    """As safetensors' `save_file` does."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file({name: array.copy() for name, array in arrays.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


def require_outputs(path: Path, found: Iterable[str]) -> None:
    if "outputs" not in found:
        raise FileError(
            f"Expected an array named outputs in {path} (and targets, features, inputs where there are any), found "
            f"{', '.join(found) or 'none'}: save it with posthoc's save_outputs, or rename the arrays."
        )
