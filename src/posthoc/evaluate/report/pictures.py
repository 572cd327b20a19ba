"""Small pictures as PNG."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor

from posthoc.errors import DataError

__all__ = ["png"]


def png(image: Tensor) -> bytes:  # (3, H, W) in uint8
    """A picture as the bytes of a PNG file: eight bits a colour, rows as they are."""
    if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
        raise DataError(f"Expected a picture of bytes, (3, H, W), got {image.dtype} of {tuple(image.shape)}.")
    _, height, width = image.shape
    rows = image.permute(1, 2, 0).reshape(height, 3 * width)
    unfiltered = torch.cat([rows.new_zeros(height, 1), rows], 1)  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(unfiltered.contiguous().cpu().numpy().tobytes(), 9)
    parts = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in parts)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
