"""Metrics in two real processes, joined by torch.distributed; one of them may have no data."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from posthoc import DataError
from posthoc.evaluate.metrics import AURC, CQM, ECE, OOD, AdaptiveECE, EntropyHistogram, Scores
from tests.test_metrics import class_case, figures, real_case

OUTSIDE = class_case(30, seed=1, sharpness=1.0)[0]


def feed(real_rows: slice, class_rows: slice, outside_rows: slice) -> dict[str, list[float]]:
    """Every kind of state, on a share of the data; then the figures of all ranks' data."""
    classes, labels = class_case()
    outside, scores = OUTSIDE[outside_rows], Scores("classification")
    metrics = [ECE(), AdaptiveECE(), AURC(), EntropyHistogram(), scores]
    detection = OOD()
    for metric in metrics:
        metric.update(classes[class_rows], labels[class_rows])
    detection.update(classes[class_rows], False)
    with pytest.raises(DataError, match="out-of-distribution data"):  # refused, it goes on as before
        detection.compute()
    if len(outside):
        scores.update_ood(outside)
        detection.update(outside, True)
    regression = [Scores("regression"), CQM()]
    pred, y = real_case()
    for metric in regression:
        if len(y[real_rows]):
            metric.update(pred[real_rows], y[real_rows])
    return {f"{i} {type(m).__name__}": figures(m) for i, m in enumerate([*metrics, detection, *regression])}


SHARES = {
    # the first rank has no regression data, the second no out-of-distribution data
    0: (slice(0, 0), slice(0, 25), slice(0, 30)),
    1: (slice(0, 60), slice(25, 60), slice(0, 0)),
}


def work(_: int, rank: int, folder: str) -> None:
    meeting = f"file://{folder}/meet"
    distributed.init_process_group("gloo", meeting, timedelta(seconds=120), rank=rank, world_size=2)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(feed(*SHARES[rank])))
    finally:
        distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_processes_give_the_figures_of_one(tmp_path):
    whole = feed(slice(0, 60), slice(0, 60), slice(0, 30))
    other = torch.multiprocessing.spawn(work, (1, str(tmp_path)), nprocs=1, join=False)
    work(0, 0, str(tmp_path))  # this process is the other rank
    while not other.join():
        pass
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == whole.keys()
        for name, values in whole.items():
            assert found[name] == pytest.approx(values, rel=1e-12), name
