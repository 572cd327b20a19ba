"""The public names, for type checkers and editors; `__init__.py` imports them when they are used."""

from posthoc import collect as collect
from posthoc import errors as errors
from posthoc import evaluate as evaluate
from posthoc import fmgp as fmgp
from posthoc import kernels as kernels
from posthoc import likelihoods as likelihoods
from posthoc import methods as methods
from posthoc import plots as plots
from posthoc import predictive as predictive
from posthoc import training as training
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
from posthoc.kernels import RBF, Constant, Kernel, Linear, Matern, White
from posthoc.likelihoods.base import Likelihood
from posthoc.likelihoods.categorical import Categorical
from posthoc.likelihoods.gaussian import Gaussian
from posthoc.methods import load
from posthoc.methods.calibrators import (
    Beta,
    Dirichlet,
    EnsembleTemperature,
    EntropyTemperature,
    Isotonic,
    StructuredMatrix,
    StructuredVector,
)
from posthoc.methods.gp import GP
from posthoc.methods.laplace.laplace import Laplace
from posthoc.methods.laplace_torch import LaplaceTorch
from posthoc.methods.map import MAP
from posthoc.methods.ntk.ella import ELLA
from posthoc.methods.ntk.valla import VaLLA
from posthoc.methods.temperature import Temperature
from posthoc.methods.vector import Vector
from posthoc.methods.weights.dropout import Dropout
from posthoc.methods.weights.ensemble import Ensemble
from posthoc.methods.weights.hmc import HMC
from posthoc.methods.weights.mfvi import MFVI
from posthoc.methods.weights.sngp import SNGP
from posthoc.predictive.base import LatentGaussian, Predictive
from posthoc.predictive.classification import ClassificationPredictive
from posthoc.predictive.conformal import Conformal
from posthoc.predictive.regression import RegressionPredictive

__version__: str

__all__ = [
    "ELLA",
    "FMGP",
    "GP",
    "HMC",
    "MAP",
    "MFVI",
    "RBF",
    "SNGP",
    "Beta",
    "Categorical",
    "ClassificationPredictive",
    "Comparison",
    "Conformal",
    "Constant",
    "DataError",
    "Dirichlet",
    "Dropout",
    "Ensemble",
    "EnsembleTemperature",
    "EntropyTemperature",
    "FileError",
    "Gaussian",
    "Isotonic",
    "Kernel",
    "Laplace",
    "LaplaceTorch",
    "LatentGaussian",
    "LayerError",
    "Likelihood",
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
    "RegressionPredictive",
    "StructuredMatrix",
    "StructuredVector",
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
