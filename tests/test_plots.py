"""Plots: what is drawn, into which axes, and what they refuse."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from posthoc import MissingExtraError, OptionError, WrongTaskError, plots
from posthoc.evaluate.plots import prediction_bands
from posthoc.predictive.base import LatentGaussian
from posthoc.predictive.regression import RegressionPredictive
from tests.test_metrics import class_case, real_case


@pytest.fixture(autouse=True)
def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


@pytest.mark.parametrize(
    ("draw", "case"),
    [
        *((draw, class_case) for draw in (plots.reliability_diagram, plots.risk_coverage, plots.entropy_histogram)),
        *((draw, real_case) for draw in (plots.intervals, plots.quantile_calibration, plots.risk_coverage)),
    ],
)
def test_plots_draw_into_the_axes_they_are_given(draw, case, pyplot):
    pred, y = case(200)
    _, (left, right) = pyplot.subplots(1, 2)
    assert draw(pred, y, left) is left
    assert all((left.has_data(), left.get_xlabel(), left.get_ylabel()))
    assert not right.has_data()
    assert draw(pred, y).figure is not left.figure


def test_predictions_draw_their_usual_plot():
    (classes, labels), (reals, targets) = class_case(), real_case()
    assert classes.plot().get_xlabel() == "entropy, nats"
    assert classes.plot(labels).get_xlabel() == "confidence"
    assert reals.plot().get_xlabel() == "mean"
    assert plots.intervals(reals, targets, level=0.5).get_ylabel() == "prediction, 50% interval"


def test_reliability_is_that_of_the_bins_and_few_points_are_faint():
    pred, y = class_case(300, sharpness=1.0)
    lines = plots.reliability_diagram(pred, y, bins=10).get_lines()
    few, many = (np.stack(line.get_data()) for line in lines[1:])
    confidence = pred.probs.amax(-1)
    counts = torch.histogram(confidence, 10, range=(0.0, 1.0)).hist
    assert many.shape[1] == int((counts >= 10).sum()) > 2
    assert few.shape[1] == int(((counts > 0) & (counts < 10)).sum())
    inside = (confidence > 0.4) & (confidence <= 0.5)
    hits, point = (pred.probs.argmax(-1) == y)[inside].double(), many[:, np.argmin(np.abs(many[0] - 0.45))]
    assert [float(confidence[inside].mean()), float(hits.mean())] == pytest.approx(point.tolist())


def test_the_transform_of_right_quantiles_is_flat():
    pred, _ = real_case(5000)
    y = pred.sample(1, torch.Generator().manual_seed(0))[0]
    heights = plots.quantile_calibration(pred, y).patches[0].get_data().values
    assert np.mean(heights) == pytest.approx(1.0)
    assert np.abs(heights - 1.0).max() < 0.3
    wide = plots.quantile_calibration(pred, pred.mean).patches[0].get_data().values
    assert wide.max() > 15


def test_what_cannot_be_drawn_is_refused(monkeypatch):
    pred, y = class_case()
    with pytest.raises(WrongTaskError):
        plots.intervals(pred, y)
    with pytest.raises(WrongTaskError):
        plots.reliability_diagram(*real_case())
    with pytest.raises(OptionError, match="matplotlib Axes, got a str"):
        plots.risk_coverage(pred, y, "here")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"posthoc\[plots\]"):
        plots.risk_coverage(pred, y)


def test_the_legend_of_prediction_bands_names_what_is_drawn(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or Path(path).touch())
    x = torch.linspace(-1.0, 1.0, 20)[:, None]
    pred = RegressionPredictive(LatentGaussian(x.sin(), torch.full_like(x, 0.01)), torch.full_like(x, 0.02))
    prediction_bands(tmp_path / "bands.png", x, [("one", pred)], (x, x))
    axis = figures[0].axes[0]
    handles = axis.get_legend().legend_handles
    drawn = {text.get_text(): handle for text, handle in zip(axis.get_legend().get_texts(), handles, strict=True)}
    assert isinstance(drawn["data"], Line2D)
    assert drawn["data"].get_marker() == "."
    assert isinstance(drawn["the network"], Line2D)
    one, two = drawn["±1 standard deviation"], drawn["±2 standard deviations"]
    assert isinstance(one, Rectangle)
    assert isinstance(two, Rectangle)
    assert one.get_facecolor()[-1] > two.get_facecolor()[-1]
