"""Fixed-mean Gaussian processes."""

from posthoc.fmgp.model import FMGP

__all__ = ["FMGP"]
