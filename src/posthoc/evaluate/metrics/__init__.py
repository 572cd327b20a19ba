"""How good predictive distributions are: streaming `torchmetrics.Metric`s, updated with (predictive, targets).

States are summed or joined in float64 across batches and ranks, on the metric's own device.
"""

from posthoc.evaluate.metrics.classification import ECE, Accuracy, AdaptiveECE, Brier, EntropyHistogram
from posthoc.evaluate.metrics.likelihood import NLL
from posthoc.evaluate.metrics.ood import OOD, auroc, fpr_at
from posthoc.evaluate.metrics.regression import CQM, CRPS, MAE, RMSE, Coverage, SampleCRPS, Width, crps_of_draws
from posthoc.evaluate.metrics.scores import Scores
from posthoc.evaluate.metrics.selective import AURC, RiskCoverage, selective_risk

__all__ = [
    "AURC",
    "CQM",
    "CRPS",
    "ECE",
    "MAE",
    "NLL",
    "OOD",
    "RMSE",
    "Accuracy",
    "AdaptiveECE",
    "Brier",
    "Coverage",
    "EntropyHistogram",
    "RiskCoverage",
    "SampleCRPS",
    "Scores",
    "Width",
    "auroc",
    "crps_of_draws",
    "fpr_at",
    "selective_risk",
]
