"""Outputs like those of a large image classifier, made up: seeded, of any size, in memory or in a mapped folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from posthoc import Outputs
from posthoc.collect import OutputsWriter, open_outputs, read_identity
from posthoc.errors import FileError

__all__ = ["Simulated"]

CHUNK = 8192
"""Rows made from one seed, so that rows do not depend on how many are asked for."""
MARGIN, RIGHT = 8.0, 0.8
"""How far the logit of the predicted class stands out, and how often it is the true one."""


@dataclass(frozen=True)
class Simulated:
    """A classifier's outputs on so many points: features in one cloud a class, and labels that are sometimes others."""

    rows: int
    classes: int
    features: int
    dtype: str = "float32"

    def outputs(self) -> Outputs:
        """All of it in memory."""
        chunks = list(self.chunks())
        columns = {name: torch.cat([getattr(c, name) for c in chunks]) for name in ("outputs", "targets", "features")}
        return Outputs.trusted(**columns)

    def folder(self, path: str | os.PathLike[str]) -> str:
        """The path of a mapped folder of it, made or gone on with unless it is there."""
        identity = {"simulated": asdict(self)}
        if not self._there(path, identity):
            with OutputsWriter(path, identity=identity) as writer:
                for chunk in self.chunks(writer.rows):
                    writer.append(chunk)
                writer.finish()
        return os.fspath(path)

    def chunks(self, first: int = 0) -> Iterator[Outputs]:
        """Some rows at a time, from the first of a chunk on."""
        centers = normal(self.classes, self.features, seed=0)
        for start in range(first, self.rows, CHUNK):
            some = self._chunk(start, centers)[: self.rows - start]
            yield some

    def _chunk(self, start: int, centers: Tensor) -> Outputs:
        g = torch.Generator().manual_seed(1 + start)
        dtype: torch.dtype = getattr(torch, self.dtype)
        said = torch.randint(self.classes, (CHUNK,), generator=g)
        right = torch.rand(CHUNK, generator=g) < RIGHT
        truth = torch.where(right, said, torch.randint(self.classes, (CHUNK,), generator=g))
        features = torch.randn(CHUNK, self.features, generator=g).add_(centers[said])
        logits = torch.randn(CHUNK, self.classes, generator=g)
        logits[torch.arange(CHUNK), said] += MARGIN
        return Outputs.trusted(outputs=logits.to(dtype), targets=truth, features=features.to(dtype))

    def _there(self, path: str | os.PathLike[str], identity: dict[str, object]) -> bool:
        try:
            return read_identity(path) == identity and len(open_outputs(path)) == self.rows
        except FileError:  # not there, or not finished
            return False


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
