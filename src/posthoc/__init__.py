"""posthoc: honest error bars on any pre-trained neural network."""

from posthoc.conformal import Conformal
from posthoc.errors import (
    DataError,
    FileError,
    LayerError,
    MissingExtraError,
    NotFittedError,
    NotPSDError,
    OptionError,
    PosthocError,
    PosthocWarning,
    TrainingError,
    WrongTaskError,
)
from posthoc.fmgp import FMGP
from posthoc.kernels import RBF, Constant, Linear, Matern, White
from posthoc.likelihoods import Categorical, Gaussian
from posthoc.methods import MAP, Temperature, load
from posthoc.outputs import Outputs
from posthoc.predictive import Predictive
from posthoc.storage import open_outputs, save_outputs

__version__ = "0.1.0"

__all__ = [
    "FMGP",
    "MAP",
    "RBF",
    "Categorical",
    "Conformal",
    "Constant",
    "DataError",
    "FileError",
    "Gaussian",
    "LayerError",
    "Linear",
    "Matern",
    "MissingExtraError",
    "NotFittedError",
    "NotPSDError",
    "OptionError",
    "Outputs",
    "PosthocError",
    "PosthocWarning",
    "Predictive",
    "Temperature",
    "TrainingError",
    "White",
    "WrongTaskError",
    "__version__",
    "load",
    "open_outputs",
    "save_outputs",
]
