"""posthoc: honest error bars on any pre-trained neural network."""

from posthoc.collect import open_outputs, save_outputs
from posthoc.collect.outputs import Outputs
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
from posthoc.evaluate.compare import Comparison, compare
from posthoc.fmgp import FMGP
from posthoc.kernels.base import RBF, Constant, Linear, Matern, White
from posthoc.likelihoods.base import Categorical, Gaussian
from posthoc.methods import (
    ELLA,
    GP,
    HMC,
    MAP,
    MFVI,
    SNGP,
    Dropout,
    Ensemble,
    Laplace,
    LaplaceTorch,
    Temperature,
    VaLLA,
    Vector,
    load,
)
from posthoc.predictive.base import Predictive
from posthoc.predictive.conformal import Conformal

__version__ = "0.1.0"

__all__ = [
    "ELLA",
    "FMGP",
    "GP",
    "HMC",
    "MAP",
    "MFVI",
    "RBF",
    "SNGP",
    "Categorical",
    "Comparison",
    "Conformal",
    "Constant",
    "DataError",
    "Dropout",
    "Ensemble",
    "FileError",
    "Gaussian",
    "Laplace",
    "LaplaceTorch",
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
    "VaLLA",
    "Vector",
    "White",
    "WrongTaskError",
    "__version__",
    "compare",
    "load",
    "open_outputs",
    "save_outputs",
]
