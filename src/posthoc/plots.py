"""Plots of predictions on matplotlib (extra `plots`); see `posthoc.evaluate.plots`."""

from posthoc.evaluate.plots import (
    entropy_histogram,
    intervals,
    plot,
    quantile_calibration,
    reliability_diagram,
    risk_coverage,
)

__all__ = ["entropy_histogram", "intervals", "plot", "quantile_calibration", "reliability_diagram", "risk_coverage"]
