"""The benchmarks run, write what they should, and refuse to report where a fast way disagrees with a plain one."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributed, nn

from benchmarks import against_before, big_fit, call_trace, code_size, laplace_race, memory, predict_overhead, scaling
from benchmarks.calls import Steps, capture, same_steps
from benchmarks.resnet import resnet50
from benchmarks.simulated import CHUNK, Simulated
from benchmarks.step_speed import variants
from benchmarks.tasks import synthetic_classification
from posthoc import FMGP, Outputs
from posthoc.collect import open_outputs
from posthoc.errors import FileError

CPU = torch.device("cpu")


def quick(name: str, folder, *options: str):
    """What a quick run writes."""
    out = folder / "result.json"
    importlib.import_module(f"benchmarks.{name}").main(["--quick", "--out", str(out), *options])
    result = json.loads(out.read_text())
    assert result["quick"] is True
    assert result["device"] == "cpu"
    assert result["machine"]["torch"] == torch.__version__
    return result


@pytest.fixture
def one_process(monkeypatch):
    """Work that would have a process of its own is done in this one, to save time."""
    for module in ("shapes", "big_fit"):
        monkeypatch.setattr(f"benchmarks.{module}.in_fresh_process", lambda function, *args: function(*args))


def test_step_speed_of_large_shapes(tmp_path, one_process):
    result = quick("step_speed", tmp_path, "--only", "shapes")
    assert not {"steps", "fits"} & result.keys()
    (shape,) = result["shapes"].values()
    assert (shape["classes"], shape["features"], shape["variance"]) == (10, 64, "separable")
    assert shape["steps_per_second"].keys() == {"plain"}  # there is no CUDA graph on a CPU
    assert max(shape["greatest_difference_from_steps_by_hand"].values()) < 1e-9
    assert shape["peak_memory_mib"].keys() == {"plain"}
    assert shape["met"] is None  # the target is a GPU's


def test_predict_overhead(tmp_path):
    result = quick("predict_overhead", tmp_path)
    for run in result["runs"].values():
        assert run["milliseconds"].keys() == {"network", "network and FMGP", "the head alone"}
        assert run["met"] == (run["added_time"] <= 0.05)


@pytest.mark.parametrize("form", ["kron", "full"])
def test_laplace_race(form):
    """On outputs that are linear in the features, both say the same."""
    pytest.importorskip("laplace")
    g = torch.Generator().manual_seed(0)
    features = torch.randn(300, 4, generator=g)
    logits = 2.0 * features @ torch.randn(4, 3, generator=g)
    rows = Outputs(logits, torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1), features)
    found = laplace_race.race(form, rows[:200], rows[200:], rounds=1)
    assert found["posthoc"]["nll"] == pytest.approx(found["laplace-torch"]["nll"], abs=1e-3)
    assert not found["agree"]  # with what is known of other data
    assert found["no_slower"] == (found["posthoc"]["seconds"] <= found["laplace-torch"]["seconds"])


def test_memory(tmp_path):
    result = quick("memory", tmp_path)
    (case,) = result["sweeps"]["classes"]
    for work, batch in {"fit": 100, "predict": 200}.items():
        figures = case[work]
        assert figures["peak"] > figures["added"] > 0
        # B (C + M r) + M² + M D + C r² with C = 50, M = 10, D = 64, r = 8
        assert figures["formula"] == 8 * (batch * (50 + 10 * 8) + 10 * 10 + 10 * 64 + 50 * 8 * 8)
        if sys.platform == "linux":
            assert 0 < figures["file_pages"] <= 200 * (50 + 64) * 2 + 200 * 8 + 3 * 2**14  # in whole pages
    assert case["under_target"] is None


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed")
def test_scaling(tmp_path):
    result = quick("scaling", tmp_path)
    assert result["rows_per_second"].keys() == {"1", "2"}
    assert 0.0 < result["greatest_difference_from_one_process"] < 1e-6  # the sum is in another order, so not zero
    assert result["profile_milliseconds"]["1"]["of which all-reduce"] == 0.0
    assert result["profile_milliseconds"]["2"]["of which all-reduce"] > 0.0


def test_big_fit(tmp_path, one_process):
    result = quick("big_fit", tmp_path, "--folder", str(tmp_path / "outputs"))
    assert len(open_outputs(tmp_path / "outputs")) == result["rows"] == 400
    assert result["bytes_of_data"] == 400 * ((40 + 8) * 2 + 8)
    assert result["full_size"]["extrapolated"]
    assert result["full_size"]["rows"] == 1_281_167
    assert result["paper_over_ours"] == pytest.approx(18_350 / result["full_size"]["seconds"])


def test_a_quick_run_writes_no_result_unless_told_where(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(predict_overhead, "overhead", lambda *_: {"milliseconds": {}, "met": True})
    monkeypatch.setattr("benchmarks.harness.__file__", str(tmp_path / "harness.py"))
    predict_overhead.main(["--quick"])
    assert not list(tmp_path.iterdir())
    predict_overhead.main([])
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["predict_overhead-cpu.json"]


def test_times_are_extrapolated_in_the_open():
    for rows, seconds in ((big_fit.IMAGENET, 10.0), (big_fit.IMAGENET // 4, 8.0 + 4 * 2.0)):
        found = big_fit.at_full_size({"seconds": 10.0, "seconds_of_training": 8.0}, rows)
        assert found["seconds"] == pytest.approx(seconds, rel=1e-5)
        assert found["extrapolated"] == (rows < big_fit.IMAGENET)


def test_steps_that_disagree_are_not_reported():
    method = FMGP(None, "classification", num_inducing=5, batch_size=20, progress=False)
    call = capture(method, Simulated(60, 3, 4).outputs())
    by_hand = call.by_hand(5)
    for _ in range(2):  # every run begins at the start
        assert same_steps(call.run(5), by_hand) < 1e-12
    call.objective = lambda batch, loss=call.objective: loss(batch) * 1.001
    for other in (call.run(5), Steps(by_hand.losses, [p + 1e-5 for p in by_hand.parameters])):
        with pytest.raises(AssertionError):
            same_steps(other, by_hand)


def test_a_mean_that_is_not_the_networks_own_is_not_reported():
    size = predict_overhead.Size(batch=2, pixels=32, classes=5, inducing=4)
    model, x = size.network().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        method = predict_overhead.fitted(copy.deepcopy(model), model.width, size, CPU)
        predict_overhead.check(method, model, x)
        nn.init.normal_(model.fc.bias)
        with pytest.raises(AssertionError, match="network's own output"):
            predict_overhead.check(method, model, x)


def test_processes_that_differ_in_one_bit_are_not_reported():
    def report(value: float) -> scaling.Report:
        return scaling.Report(1.0, Steps([1.0], [torch.tensor([value], dtype=torch.float64)]), {})

    close = float(np.nextafter(0.5, 1.0))
    assert scaling.agreement({1: [report(close)], 2: [report(0.5), report(0.5)]}) == pytest.approx(close - 0.5)
    with pytest.raises(AssertionError, match="parameters differ"):
        scaling.agreement({1: [report(0.5)], 2: [report(0.5), report(close)]})
    with pytest.raises(AssertionError):
        scaling.agreement({1: [report(0.50001)], 2: [report(0.5), report(0.5)]})


def test_mapped_data_and_low_rank_are_checked_before_memory_is_measured(tmp_path, monkeypatch):
    memory.check(tmp_path, CPU)
    monkeypatch.setattr(memory, "joined", lambda parts: replace(p := next(parts), log_probs=p.log_probs + 1e-3))
    with pytest.raises(AssertionError):
        memory.check(tmp_path, CPU)


def test_the_network_is_a_resnet50():
    network = resnet50()
    assert sum(p.numel() for p in network.parameters()) == 25_557_032
    assert network.width == 2048
    assert network.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 1000)


def test_simulated_rows_do_not_depend_on_how_many_are_asked_for(tmp_path):
    many, few = Simulated(CHUNK + 10, 4, 3).outputs(), Simulated(CHUNK + 5, 4, 3)
    for name in ("outputs", "targets", "features"):
        assert torch.equal(getattr(few.outputs(), name), getattr(many, name)[: CHUNK + 5])
    assert not torch.equal(many.features[:10], many.features[CHUNK:])
    assert many.outputs.argmax(-1).eq(many.targets).double().mean() == pytest.approx(0.8 + 0.2 / 4, abs=0.02)
    mapped = open_outputs(few.folder(tmp_path / "data"))
    assert torch.equal(mapped.features, many.features[: CHUNK + 5])
    with pytest.raises(FileError):
        Simulated(CHUNK + 10, 4, 3).folder(tmp_path / "data")


def test_the_dense_reference_has_our_loss():
    variants(synthetic_classification(epochs=0), CPU, check=True)["ours"](2)


def test_lines_of_code_are_counted_without_docstrings_comments_and_blanks(tmp_path):
    source = '"""Doc,\ntwo lines."""\n\n# a comment\nA = (\n    1,\n)  # and one\n"""Of A."""\nB = """x\ny"""\n'
    assert code_size.size_of(source) == (1, 5, 10)
    for name in ("errors.py", "fmgp/a.py", "fmgp/b.py"):
        (tmp_path / "src/posthoc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src/posthoc" / name).write_text(source)
    result = code_size.measure(tmp_path)
    assert result["trees"] == {"src/posthoc": {"files": 3, "code": 15, "lines": 30}}
    assert result["parts"]["src/posthoc"]["fmgp"] == {"files": 2, "code": 10, "lines": 20}
    assert result["top_level"] == {"modules": 1, "packages": 1}


def test_returns_to_a_file_are_counted_by_first_calls():
    assert call_trace.figures(["a", "a", "b", "a", "c", "b"]) == {"files": 3, "functions": 6, "returns": 2}
    found = call_trace.Trace(str(code_size.ROOT / "benchmarks")).of(lambda: code_size.size_of("a = 1"))
    assert found["order"] == ["code_size.py: size_of"]


@pytest.mark.parametrize("kind", ["import", "predict"])
def test_a_version_is_as_fast_as_itself(kind):
    found = against_before.compare(kind, against_before.ROOT, rounds=1, quick=True)
    for figures in found.values():
        assert figures["ratio"] == pytest.approx(figures["now"] / figures["before"])
    assert found.keys() >= ({"posthoc", "torch"} if kind == "import" else {*against_before.TASKS})
