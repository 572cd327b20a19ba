"""Ray Data gives what one process gives. One test, since a cluster takes its time to start."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from posthoc import FMGP, DataError, FileError, OptionError, Outputs
from posthoc.collect.to_folder import collect_to_folder
from posthoc.integrations.models import Plan
from posthoc.integrations.ray import Actor, collect_with_ray, collecting, predict_with_ray, predicting
from tests.cases import QUICK, answers, same
from tests.collecting_cases import NET, assert_close, contents, expected, raw, write_parquet

ray = pytest.importorskip("ray")
ROWS = 23


def test_a_cluster_collects_and_predicts_as_one_process_does(tmp_path, monkeypatch):

    np.savez(tmp_path / "d.npz", inputs=raw(ROWS).numpy(), targets=np.arange(ROWS) % 3)
    plan = Plan(NET, str(tmp_path / "d.npz"), inputs=True, weights="none", trust_code=True)
    predictor, data = plan.open()
    options = {"identity": predictor.identity, "collate": predictor.collate, "inputs": True, "batch_size": 4}
    local = collect_to_folder(predictor.backbone, data, tmp_path / "local", **options)
    FMGP(None, "classification", **QUICK).fit(local).save(tmp_path / "head.safetensors")
    wanted = FMGP.load(tmp_path / "head.safetensors").predict(local)

    ray.init(include_dashboard=False, log_to_driver=False)
    try:
        monkeypatch.chdir(tmp_path)  # the actors stay where they are
        relative = Plan(NET, "d.npz", inputs=True, weights="none", trust_code=True)
        found = collect_with_ray(relative, tmp_path / "ray", batch_size=4, actors=2)
        assert_close(found, expected(raw(ROWS), torch.arange(ROWS) % 3), "outputs", "targets", "features", "inputs")
        assert contents(tmp_path / "ray") == contents(tmp_path / "local")

        parts = list(predict_with_ray("head.safetensors", "ray", rows=5))
        assert [len(part) for part in parts] == [5, 5, 5, 5, 3]
        assert same(answers(type(wanted).cat(parts)), answers(wanted))
    finally:
        ray.shutdown()


def test_an_actor_predicts_from_named_columns_of_a_table(tmp_path):
    generator = torch.Generator().manual_seed(0)
    outputs = Outputs(torch.randn(40, 2, generator=generator), torch.arange(40) % 2)
    FMGP(None, "classification", **QUICK).fit(outputs).save(tmp_path / "head.safetensors")
    lines = ["id,no,yes", *(f"{i},{float(a)!r},{float(b)!r}" for i, (a, b) in enumerate(outputs.outputs))]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    head, table = str(tmp_path / "head.safetensors"), str(tmp_path / "table.csv")
    found = predicting(head, table, {"outputs": ["no", "yes"]})((5, 12))
    wanted = FMGP.load(head).predict(Outputs(outputs.outputs[5:12]))
    torch.testing.assert_close(found.probs.double(), wanted.probs.double(), rtol=1e-5, atol=1e-6)


def test_an_actor_returns_errors_as_they_are(tmp_path):
    x = raw(ROWS).numpy()
    x[9] = np.nan
    np.savez(tmp_path / "d.npz", inputs=x)
    actor = Actor(partial(collecting, Plan(NET, str(tmp_path / "d.npz"), weights="none", trust_code=True)), ".", [])
    assert_close(actor({"start": 4, "stop": 8})["result"].value, expected(raw(8)[4:]), "outputs", "features")
    assert isinstance(actor({"start": 8, "stop": 12})["result"].value, DataError)
    actor = Actor(partial(collecting, Plan(NET, "absent.npz")), ".", [])
    assert isinstance(actor({"start": 0, "stop": 4})["result"].value, FileError)


def test_a_stream_and_a_chosen_gpu_are_refused(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "files").mkdir()
    write_parquet(tmp_path / "files" / "train.parquet", {"x": np.ones(3)})
    with pytest.raises(OptionError, match="got a stream"):
        collect_with_ray(Plan(NET, f"hf:{tmp_path / 'files'}", weights="none", trust_code=True), tmp_path / "o")
    with pytest.raises(OptionError, match="Ray hands out the GPUs"):
        collect_with_ray(Plan(NET, "d.npz", device="cuda:1", weights="none", trust_code=True), tmp_path / "o")
