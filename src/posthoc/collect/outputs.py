"""`Outputs`: a predictor's inputs, features and outputs, and the targets, one row a point. All a method needs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posthoc.collect.loaders import as_tensor, listed
from posthoc.errors import DataError
from posthoc.validation import require_finite

NAMES = ("outputs", "targets", "features", "inputs", "claimed_std")
"""The parts of `Outputs`."""

COLUMNS = {"outputs": "columns", "features": "feature_columns", "inputs": "input_columns"}
"""The attributes that hold the names of the columns of each block."""

NO_PARTS = dict.fromkeys((*NAMES, *COLUMNS.values()))
"""All attributes of `Outputs`, with None."""

ROWS_CHECKED = 2**14
"""The number of rows that are looked at together for values that are not finite."""

HASHED_WHOLE, HASHED_ROWS = 2**30, 2**16
"""Up to so many bytes all rows are hashed; beyond, so many of them, evenly spaced."""


@dataclass(frozen=True, eq=False, repr=False)
class Outputs:
    """A predictor's outputs on N points, with the targets and, where known, the features and inputs behind them.

    Tensors, NumPy arrays or nested lists; features and inputs of more than two dimensions are flattened to rows.
    `columns`, `feature_columns` and `input_columns` are the names of the columns of `outputs`, `features` and `inputs`,
    where a table (a DataFrame, or a file) gave them. `claimed_std` is the standard deviation that a regression network
    claims for each of its outputs (see `FMGP(scale=...)`).
    """

    outputs: Tensor  # (N,) or (N, C), real
    targets: Tensor | None = None  # (N,) of classes, or as outputs
    features: Tensor | None = None  # (N, D)
    inputs: Tensor | None = None  # (N, D)
    columns: tuple[str, ...] | None = None  # C names
    feature_columns: tuple[str, ...] | None = None  # D names
    input_columns: tuple[str, ...] | None = None  # D names
    claimed_std: Tensor | None = None  # as outputs, above zero

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if value is None:
                continue
            if name in COLUMNS and getattr(self, COLUMNS[name]) is None:
                object.__setattr__(self, COLUMNS[name], column_names(value))
            tensor = as_tensor(value).detach()
            if tensor.ndim < 1:
                raise DataError(f"Expected {name} with one row a point, got a single number.")
            if len(tensor) and not tensor.numel():
                raise DataError(f"Expected at least one column of {name}, got shape {tuple(tensor.shape)}.")
            require_finite(tensor, name)
            if name in ("features", "inputs"):
                tensor = in_columns(tensor)
            object.__setattr__(self, name, tensor if name == "outputs" else tensor.to(self.outputs.device))
            if len(tensor) != len(self):
                raise DataError(f"Expected as many rows of {name} as of outputs, {len(self)}, got {len(tensor)}.")
        if (claimed := self.claimed_std) is not None and (
            claimed.shape != self.outputs.shape or not bool((claimed > 0).all())
        ):
            found = f"shape {tuple(claimed.shape)} with {int((claimed <= 0).sum())} values of at most zero"
            raise DataError(
                f"Expected a claimed_std above zero for every output, {tuple(self.outputs.shape)}, got {found}."
            )
        if not self.outputs.is_floating_point():
            raise DataError(f"Expected real-valued outputs, got {self.outputs.dtype}.")
        for name, names in self.named().items():
            if len(names) != getattr(self, name).shape[1:].numel():
                raise DataError(f"Expected a name for every column of {name}, got {listed(names)}.")

    @classmethod
    def trusted(cls, **parts: Any) -> Outputs:
        """Outputs of tensors that were checked before, such as those of a mapped file: their values are not read."""
        outputs = object.__new__(cls)
        outputs.__dict__.update(NO_PARTS, **parts)
        return outputs

    def parts(self) -> dict[str, Tensor]:
        """The tensors that there are, by name."""
        return {name: part for name in NAMES if (part := getattr(self, name)) is not None}

    def named(self) -> dict[str, tuple[str, ...]]:
        """The names of columns that are known, by block."""
        return {block: names for block, name in COLUMNS.items() if (names := getattr(self, name)) is not None}

    def require_finite(self, first_row: int = 0) -> None:
        """Refuses NaN and infinity, block by block: the values of a mapped folder may have changed on the disk."""
        for start in range(0, len(self), ROWS_CHECKED):
            for name, part in self.parts().items():
                require_finite(part[start : start + ROWS_CHECKED], name, first_row=first_row + start)

    def __len__(self) -> int:
        return self.outputs.shape[0]

    def __getitem__(self, rows: Any) -> Outputs:
        """Some rows: one by its number, a slice, a mask or a tensor of numbers. The result keeps the row axis."""
        return self._map(lambda part: part[as_rows(rows, len(self))])

    def __iter__(self) -> Iterator[Outputs]:
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        outputs = self.outputs.float() if self.outputs.dtype == torch.bfloat16 else self.outputs
        return np.array(outputs.cpu().numpy(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        shapes = [f"{name}={tuple(part.shape)}" for name, part in self.parts().items()]
        return f"Outputs({', '.join(shapes)}, {str(self.outputs.dtype).removeprefix('torch.')})"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    def space(self, name: str) -> Tensor | None:
        """A block of kernel coordinates by name: "features", "inputs" or "outputs"."""
        block: Tensor | None = getattr(self, name)
        return in_columns(block) if block is not None else None

    def to(self, device: torch.device) -> Outputs:
        """The same on a device."""
        if all(part.device == device for part in self.parts().values()):
            return self
        return self._map(lambda part: part.to(device, non_blocking=part.is_pinned()))

    def clone(self) -> Outputs:
        """A copy in memory of its own."""
        return self._map(torch.clone)

    def pinned(self) -> Outputs:
        """A copy in memory that a GPU reads from without the processor's help."""
        return self._map(lambda part: part.pin_memory())

    def spread(self, most: int) -> Outputs:
        """At most so many rows from all over: enough to take units from, however many there are. One at random from
        each stretch, so that what repeats itself in the data is not met at the same place every time."""
        if len(self) <= most:
            return self
        draws = torch.rand(most, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rows = ((torch.arange(most) + draws) * (len(self) / most)).long().clamp_max(len(self) - 1)
        return self[rows.to(self.outputs.device)]

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return sum(part.nbytes for part in self.parts().values())

    def digest(self) -> dict[str, Any]:
        """What tells these outputs from others: shapes and a hash of the values, or of some of very many rows."""
        hashed = hashlib.sha256()
        for part in (self if self.nbytes <= HASHED_WHOLE else self.spread(HASHED_ROWS)).parts().values():
            hashed.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        shapes = {name: [str(part.dtype), *part.shape] for name, part in self.parts().items()}
        return {**shapes, "sha256": hashed.hexdigest()}

    def only(self, *names: str) -> Outputs:
        """The same without features or inputs that nobody reads."""
        kept = ("outputs", "targets", *COLUMNS.values(), *names)
        return Outputs.trusted(**{name: getattr(self, name) for name in kept})

    def with_targets(self, targets: Tensor) -> Outputs:
        """The same with these targets, which were checked elsewhere."""
        return Outputs.trusted(**{**vars(self), "targets": targets})

    def with_outputs(self, outputs: Tensor) -> Outputs:
        """The same with these outputs, which were checked elsewhere."""
        return Outputs.trusted(**{**vars(self), "outputs": outputs})

    def with_claimed_variance(self) -> Outputs:
        """The same of outputs (N, 2C) that are means and variances: the means, with `claimed_std`."""
        means, variances = self.outputs.tensor_split(2, dim=-1)
        if self.outputs.ndim != 2 or means.shape != variances.shape or not bool((variances > 0).all()):
            found = (
                f"shape {tuple(self.outputs.shape)}, with {int((variances <= 0).sum())} values of at most zero there"
            )
            raise DataError(f"Expected outputs (N, 2 C): C means, then C variances above zero; got {found}.")
        return Outputs.trusted(**{**vars(self), "outputs": means, "claimed_std": variances.sqrt(), "columns": None})

    def _map(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        return Outputs.trusted(**vars(self) | {name: change(part) for name, part in self.parts().items()})


def in_columns(block: Tensor) -> Tensor:  # (N, D)
    """A block with the axes after the first as one."""
    return block.flatten(1) if block.ndim > 1 else block[:, None]


def join(parts: list[Outputs]) -> Outputs:
    """Consecutive batches of outputs as one."""
    parts = [part for part in parts if part.outputs.ndim and len(part)]
    if not parts:
        raise DataError("Expected at least one data point, got none: the loader is empty.")
    joined: dict[str, Any] = {name: stack([getattr(part, name) for part in parts], name) for name in NAMES}
    for name in COLUMNS.values():
        names = {getattr(part, name) for part in parts}
        joined[name] = names.pop() if len(names) == 1 else None
    return Outputs(**joined)


def stack(parts: list[Tensor | None], name: str) -> Tensor | None:
    """Concatenates the batches of one part of `Outputs`; None if no batch has it."""
    present = [part for part in parts if part is not None]
    if present and len(present) != len(parts):
        raise DataError(f"Expected {name} in every batch, got them in {len(present)} of {len(parts)}.")
    if any(part.ndim < 1 for part in present):
        raise DataError(f"Expected {name} in batches, got single numbers: put the data into a DataLoader, or stack it.")
    if len(widths := {tuple(part.shape[1:]) for part in present}) > 1:
        raise DataError(f"Expected {name} of one width, got batches of widths {sorted(widths)}.")
    return torch.cat(present) if present else None


def as_rows(rows: Any, length: int) -> Any:
    """An index that keeps the row axis: a single number becomes a slice of one row.

    Raises:
        IndexError: The number is not that of a row.

    Example:
        >>> as_rows(-1, 5), as_rows(2, 5)
        (slice(-1, None, None), slice(2, 3, None))
    """
    if isinstance(rows, Tensor) and rows.ndim:  # a mask or a tensor of one number counts as an index too
        return rows
    if isinstance(rows, slice):
        return rows if (rows.step or 1) > 0 else list(range(length))[rows]
    if isinstance(rows, list | np.ndarray) and np.ndim(rows) == 1:
        chosen = np.asarray(rows, None if len(rows) else int)
        if chosen.dtype.kind in "iub":
            return chosen
    try:
        row = index(rows)
    except TypeError:
        raise IndexError(f"Expected rows by number, slice, list or mask, got {rows!r:.80}: one index alone.") from None
    if not -length <= row < length:
        raise IndexError(f"Expected a row from 0 to {length - 1}, got {row}.")
    return slice(row, row + 1 or None)


def column_names(table: Any) -> tuple[str, ...] | None:
    """The names of the columns of a DataFrame if all of them are text; None for anything else."""
    found = getattr(table, "columns", None)
    names = tuple(found) if found is not None else ()
    return names if names and all(isinstance(name, str) for name in names) else None


def require_same_columns(fitted: Mapping[str, tuple[str, ...]], found: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses columns other than those of the fit, or in another order, of the blocks whose names are known of both."""
    for block in fitted.keys() & found.keys():
        before, now = fitted[block], found[block]
        if sorted(before) != sorted(now):
            raise DataError(f"Expected {block} from the columns of the fit, {listed(before)}, got {listed(now)}.")
        if before != now:
            advice = f'name them as there: --{block} {",".join(before)} (columns={{"{block}": [...]}})'
            raise DataError(f"Expected {block} in the order of the fit, got {listed(now)}: {advice:.500}.")


def require_width(outputs: Tensor, width: tuple[int, ...], *, one_score: bool) -> None:
    """Raises `DataError` for outputs whose rows have another shape than in `fit`; a single score of a classifier may
    be of shape (N,) or (N, 1)."""
    found = tuple(outputs.shape[1:])
    if found != width and not (one_score and math.prod(found) == math.prod(width) == 1):
        hint = "; a single point must be a batch of one, x[None]" if outputs.shape == width else ""
        raise DataError(f"Expected outputs of shape {('N', *width)} as in fit, got {('N', *found)}{hint}.")


def table_names(data: Any) -> tuple[str, ...] | None:
    """The names of the columns of inputs that are a table, alone or in a pair with their targets."""
    table = data[0] if isinstance(data, tuple) and data else data
    return column_names(table) if hasattr(table, "columns") else None
