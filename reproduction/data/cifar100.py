"""CIFAR-100: small photographs of a hundred kinds of things."""

from __future__ import annotations

import os

import numpy as np
import torch

from posthoc.errors import FileError
from posthoc.validation import choice
from reproduction.data.archives import opened
from reproduction.data.dataset import Dataset
from reproduction.data.download import Remote, Shelf

__all__ = ["cifar100"]

CIFAR100 = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    "cifar-100-binary.tar.gz",
    "md5:03b5dce01913d631647c71ecec9e9cb8",  # as its page publishes it
)
IMAGES = {"train": 50_000, "test": 10_000}
RECORD, CLASSES = 2 + 3 * 32 * 32, 100
"""Bytes of an image: its group of classes, its class, then its three colours one after the other."""
NAMES = "fine_label_names.txt"


def cifar100(data_dir: str | os.PathLike[str] | None = None, part: str = "test") -> Dataset:
    """The 10,000 test images or the 50,000 for training: from `cifar-100-binary.tar.gz`, or its files, in the folder
    `cifar100`; or a download."""
    choice("part", part, tuple(IMAGES))
    shelf = Shelf("cifar100", data_dir)
    found = shelf.find(CIFAR100.filename, f"{part}.bin", f"cifar-100-binary/{part}.bin")
    with opened(found[0] if found else shelf.get(CIFAR100)) as read:
        content, names = read(f"{part}.bin"), tuple(read(NAMES).decode("ascii", "replace").split())
    if len(content) != IMAGES[part] * RECORD:
        raise FileError(
            f"Expected {IMAGES[part] * RECORD} bytes in {part}.bin of CIFAR-100, found {len(content)}: download it "
            "again."
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD)
    images, labels = records[:, 2:].reshape(-1, 3, 32, 32), records[:, 1].astype(np.int64)
    if len(names) != CLASSES or labels.max() >= CLASSES:
        raise FileError(
            f"Expected {CLASSES} classes of CIFAR-100, found {len(names)} names in {NAMES} and classes up to "
            f"{labels.max()} in {part}.bin: download it again."
        )
    pixels = torch.from_numpy(np.ascontiguousarray(images))
    return Dataset("CIFAR-100", f"CIFAR-100, {part}", pixels, torch.from_numpy(labels), classes=names)
