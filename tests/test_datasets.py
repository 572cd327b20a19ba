"""Data named by strings: folders of images, Parquet and `.npz` files, row by row what was put into them."""

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from posthoc import DataError, FileError, OptionError
from posthoc.integrations.datasets import open_data
from tests.collecting_cases import assert_close, collected, expected, image_folder, images, png, raw, write_parquet

ROWS = 11


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The folder where the library `datasets` keeps the tables it has converted."""
    if find_spec("datasets"):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path):
    for name in ("b/deep", "a", "c", "empty", "0_empty"):
        (tmp_path / name).mkdir(parents=True)
    for row, name in enumerate(("b/z.png", "b/deep/a.PNG", "a/y.JPEG", "c/.hidden.png", "c/x.bmp")):
        images(5)[row].save(tmp_path / name, format="PNG")
    (tmp_path / "b" / "notes.txt").write_text("not an image")
    data = open_data(str(tmp_path))
    rows = [data[row] for row in range(len(data))]
    assert [label for _, label in rows] == [1, 2, 2, 3]  # the empty class at the front counts
    for (picture, _), row in zip(rows, [2, 1, 0, 4], strict=True):
        assert picture.tobytes() == images(5)[row].tobytes()


def test_a_flat_folder_has_no_targets_and_every_image_is_read_in_color(tmp_path):
    for row in range(3):
        (tmp_path / f"{row}.png").write_bytes(png(row))
    assert_close(collected(open_data(str(tmp_path)), tmp_path / "o"), expected(raw(3)), "outputs", "features")
    for mode in ("L", "P", "RGBA", "1", "CMYK"):
        images(1)[0].convert(mode).save(tmp_path / f"{mode}.tif")
    data = open_data(str(tmp_path))
    assert {data[row][0].mode for row in range(8)} == {"RGB"}


def test_a_folders_identity_is_its_names_and_sizes(tmp_path):
    for name in "ab":
        image_folder(tmp_path / name, ROWS)
    image = tmp_path / "b" / "class_0" / "000.png"
    os.utime(image, (1, 1))
    seen = [open_data(str(tmp_path / "b")).identity]
    assert open_data(str(tmp_path / "a")).identity == seen[0]
    for change in (
        lambda: image.write_bytes(png(0) + b"more"),
        lambda: image.rename(image.with_name("0000.png")),
        lambda: image.with_name("0000.png").unlink(),
        (tmp_path / "b" / "a_new_class").mkdir,
    ):
        change()
        seen.append(open_data(str(tmp_path / "b")).identity)
    assert len({identity["digest"] for identity in seen}) == len(seen)


@pytest.mark.parametrize(("workers", "content"), [(0, b"no image"), (2, png(5)[:90])], ids=["text", "truncated"])
def test_a_broken_image_is_named_in_one_line(tmp_path, workers, content):
    labels = image_folder(tmp_path / "images", ROWS)
    path = tmp_path / "images" / f"class_{labels[5]}" / "005.png"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        collected(open_data(str(tmp_path / "images")), tmp_path / "o", workers=workers)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    for name in ("none", "both", "sizes"):
        (tmp_path / name).mkdir()
    image_folder(tmp_path / "both", 3)
    (tmp_path / "both" / "loose.png").write_bytes(png(0))
    images(1)[0].save(tmp_path / "sizes" / "a.png")
    images(1)[0].resize((3, 4)).save(tmp_path / "sizes" / "b.png")
    with pytest.raises(DataError, match=r"\(3, 4, 3\), \(3, 8, 8\).*--transform"):
        collected(open_data(str(tmp_path / "sizes")), tmp_path / "o")
    (tmp_path / "data.xls").write_text("")
    for name, options, error, message in [
        ("none", {}, DataError, "found none"),
        ("both", {}, DataError, "found 1 of 4 there"),
        ("both", {"target_column": "label"}, OptionError, "Columns are for tables"),
        ("absent", {}, FileError, "found nothing at"),
        ("data.xls", {}, OptionError, "Expected a folder of images"),
    ]:
        with pytest.raises(error, match=message):
            open_data(str(tmp_path / name), **options)


def as_stored(rows: int) -> list[dict[str, Any]]:
    return [{"bytes": png(row), "path": f"{row}.png"} for row in range(rows)]


@pytest.mark.parametrize(("kind", "workers", "group"), [("bytes", 0, 3), ("struct", 2, None)])
def test_parquet_of_images(tmp_path, kind, workers, group):
    content = [png(row) for row in range(ROWS)] if kind == "bytes" else as_stored(ROWS)
    labels = np.arange(ROWS, dtype=np.int8) % 3
    path = write_parquet(tmp_path / "d.parquet", {"image": content, "id": list("abcdefghijk"), "label": labels}, group)
    found = collected(open_data(str(path)), tmp_path / "o", workers=workers)
    assert_close(found, expected(raw(ROWS), torch.arange(ROWS) % 3), "outputs", "features", "targets")


def test_parquet_of_numbers_and_text(tmp_path):
    grid = np.random.default_rng(0).normal(size=(ROWS, 2, 3))
    columns = {
        "nested": grid.tolist(),
        "flat": [row.ravel().tolist() for row in grid],
        "a": grid[:, 0, 0],
        "b": np.arange(ROWS),
        "words": [f"word {row}" for row in range(ROWS)],
        "several": [[row, 2 * row] for row in range(ROWS)],
    }
    path = str(write_parquet(tmp_path / "d.parquet", columns))

    def read(*inputs: str, target: str | None = None) -> list[list[Any]]:
        data: Any = open_data(path, input_columns=inputs, target_column=target)
        return [list(values) for values in zip(*(data[row] for row in range(ROWS)), strict=True)]

    np.testing.assert_array_equal(read("nested")[0], grid)
    np.testing.assert_array_equal(read("flat")[0], grid.reshape(ROWS, -1))
    np.testing.assert_array_equal(read("a")[0], grid[:, 0, :1])
    np.testing.assert_array_equal(read("b", "a")[0], np.stack([np.arange(ROWS), grid[:, 0, 0]], 1))
    assert read("words")[0] == columns["words"]
    np.testing.assert_array_equal(read("a", target="b")[1], np.arange(ROWS))
    np.testing.assert_array_equal(read("a", target="several")[1], columns["several"])


def test_csv_and_json(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "d.csv").write_text("text,label\ngood,1\nbad,0\n")
    (tmp_path / "d.jsonl").write_text('{"x": [1.0, 2.0], "y": 3}\n{"x": [4.0, 5.0], "y": 6}\n')
    words, numbers = open_data(str(tmp_path / "d.csv")), open_data(str(tmp_path / "d.jsonl"))
    assert [words[row] for row in range(2)] == [("good", 1), ("bad", 0)]
    assert [(x.tolist(), int(y)) for x, y in (numbers[0], numbers[1])] == [([1.0, 2.0], 3), ([4.0, 5.0], 6)]


def test_parquet_identity_is_the_bytes_and_the_columns(tmp_path):
    a, b, c = (str(tmp_path / f"{name}.parquet") for name in "abc")
    write_parquet(tmp_path / "a.parquet", {"x": [1.0, 2.0], "z": [1.0, 2.0]})
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes())
    write_parquet(tmp_path / "c.parquet", {"x": [1.0, 3.0], "z": [1.0, 2.0]})
    others = [open_data(c), open_data(a, input_columns=["z"]), open_data(a, target_column="z")]
    assert open_data(a).identity == open_data(b).identity
    assert all(other.identity != open_data(a).identity for other in others)


def test_columns_that_cannot_be_used_are_refused(tmp_path):
    columns = {
        "first": [1.0, None],
        "second": [[1.0], [2.0, 3.0]],
        "third": ["a", "b"],
        "fourth": [[[1.0]], [[1.0], []]],
    }
    path = str(write_parquet(tmp_path / "d.parquet", columns))
    for options, message in [({}, "Which column holds the inputs"), ({"input_columns": ["zeroth"]}, "are: first, sec")]:
        with pytest.raises(OptionError, match=message):
            open_data(path, **options)
    for inputs, target, row, message in [
        (["first"], None, 1, r"in column 'first' of row 1 of d\.parquet, got None"),
        (["second"], "third", 0, "Expected numbers, .* in column 'third' of row 0 .* got 'a'"),
        (["second", "second"], None, 1, "one number a row in each of several"),
        (["fourth"], None, 1, "of one length, in column 'fourth'"),
    ]:
        with pytest.raises(DataError, match=message):
            open_data(path, input_columns=inputs, target_column=target)[row]
    for name, message in [("second", "inputs of one shape"), ("third", "got text, which must be made into numbers")]:
        with pytest.raises(DataError, match=message):
            collected(open_data(path, input_columns=[name]), tmp_path / name)
    (tmp_path / "text.parquet").write_text("no")
    for empty in (tmp_path / "text.parquet", write_parquet(tmp_path / "empty.parquet", {"x": np.zeros(0)})):
        with pytest.raises(FileError, match=rf"Expected a table with at least one row in {empty}"):
            open_data(str(empty))


def test_a_broken_image_in_a_table_is_named(tmp_path):
    content = as_stored(ROWS)
    content[7]["bytes"] = b"no"
    data = open_data(str(write_parquet(tmp_path / "d.parquet", {"image": content})))
    with pytest.raises(DataError, match=r"an image in column 'image' of row 7 of d.parquet \(7.png\)"):
        collected(data, tmp_path / "o")
    pytest.importorskip("fsspec").filesystem("memory").pipe("/there.png", png(3))
    content[3] = {"bytes": None, "path": "memory://there.png"}
    content[7] = {"bytes": None, "path": None}
    data = open_data(str(write_parquet(tmp_path / "d.parquet", {"image": content})))
    assert data[3][0].tobytes() == images(4)[3].tobytes()
    with pytest.raises(DataError, match="an image in column 'image' of row 7"):
        data[7]


@pytest.mark.parametrize(("save", "workers"), [(np.savez, 0), (np.savez_compressed, 2)])
def test_npz(tmp_path, save, workers):
    x, y = raw(ROWS).numpy(), np.arange(ROWS, dtype=np.uint8) % 3
    save(tmp_path / "d.npz", inputs=x.astype(np.float64), targets=y, others=np.zeros(3))
    found = collected(open_data(str(tmp_path / "d.npz")), tmp_path / "o", workers=workers)
    assert_close(found, expected(torch.from_numpy(x), torch.arange(ROWS) % 3), "outputs", "features", "targets")


def test_npz_that_cannot_be_used_is_refused(tmp_path):
    path = tmp_path / "d.npz"
    for arrays, inputs, error, message in [
        ({"x": np.zeros(3), "y": np.zeros(2)}, [], DataError, r"of shape \(3,\) and float64 of shape \(2,\)"),
        ({"x": np.array([{}])}, [], FileError, "Object arrays cannot be loaded"),
        ({"x": np.array(["a"])}, [], DataError, "found <U1"),
        *(({"x": empty}, [], DataError, "Expected rows of numbers") for empty in (np.array(3.0), np.zeros((0, 2)))),
        ({"a": np.zeros(3), "b": np.zeros(3)}, [], OptionError, "Which column"),
        ({"a": np.zeros(3), "b": np.zeros(3)}, ["a", "b"], DataError, "one array of inputs"),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(error, match=message):
            open_data(str(path), input_columns=inputs)
    np.savez(path, x=np.arange(10_000.0))
    content = bytearray(path.read_bytes())
    content[5000] ^= 255
    for broken in (b"no", bytes(content), bytes(content[:900])):
        path.write_bytes(broken)
        with pytest.raises(FileError, match=r"Expected arrays of numbers in .*found none"):
            open_data(str(path))
