"""posthoc: honest error bars on any pre-trained neural network.

Names are imported when they are first used, so that `import posthoc` is fast; `__init__.pyi` lists the same names for
type checkers and editors.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

MODULES = {
    "posthoc.collect": ("open_outputs", "save_outputs"),
    "posthoc.collect.outputs": ("Outputs",),
    "posthoc.errors": (
        "DataError",
        "FileError",
        "LayerError",
        "MissingExtraError",
        "NotFittedError",
        "NotPSDError",
        "OptionError",
        "PosthocError",
        "PosthocWarning",
        "TrainingError",
        "WrongTaskError",
    ),
    "posthoc.evaluate.compare": ("Comparison", "compare"),
    "posthoc.fmgp": ("FMGP",),
    "posthoc.kernels.base": ("RBF", "Constant", "Kernel", "Linear", "Matern", "White"),
    "posthoc.likelihoods.base": ("Categorical", "Gaussian", "Likelihood"),
    "posthoc.methods": (
        "ELLA",
        "GP",
        "HMC",
        "MAP",
        "MFVI",
        "SNGP",
        "Dropout",
        "Ensemble",
        "Laplace",
        "LaplaceTorch",
        "Temperature",
        "VaLLA",
        "Vector",
        "load",
    ),
    "posthoc.predictive.base": ("LatentGaussian", "Predictive"),
    "posthoc.predictive.classification": ("ClassificationPredictive",),
    "posthoc.predictive.conformal": ("Conformal",),
    "posthoc.predictive.regression": ("RegressionPredictive",),
}
"""The public names by the module that defines them."""

SUBMODULES = ("collect", "errors", "evaluate", "fmgp", "kernels", "likelihoods", "methods", "predictive", "training")
"""The modules that are attributes of the package without an import of their own."""

ORIGIN = {name: module for module, names in MODULES.items() for name in names}

__all__ = ["__version__", *ORIGIN]


def __getattr__(name: str) -> Any:
    if name in SUBMODULES:
        return import_module(f"posthoc.{name}")
    if name not in ORIGIN:
        raise AttributeError(f"module 'posthoc' has no attribute {name!r}")
    value = getattr(import_module(ORIGIN[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *SUBMODULES})
