"""Fixed-mean Gaussian processes."""

from posthoc.fmgp.estimator import FMGP

__all__ = ["FMGP"]
