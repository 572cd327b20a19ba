"""Outputs in files come back to the bit, what is wrong with a file is said, and a killed run goes on."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from posthoc import FMGP, DataError, FileError, OptionError, Outputs
from posthoc.collect import OutputsWriter, open_outputs, read_identity, save_outputs
from posthoc.collect.folder import Manifest
from posthoc.collect.outputs import NAMES
from posthoc.io import atomic_path
from tests.cases import QUICK, Trap

FORMS = (".npz", ".safetensors", ".parquet", "")


@pytest.fixture(params=FORMS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A name for data of each form."""
    return tmp_path / f"data{request.param}"


def some(rows: int = 30, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Outputs:
    """Outputs, classes, features, inputs and claimed deviations with awkward numbers among them."""
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(rows, 4, generator=draw).to(dtype)
    outputs[0, 0], outputs[0, 1], outputs[0, 2] = -0.0, torch.finfo(dtype).smallest_normal / 2, torch.finfo(dtype).max
    return Outputs(
        outputs,
        torch.randint(4, (rows,), generator=draw),
        torch.randn(rows, 7, generator=draw).to(dtype),
        torch.randn(rows, 3, generator=draw, dtype=torch.float64),
        claimed_std=0.1 + torch.rand(rows, 4, generator=draw).to(dtype),
    )


def bits(outputs: Outputs) -> dict[str, Any]:
    """Names, types, shapes and bytes."""
    return {k: (v.dtype, tuple(v.shape), v.contiguous().numpy().tobytes()) for k, v in outputs.parts().items()}


def written(folder: Path, data: Outputs, size: int = 7, **options: Any) -> None:
    """All of data, from where the folder is, in batches of `size`."""
    with OutputsWriter(folder, **{"identity": {"network": "abc"}, **options}) as writer:
        for start in range(writer.rows, len(data), size):
            writer.append(data[start : start + size])
        writer.finish()


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """The system writes no file larger than this, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "data",
    [
        some(),
        some(dtype=torch.float64),
        Outputs(torch.randn(5)),
        Outputs(torch.randn(5, 1), torch.randn(5, 1)),
        Outputs(torch.randn(5, 2, 3), torch.arange(5, dtype=torch.int32)),
        Outputs(torch.randn(1, 4), features=torch.randn(1, 2, 3)),
        Outputs(torch.randn(6, 8).T[:, ::2], torch.tensor([True] * 8)),
    ],
    ids=["float32", "float64", "flat", "one column", "three axes", "one row", "strided"],
)
def test_every_format_gives_the_same_bits_back(data: Outputs, path: Path) -> None:
    save_outputs(data, path)
    if path.suffix == ".parquet" and data.targets is not None and not data.targets.is_floating_point():
        data = data.with_targets(data.targets.long())  # a table's whole numbers are of one type
    assert bits(open_outputs(path)) == bits(data)
    assert os.listdir(path.parent) == [path.name]


def test_half_precision_stays_on_disk_and_widens_in_memory(path: Path) -> None:
    data = some(2000, dtype=torch.float16)
    save_outputs(data, path)
    size = path.stat().st_size if path.suffix else sum(file.stat().st_size for file in path.iterdir())
    assert size < 2000 * (4 * 2 + 8 + 7 * 2 + 3 * 8 + 4 * 2) * 1.3
    assert data.features is not None
    assert data.claimed_std is not None
    claimed = data.claimed_std.float()
    wide = Outputs(data.outputs.float(), data.targets, data.features.float(), data.inputs, claimed_std=claimed)
    assert bits(open_outputs(path)) == bits(wide if path.suffix else data)


def test_bfloat16_is_stored_without_loss_and_the_format_is_known_from_the_content(path: Path) -> None:
    data = Outputs(torch.randn(9, 3).bfloat16())
    save_outputs(data, path)
    assert bits(open_outputs(str(path.rename(path.with_name("renamed.txt"))))) == bits(Outputs(data.outputs.float()))


def test_files_of_others_open_and_their_other_arrays_are_left_alone(tmp_path: Path) -> None:
    outputs = np.random.default_rng(0).normal(size=(6, 3))
    np.savez_compressed(tmp_path / "a.npz", outputs=outputs.astype(">f4"), epoch=3, names=np.array(["a"] * 6))
    assert bits(open_outputs(tmp_path / "a.npz")) == bits(Outputs(torch.from_numpy(outputs.astype(np.float32))))
    tensors = {"outputs": torch.randn(6, 3).bfloat16(), "targets": torch.arange(6).to(torch.uint8), "w": torch.zeros(2)}
    save_file(tensors, tmp_path / "b.safetensors", {"format": "pt"})
    assert bits(open_outputs(tmp_path / "b.safetensors")) == bits(Outputs(tensors["outputs"].float(), torch.arange(6)))


def test_folder_is_plain_npy_files_and_json(tmp_path: Path) -> None:
    data = some()
    save_outputs(data, tmp_path / "data")
    assert set(os.listdir(tmp_path / "data")) == {"outputs.json", *(f"{name}.npy" for name in NAMES)}
    for name in NAMES:
        array = np.load(tmp_path / "data" / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        assert np.array_equal(array, getattr(data, name).numpy())
    document = json.loads((tmp_path / "data" / "outputs.json").read_text())
    arrays = document.pop("arrays")
    assert document == {"format": "posthoc-outputs", "version": 1, "rows": 30, "complete": True, "identity": {}}
    assert arrays["outputs"] == {"dtype": "float32", "width": [4]}
    assert arrays["targets"] == {"dtype": "int64", "width": []}
    assert sorted(arrays) == sorted(NAMES)


def test_range_of_rows(path: Path) -> None:
    save_outputs(some(), path)
    for asked, first, last in (("[:12]", 0, 12), ("[12:]", 12, 30), ("[20:99]", 20, 30), ("[:]", 0, 30)):
        opened = open_outputs(f"{path}{asked}")
        assert bits(opened) == bits(some()[first:last])
        if path.suffix:  # the other rows are not kept in memory
            assert opened.outputs.untyped_storage().nbytes() == opened.outputs.numel() * 4
    for asked in ("[30:]", "[9:3]"):
        with pytest.raises(OptionError, match=r"Expected a range with rows in it.*there are 30"):
            open_outputs(f"{path}{asked}")


@pytest.mark.parametrize("asked", ["[]", "[5]", "[a:b]", "[1:2:3]", "[-5:]", "[:٣x]"])
def test_malformed_range_is_refused(asked: str, tmp_path: Path) -> None:
    save_outputs(some(), tmp_path / "data.npz")
    with pytest.raises(OptionError, match=r"Expected rows as in .*data\.npz\[:5000\], .* got \["):
        open_outputs(f"{tmp_path / 'data.npz'}{asked}")


def test_file_whose_name_ends_like_a_range_wins(tmp_path: Path) -> None:
    save_outputs(some(), tmp_path / "data.npz")
    save_outputs(some(9), tmp_path / "other.npz")
    (tmp_path / "other.npz").rename(tmp_path / "data.npz[:5]")
    assert len(open_outputs(tmp_path / "data.npz[:5]")) == 9
    assert len(open_outputs(f"{tmp_path / 'data.npz'}[:6]")) == 6


@pytest.mark.parametrize("form", [".npz", ".safetensors", ".parquet"])
def test_truncated_file_and_changed_numbers_are_refused(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{form}"
    save_outputs(some(200), path)
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = [data[:5], data[:100], data[:middle], data[:-1]]
    if form != ".safetensors":  # which has no checksum
        damaged.append(bytes([*data[:middle], data[middle] ^ 1, *data[middle + 1 :]]))
    for content in damaged:
        path.write_bytes(content)
        message = r"found that .* cannot be read" if len(content) == len(data) else "found"
        with pytest.raises(FileError, match=f"Expected a.*{message}"):
            open_outputs(path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"\x00" * 100, "something else"),
        (b"\x89HDF\r\n\x1a\n" + b"\x00" * 40, "something else"),
        (bytes(range(256)), "something else"),
        (pickle.dumps([1.0]), "a pickle, which is never opened"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "a single .npy array"),
        ("outputs\n1.0\n".encode("utf-16"), "something else"),
    ],
)
def test_file_of_another_form_is_refused(content: bytes, found: str, tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    message = rf"Expected an \.npz, \.safetensors, Parquet or CSV file.*found {found}.*savez"
    with pytest.raises(FileError, match=message):
        open_outputs(tmp_path / "data.npz")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path, marker = tmp_path / "data.npz", tmp_path / "marker"
    np.savez(path, outputs=np.array([Trap(marker)], dtype=object))
    with pytest.raises(FileError, match="Object arrays cannot be loaded"):
        open_outputs(path)
    torch.save({"outputs": Trap(marker)}, path)
    with pytest.raises(FileError, match=r"Expected an array named outputs .*found .*data\.pkl"):
        open_outputs(path)
    written(tmp_path / "folder", some())
    np.save(tmp_path / "folder" / "outputs.npy", np.array([Trap(marker)] * 30, dtype=object))
    with pytest.raises(FileError, match=r"rows of .*found .*'descr': '\|O'"):
        open_outputs(tmp_path / "folder")
    assert not marker.exists()


def test_file_without_outputs_and_nothing_at_all_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.npz", f"{tmp_path}/no.npz[:3]"):
        with pytest.raises(FileError, match=r"Expected a file or folder of outputs, found nothing at .*no\.npz: check"):
            open_outputs(path)
    with pytest.raises(FileError, match=r"without outputs\.json"):
        open_outputs(tmp_path)
    np.savez(tmp_path / "a.npz", logits=np.zeros((3, 2)), y=np.zeros(3))
    save_file({"logits": torch.zeros(3, 2)}, tmp_path / "b.safetensors")
    for name, found in (("a.npz", "logits, y"), ("b.safetensors", "logits")):
        with pytest.raises(FileError, match=rf"Expected an array named outputs .*found {found}: .*rename the arrays"):
            open_outputs(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"targets": np.zeros(4)}, r"as many rows of targets as of outputs, 3, got 4\. This is in .*data\.npz"),
        ({"outputs": np.array([[1.0], [np.inf], [2.0]])}, "finite outputs, got inf in row 1"),
        ({"features": np.array([[1.0], [np.nan], [2.0]])}, "finite features, got nan in row 1"),
        ({"outputs": np.zeros((3, 2), np.int64)}, "real-valued outputs"),
        ({"outputs": np.zeros((3, 2), np.complex64)}, "Expected numbers, got an array of complex64"),
        ({"targets": np.array(["a", "b", "c"])}, r"numbers as targets, got text .*map the classes to integers"),
        ({"targets": np.zeros(3, "datetime64[s]")}, "numbers, got an array of datetime"),
        ({"targets": np.array([2**63 + 5] * 3, np.uint64)}, r"whole numbers below 2\^63, got 9223372036854775813"),
        ({"outputs": np.zeros((0, 2))}, "at least one row"),
    ],
)
def test_arrays_are_checked_on_opening(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **{"outputs": np.zeros((3, 2)), **arrays})
    with pytest.raises(DataError, match=message):
        open_outputs(tmp_path / "data.npz")


def test_saving_overwrites_only_when_told(path: Path) -> None:
    save_outputs(some(), path)
    with pytest.raises(FileError, match=r"Expected a new name, found .*data.* there already.*force=True"):
        save_outputs(some(9), path)
    before = open_outputs(path)
    save_outputs(some(9), path, force=True)
    assert len(open_outputs(path)) == 9
    assert bits(before) == bits(some())  # what was opened stays as it was
    assert os.listdir(path.parent) == [path.name]


def test_only_outputs_are_written_and_only_to_names_of_a_known_form(tmp_path: Path) -> None:
    for form in FORMS:
        with pytest.raises(DataError, match="at least one row to save"):
            save_outputs(some()[:0], tmp_path / f"data{form}")
    for name in ("data.csv", "data.npy", "data.pt", "data.npz[:5]"):
        with pytest.raises(OptionError, match=r"ends in \.npz, \.safetensors, \.parquet, or in no suffix"):
            save_outputs(some(), tmp_path / name)
    with pytest.raises(DataError, match=r"Expected posthoc\.Outputs to write, got Tensor"):
        save_outputs(torch.zeros(3, 2), tmp_path / "data.npz")
    with pytest.raises(DataError, match=r"real numbers as targets, got torch\.complex64"):
        save_outputs(Outputs(torch.zeros(3), torch.zeros(3, dtype=torch.complex64)), tmp_path / "data.npz")
    for write in (lambda path: save_outputs(some(), path), lambda path: OutputsWriter(path, identity={})):
        with pytest.raises(FileError, match=r"Expected a folder to write data into, found none .*missing: create it"):
            write(tmp_path / "missing" / "data")
    assert not list(tmp_path.iterdir())


def test_save_that_fails_leaves_what_was_there(path: Path) -> None:
    save_outputs(some(), path)
    message = r"Expected to write .*data.*(too large|requested).*as it was"
    with small_files(20_000), pytest.raises(FileError, match=message):
        save_outputs(some(5000), path, force=True)
    assert bits(open_outputs(path)) == bits(some())
    assert os.listdir(path.parent) == [path.name]


def test_folder_that_cannot_be_moved_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_outputs(some(), tmp_path / "data")
    replace, refused = os.replace, list[Path]()

    def refusing(source: Path, target: Path) -> None:
        if Path(target).name == "data" and not refused:
            refused.append(source)
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(FileError, match="No space left"):
        save_outputs(some(9), tmp_path / "data", force=True)
    assert bits(open_outputs(tmp_path / "data")) == bits(some())
    assert os.listdir(tmp_path) == ["data"]


def test_folder_that_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "one.jpg").write_text("x")
    for write in (save_outputs, lambda _, path, force: OutputsWriter(path, identity={}, force=force)):
        with pytest.raises(FileError, match=r"found .*photos with one\.jpg in it"):
            write(some(), photos, force=True)
    (photos / "outputs.json").write_text('{"format": "another"}')
    with pytest.raises(FileError, match=r"another origin"):
        OutputsWriter(photos, identity={}, force=True)
    assert sorted(os.listdir(photos)) == ["one.jpg", "outputs.json"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="found a file"):
        save_outputs(some(), tmp_path / "file", force=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_folder_larger_than_the_memory_opens_at_once(tmp_path: Path) -> None:
    rows, width, folder = 2**30, 256, tmp_path / "data"  # a tebibyte, of which nothing is on the disk
    folder.mkdir()
    try:
        array = np.lib.format.open_memmap(folder / "outputs.npy", "w+", np.float32, (rows, width))
    except OSError:
        pytest.skip("this file system holds no file of a tebibyte")
    array[-1] = np.arange(width)
    del array
    Manifest(rows, True, {}, {"outputs": np.dtype((np.float32, (width,)))}).write(folder)

    statm = Path("/proc/self/statm")
    before = int(statm.read_text().split()[1])
    opened, last = open_outputs(folder), open_outputs(f"{folder}[{rows - 1}:]")
    assert (int(statm.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE") < 2**24
    assert opened.outputs.shape == (rows, width)
    assert torch.equal(last.outputs, torch.arange(256.0)[None])


def test_changes_to_mapped_numbers_stay_in_memory(tmp_path: Path) -> None:
    save_outputs(some(), tmp_path / "data")
    opened = open_outputs(tmp_path / "data")
    opened.outputs.add_(1.0)
    assert torch.equal(opened.outputs, some().outputs + 1.0)
    assert bits(open_outputs(tmp_path / "data")) == bits(some())


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "outputs.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "features.npy").unlink(), r"features\.npy, found no such file"),
        (lambda f: os.truncate(f / "targets.npy", 200), r"\(368 bytes\) in .*targets\.npy, found .* and 200 bytes"),
        (lambda f: os.truncate(f / "targets.npy", 369), r"\(368 bytes\) in .*targets\.npy, found .* and 369 bytes"),
        (lambda f: (f / "inputs.npy").write_bytes(b"hello"), r"Expected a \.npy file of .*inputs\.npy"),
        (lambda f: np.save(f / "outputs.npy", np.zeros((29, 4), np.float32)), r"30 rows .*found .*\(29, 4\)"),
        (lambda f: np.save(f / "outputs.npy", np.zeros((30, 5), np.float32)), r"30 rows .*found .*\(30, 5\)"),
        (lambda f: np.save(f / "outputs.npy", np.zeros((30, 4))), "found .*f8"),
        (lambda f: np.save(f / "outputs.npy", np.zeros((30, 4), np.float32, "F")), "found .*'fortran_order': True"),
        (lambda f: (f / "outputs.json").unlink(), r"found .*data without outputs\.json"),
        (lambda f: (f / "outputs.json").write_text("{"), "Expected JSON written by posthoc"),
        (lambda f: (f / "outputs.json").write_text("[]"), "of another origin"),
        (lambda f: change_manifest(f, format="x"), "of another origin"),
        (lambda f: change_manifest(f, version=2), "Expected format version 1, found 2"),
        (lambda f: change_manifest(f, rows=29), "Expected a .npy file of 29 rows"),
        (lambda f: change_manifest(f, rows="many"), "Expected rows, identity and arrays"),
        (lambda f: change_manifest(f, rows=0), "Expected at least one row"),
        (lambda f: change_manifest(f, arrays={}), "Expected at least one row"),
        (lambda f: change_manifest(f, arrays={"outputs": {"dtype": "O", "width": []}}), "found .*f4"),
        (lambda f: change_manifest(f, arrays={"outputs": {"dtype": "float32"}}), "Expected rows, identity"),
    ],
)
def test_folder_that_was_changed_is_refused(change: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    save_outputs(some(), tmp_path / "data")
    change(tmp_path / "data")
    with pytest.raises(FileError, match=message):
        open_outputs(tmp_path / "data")


def test_identity_is_kept(tmp_path: Path) -> None:
    identity = {"network": "abc", "layer": None, "transform": {"size": [224, 224], "mean": 0.5}}
    written(tmp_path / "data", some(), identity={**identity, "transform": {"mean": 0.5, "size": (224, 224)}})
    assert read_identity(tmp_path / "data") == identity
    assert read_identity(f"{tmp_path / 'data'}[:5]") == identity
    save_outputs(some(), tmp_path / "saved")
    assert read_identity(tmp_path / "saved") == {}
    save_outputs(some(), tmp_path / "data.npz")
    with pytest.raises(FileError, match="Expected a folder of outputs, which has an identity"):
        read_identity(tmp_path / "data.npz")
    with pytest.raises(TypeError, match="not JSON serializable"):
        OutputsWriter(tmp_path / "new", identity={"network": object()})
    assert not (tmp_path / "new").exists()


def test_nan_in_a_mapped_folder_is_refused_when_fitted_on_and_predicted(tmp_path: Path) -> None:
    n, folder = 3000, tmp_path / "data"
    save_outputs(Outputs(torch.randn(n, 3), torch.arange(n).remainder(3), torch.randn(n, 2)), folder)
    features = np.load(folder / "features.npy", mmap_mode="r+")
    features[2411, 1] = np.nan
    features.flush()
    shared = FMGP(None, "classification", variance="shared", **QUICK).fit(open_outputs(folder)[:400])
    for refused in (FMGP(None, "classification", **QUICK).fit, shared.predict):
        with pytest.raises(DataError, match="Expected finite features, got nan in row 2411"):
            refused(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", ["data", "folder/outputs.json", "folder/outputs.npy"])
def test_pipes_are_not_read(name: str, tmp_path: Path) -> None:
    save_outputs(some(), tmp_path / "folder")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileError, match=r"regular file, found a pipe or a device: .*Save the data to a file"):
        open_outputs(tmp_path / name.split("/")[0])


def test_links_are_not_written_to(tmp_path: Path) -> None:
    save_outputs(some(), tmp_path / "a.npz")
    (tmp_path / "b.npz").symlink_to(tmp_path / "a.npz")
    with pytest.raises(FileError, match=r"regular file to write, found a link or a device: .*b\.npz"):
        save_outputs(some(), tmp_path / "b.npz", force=True)


def test_leftovers_of_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    code = "import os, sys, posthoc.io\nwith posthoc.io.atomic_path(sys.argv[1]) as a: a.touch(), os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.npz")], check=True)
    (leftover,) = tmp_path.iterdir()
    with atomic_path(tmp_path / "a.npz") as temporary:
        temporary.touch()
        assert leftover.exists()  # its process could still be there
    os.utime(leftover, (0.0, 0.0))
    with atomic_path(tmp_path / "a.npz") as temporary:
        temporary.touch()
        assert not leftover.exists()


def test_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    refused = pytest.raises(OSError, match=r"File too large: .*table\.csv")
    with small_files(100), refused, atomic_path(tmp_path / "table.csv") as temporary:
        temporary.write_text("a" * 1000)
    assert not os.listdir(tmp_path)
