"""`OutputsWriter`: a folder of outputs written batch by batch, which a run that was killed at any moment goes on with.

Rows are appended to the `.npy` files, and count once `outputs.json` says so. They are on the disk before it does; what
lies beyond is cut off when the next run begins.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from posthoc.collect.file_arrays import NAMES, Array, stored
from posthoc.collect.folder import DAMAGED, MANIFEST, ArraySpec, Manifest, array_path, read_document
from posthoc.collect.outputs import Outputs
from posthoc.errors import DataError, FileError, OptionError
from posthoc.io import lock, require_writable, sync_folder, writing
from posthoc.validation import require_finite

__all__ = ["LOCK", "OutputsWriter", "require_ours"]

LOCK = ".lock"
COMMIT_SECONDS = 5.0
"""How long appended rows may wait until they count: the most that a killed run loses."""


class OutputsWriter:
    """Writes `Outputs` to a folder as they come, going on where an earlier run ended.

        with OutputsWriter("train", identity={"network": fingerprint(model)}) as writer:
            for batch in batches_from(writer.rows):  # rows that an earlier run left need not be made again
                writer.append(batch)
            writer.finish()

    `identity` is a JSON mapping of all that the rows depend on; a folder begun with another is refused, unless `force`
    starts it over. Left without `finish`, also by an exception, the folder keeps its rows and stays unfinished.
    """

    def __init__(self, folder: str | os.PathLike[str], *, identity: Mapping[str, Any], force: bool = False) -> None:
        self.folder = Path(folder)
        self._files: dict[str, GrowingFile] = {}
        self._held = ExitStack()
        try:
            with writing(self.folder, "Make it writable, or choose another folder."):
                self._manifest = self._begin(as_json(identity), force=force)
                self._rows = self._manifest.rows
                self._open_files(self._manifest.arrays)
        except BaseException:
            self._held.close()
            raise
        self._open = True
        self._committed_at = time.monotonic()

    @property
    def rows(self) -> int:
        """How many rows there are, those of an earlier run included."""
        return self._rows

    def append(self, outputs: Outputs) -> None:
        """Adds rows of the same arrays, types and widths as those before. A few seconds later they are safe."""
        self._require_open()
        if not len(outputs):
            return
        arrays = self._fitting(outputs)
        with self._writing():
            if not self._files:
                self._open_files({name: ArraySpec.of(array) for name, array in arrays.items()})
                sync_folder(self.folder)
            for name, array in arrays.items():
                self._files[name].write(self._rows, array)
            self._rows += len(outputs)
            if time.monotonic() - self._committed_at >= COMMIT_SECONDS:
                self._commit()

    def finish(self) -> None:
        """Marks the folder complete, so that it can be opened, and closes it for writing."""
        self._require_open()
        if not self._rows:
            raise DataError(f"Expected at least one row to finish {self.folder} with, got none: append some first.")
        with self._writing():
            for file in self._files.values():
                file.seal(self._rows)
            self._record(complete=True)
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        try:
            with self._writing():
                self._commit()
        except FileError:
            if error is None:  # otherwise what went wrong first is the news
                raise
        finally:
            self._close()

    def _begin(self, identity: dict[str, Any], *, force: bool) -> Manifest:
        if self.folder.is_dir():
            require_ours(self.folder)
        else:
            require_writable(self.folder).mkdir(exist_ok=True)
        self._held.enter_context(lock(self.folder / LOCK))
        return begin(self.folder, identity, force=force)

    def _commit(self) -> None:
        if self._rows > self._manifest.rows:
            for file in self._files.values():
                file.sync(self._rows)
            self._record(complete=False)
        self._committed_at = time.monotonic()

    def _record(self, *, complete: bool) -> None:
        specs = {name: file.spec for name, file in self._files.items()}
        manifest = Manifest(self._rows, complete, self._manifest.identity, specs)
        manifest.write(self.folder)
        self._manifest = manifest

    def _open_files(self, specs: Mapping[str, ArraySpec]) -> None:
        self._files = {
            name: self._held.enter_context(closing(GrowingFile(array_path(self.folder, name), spec, self._rows)))
            for name, spec in specs.items()
        }

    def _fitting(self, outputs: Outputs) -> dict[str, Array]:
        """The arrays of a batch, checked: nothing looks at their values again."""
        arrays = stored(outputs)
        specs = {name: ArraySpec.of(array) for name, array in arrays.items()}
        known = {name: file.spec for name, file in self._files.items()} or specs
        if specs != known:
            raise DataError(f"Expected {describe(known)}, as in the rows before, got {describe(specs)}.")
        for name, spec in specs.items():
            if not spec.row_bytes:
                raise DataError(f"Expected at least one column of {name}, got none.")
            require_finite(getattr(outputs, name), name, first_row=self._rows)
        return arrays

    def _require_open(self) -> None:
        if not self._open:
            raise FileError(f"Expected a folder open for writing, found that {self.folder} was finished or left.")

    def _writing(self) -> AbstractContextManager[None]:
        safe = self._manifest.rows
        return writing(self.folder, f"Its first {safe} rows are safe: make room for more, then run again to go on.")

    def _close(self) -> None:
        self._open = False
        self._held.close()


class GrowingFile:
    """A `.npy` file that rows are added to; until it is sealed, its header does not say how many."""

    def __init__(self, path: Path, spec: ArraySpec, rows: int) -> None:
        self.path, self.spec = path, spec
        self._start = len(spec.header(0))
        self._file = path.open("r+b" if rows else "w+b", buffering=0)
        try:
            if rows:
                spec.read_header(self._file, path)
                self._cut(rows)
            else:
                self._put(0, spec.header(0))
        except BaseException:
            self._file.close()
            raise

    def write(self, row: int, array: Array) -> None:
        """Puts rows in place, the first as number `row`."""
        self._put(self._end(row), np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def sync(self, rows: int) -> None:
        """Cuts off what lies beyond so many rows, and waits until they are on the disk."""
        self._cut(rows)
        os.fsync(self._file.fileno())

    def seal(self, rows: int) -> None:
        """As `sync`, and says in the header how many there are."""
        self._put(0, self.spec.header(rows))
        self.sync(rows)

    def close(self) -> None:
        self._file.close()

    def _end(self, rows: int) -> int:
        return self._start + rows * self.spec.row_bytes

    def _put(self, at: int, data: bytes | memoryview) -> None:
        self._file.seek(at)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _cut(self, rows: int) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size < self._end(rows):
            raise FileError(f"Expected {self._end(rows)} bytes or more in {self.path}, found {size}. {DAMAGED}")
        self._file.truncate(self._end(rows))


def require_ours(folder: Path) -> None:
    """Refuses a folder with anything in it that is not ours to change."""
    if (folder / MANIFEST).exists():
        read_document(folder)
    elif strangers := [n for n in sorted(os.listdir(folder)) if n != LOCK and not n.startswith(f".{MANIFEST}.")]:
        raise FileError(
            f"Expected a new or empty folder, or one of outputs, found {folder} with {', '.join(strangers[:5])} in it: "
            "choose another."
        )


def begin(folder: Path, identity: dict[str, Any], *, force: bool) -> Manifest:
    """The manifest to go on from; the folder then holds nothing else."""
    for litter in folder.glob(f".{MANIFEST}.*"):  # of a run that was killed
        litter.unlink()
    before = None if force or not (folder / MANIFEST).exists() else Manifest.read(folder)
    if before is None or not before.rows:  # a run that failed before its first row leaves nothing to go on with
        manifest = Manifest(0, False, identity, {})
        manifest.write(folder)
    else:
        manifest = before
        require_same(folder, manifest.identity, identity)
        if manifest.complete:
            raise FileError(
                f"Expected a folder to go on with, found a complete one of {manifest.rows} rows: {folder}. Open it "
                "with open_outputs; to make it again, use --force (force=True)."
            )
    for name in NAMES:
        if name not in manifest.arrays:
            # Not truncated: someone may have mapped the file that is there.
            array_path(folder, name).unlink(missing_ok=True)
    return manifest


def require_same(folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses to add rows to those of another network, layer or data."""
    values = {key: [shown(mapping, key) for mapping in (there, here)] for key in sorted(there.keys() | here.keys())}
    differing = {key: pair for key, pair in values.items() if pair[0] != pair[1]}
    if differing:
        lines = "; ".join(f"{key}: {old} there, {new} now" for key, (old, new) in differing.items())
        raise FileError(
            f"Expected to go on with the outputs in {folder}, found that they are of something else ({lines}). "
            "Collect into another folder, or start this one over with --force (force=True)."
        )


def shown(mapping: dict[str, Any], key: str) -> str:
    return json.dumps(mapping[key]) if key in mapping else "nothing"


def as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity as it is when it is read back, in a fixed order."""
    try:
        return dict(json.loads(json.dumps(dict(identity), sort_keys=True)))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"Expected identity to be a mapping that JSON can hold, got {identity!r} ({error})."
        ) from error


def describe(specs: Mapping[str, ArraySpec]) -> str:
    return ", ".join(f"{name} of {spec}" for name, spec in specs.items())
