"""Kernels over what the predictor looked at: RBF, Matérn, Linear, Constant, White, sums and products of them.

A kernel reads named blocks of coordinates ("inputs", "features" or "outputs") from its points, so that one kernel may
look at several: `RBF(on="inputs") * (Linear(on="features") + White())` is the paper's classification kernel. Calling a
kernel gives the covariance between points that are all different; `diag` gives that of each point with itself. Only
`White` tells the two apart: its δ is the identity of a point, by role and not by value (a test point is never an
inducing point, even where their coordinates agree).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posthoc.errors import OptionError
from posthoc.kernels.rbf import RBFValues
from posthoc.validation import as_numbers, choice

__all__ = [
    "RBF",
    "Constant",
    "GPyTorchKernel",
    "Kernel",
    "Linear",
    "Matern",
    "Product",
    "Sum",
    "White",
    "as_kernel",
    "describe",
    "gram",
]

Space = Literal["inputs", "features", "outputs"]
Points = Mapping[str, Tensor]
"""Blocks of coordinates by name, each (N, D_block) in float64."""

SPACES = ("inputs", "features", "outputs")


class Kernel(nn.Module, ABC):
    """A covariance function, with parameters to learn. `requires_grad_(False)` keeps them as they are."""

    knows_identity = False
    """Whether a point's covariance with itself is another than with a point at the same place."""

    @abstractmethod
    def forward(self, a: Points, b: Points) -> Tensor:  # (N, M)
        """The covariance between the points of a and those of b, all different."""

    @abstractmethod
    def diag(self, a: Points) -> Tensor:  # (N,)
        """The covariance of each point with itself."""

    @abstractmethod
    def spaces(self) -> set[str | None]:
        """The blocks it reads; None stands for the default one."""

    @abstractmethod
    def start(self, sample: Points, default: str) -> None:
        """Settles on the default block where none was named, and takes first values from a sample of the data."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What `kernel_from_spec` needs to build it again, parameters aside."""

    def recipe(self) -> dict[str, Any]:
        """The spec, and where the parameters start and whether they are learnt: for one that is not fitted yet."""
        start = {name: [p.tolist(), p.requires_grad] for name, p in self.named_parameters(recurse=False)}
        return {**self.spec(), "start": start}

    def begin(self, start: Mapping[str, Any]) -> None:
        """Starts from where a `recipe` says; None stands for what the kernel would do by itself."""
        for name, (values, learnt) in start.items():
            parameter = self.get_parameter(name)
            if values is not None:
                parameter = nn.Parameter(torch.tensor(values, dtype=torch.float64))
            setattr(self, name, parameter.requires_grad_(learnt))

    def joint(self, x: Points, z: Points) -> tuple[Tensor, Tensor]:  # (N, M) and (M, M)
        """The covariance of x with z and, with its diagonal as `gram` has it, that among z: in one evaluation."""
        k = self({space: torch.cat([x[space], block]) for space, block in z.items()}, z)
        m = k.shape[1]
        k_xz, kzz = k.split([len(k) - m, m])
        return k_xz, gram(self, z, kzz)

    def __add__(self, other: Kernel) -> Kernel:
        return Sum(self, as_kernel(other))

    def __mul__(self, other: Kernel) -> Kernel:
        return Product(self, as_kernel(other))


def gram(
    kernel: Kernel,
    z: Points,
    different: Tensor | None = None,  # (M, M), kernel(z, z) where it is known already
) -> Tensor:  # (M, M)
    """The covariance among the points of z: each is itself on the diagonal."""
    k = kernel(z, z) if different is None else different
    return k.diagonal_scatter(kernel.diag(z)) if kernel.knows_identity else k


class _OnOneSpace(Kernel):
    """A kernel that reads one block."""

    def __init__(self, on: Space | None) -> None:
        super().__init__()
        if on is not None:
            choice("on", on, SPACES)
        self.on: str | None = on

    def spaces(self) -> set[str | None]:
        return {self.on}

    def start(self, sample: Points, default: str) -> None:
        self.on = self.on or default

    def block(self, points: Points) -> Tensor:
        assert self.on is not None, "start() settles the block"
        return points[self.on]


class _Stationary(_OnOneSpace):
    """amplitude · shape(distance), with one length-scale a dimension. Length-scales that are not given start from the
    median distance of a sample."""

    def __init__(
        self,
        on: Space | None = None,
        lengthscale: float | Tensor | None = None,
        amplitude: float = 1.0,
    ) -> None:
        super().__init__(on)
        self.from_median = lengthscale is None
        scales = log_positive(1.0 if lengthscale is None else lengthscale, "length-scales")
        self.log_lengthscale = nn.Parameter(scales.reshape(-1))
        self.log_amplitude = one_log_positive(amplitude, "an amplitude")

    def start(self, sample: Points, default: str) -> None:
        super().start(sample, default)
        x = self.block(sample)
        log_scale = self.log_lengthscale.detach().to(x.device)
        if self.from_median:
            log_scale = median_distance(x).log().reshape(1)
        if log_scale.numel() not in (1, x.shape[1]):
            raise OptionError(
                f"Expected one length-scale, or one for each of the {x.shape[1]} {self.on}, got {log_scale.numel()}."
            )
        trained = self.log_lengthscale.requires_grad
        self.log_lengthscale = nn.Parameter(log_scale.expand(x.shape[1]).clone(), requires_grad=trained)

    def recipe(self) -> dict[str, Any]:
        recipe = super().recipe()
        if self.from_median:
            recipe["start"]["log_lengthscale"][0] = None
        return recipe

    def begin(self, start: Mapping[str, Any]) -> None:
        super().begin(start)
        if "log_lengthscale" in start:
            self.from_median = start["log_lengthscale"][0] is None

    def scaled(self, points: Points) -> Tensor:
        return self.block(points) * (-self.log_lengthscale).exp()

    def diag(self, a: Points) -> Tensor:
        return self.log_amplitude.exp().expand(len(self.block(a)))


class RBF(_Stationary):
    """amplitude · exp(-½ Σ_j (x_j - x'_j)² / l_j²). The paper prints l_j where we, as usual, square it."""

    def forward(self, a: Points, b: Points) -> Tensor:
        return self._evaluate(a, b, among=False)

    def joint(self, x: Points, z: Points) -> tuple[Tensor, Tensor]:
        return self._evaluate(x, z, among=True)

    def _evaluate(self, a: Points, b: Points, *, among: bool) -> Any:
        blocks = self.block(a), self.block(b)
        return RBFValues.apply(*blocks, self.log_lengthscale, self.log_amplitude, among)  # type: ignore[no-untyped-call]

    def spec(self) -> dict[str, Any]:
        return {"type": "rbf", "on": self.on}


class Matern(_Stationary):
    """The Matérn family at ν = ½, 3/2 or 5/2: rougher than RBF, which is its limit."""

    def __init__(
        self,
        nu: float = 2.5,
        on: Space | None = None,
        lengthscale: float | Tensor | None = None,
        amplitude: float = 1.0,
    ) -> None:
        super().__init__(on, lengthscale, amplitude)
        if nu not in (0.5, 1.5, 2.5):
            raise OptionError(f"Expected nu of 0.5, 1.5 or 2.5, got {nu}.")
        self.nu = nu

    def forward(self, a: Points, b: Points) -> Tensor:
        # Differences, not products: the square root would turn a rounding of 1e-16 into one of 1e-8.
        r = torch.cdist(self.scaled(a), self.scaled(b), compute_mode="donot_use_mm_for_euclid_dist")
        r = math.sqrt(2.0 * self.nu) * r
        decay = (self.log_amplitude - r).exp()
        if self.nu == 0.5:
            return decay
        return (1.0 + r) * decay if self.nu == 1.5 else (1.0 + r + r.square() / 3.0) * decay

    def spec(self) -> dict[str, Any]:
        return {"type": "matern", "on": self.on, "nu": self.nu}


class Linear(_OnOneSpace):
    """variance · xᵀx': the kernel of Bayesian linear regression (add `Constant()` for its bias)."""

    def __init__(self, on: Space | None = None, variance: float = 1.0) -> None:
        super().__init__(on)
        self.log_variance = one_log_positive(variance, "a variance")

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.exp() * self.block(a) @ self.block(b).mT

    def diag(self, a: Points) -> Tensor:
        return self.log_variance.exp() * self.block(a).square().sum(-1)

    def spec(self) -> dict[str, Any]:
        return {"type": "linear", "on": self.on}


class _Everywhere(Kernel):
    """A kernel that reads no coordinate."""

    def __init__(self, variance: float = 1.0) -> None:
        super().__init__()
        self.log_variance = one_log_positive(variance, "a variance")

    def spaces(self) -> set[str | None]:
        return set()

    def start(self, sample: Points, default: str) -> None:
        pass

    def diag(self, a: Points) -> Tensor:
        return self.log_variance.exp().expand(count(a))


class Constant(_Everywhere):
    """The same covariance everywhere: an unknown shift of the whole function."""

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.exp().expand(count(a), count(b))

    def spec(self) -> dict[str, Any]:
        return {"type": "constant"}


class White(_Everywhere):
    """The paper's δ: variance of a point with itself, and nothing between two points."""

    knows_identity = True

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.log_variance.new_zeros(()).expand(count(a), count(b))

    def spec(self) -> dict[str, Any]:
        return {"type": "white"}


class _Pair(Kernel):
    """Two kernels joined."""

    def __init__(self, left: Kernel, right: Kernel) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.knows_identity = left.knows_identity or right.knows_identity

    def spaces(self) -> set[str | None]:
        return self.left.spaces() | self.right.spaces()

    def start(self, sample: Points, default: str) -> None:
        self.left.start(sample, default)
        self.right.start(sample, default)

    def spec(self) -> dict[str, Any]:
        return {"type": type(self).__name__.lower(), "left": self.left.spec(), "right": self.right.spec()}

    def recipe(self) -> dict[str, Any]:
        return {**self.spec(), "left": self.left.recipe(), "right": self.right.recipe()}


class Sum(_Pair):
    """k + k'."""

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.left(a, b) + self.right(a, b)

    def diag(self, a: Points) -> Tensor:
        return self.left.diag(a) + self.right.diag(a)


class Product(_Pair):
    """k · k'."""

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.left(a, b) * self.right(a, b)

    def diag(self, a: Points) -> Tensor:
        return self.left.diag(a) * self.right.diag(a)


class GPyTorchKernel(_OnOneSpace):
    """Any `gpytorch.kernels.Kernel`, on one block. Its class cannot be rebuilt from a file without running code, so
    `load` must be given the kernel again."""

    def __init__(self, kernel: Any, on: Space | None = None) -> None:
        super().__init__(on)
        self.knows_identity = True  # it may: some of GPyTorch's kernels add noise to their diagonal
        self.kernel = copy.deepcopy(kernel).double()

    def forward(self, a: Points, b: Points) -> Tensor:
        return self.kernel(self.block(a), self.block(b)).to_dense()

    def diag(self, a: Points) -> Tensor:
        return self.kernel(self.block(a), diag=True)

    def start(self, sample: Points, default: str) -> None:
        super().start(sample, default)
        x, name = self.block(sample)[:2], type(self.kernel).__name__
        try:
            found = tuple(self.kernel(x, x).shape)  # known before anything is computed
        except (RuntimeError, IndexError) as error:
            raise OptionError(
                f"Expected a GPyTorch kernel that looks at {x.shape[1]} {self.on}, got a {name} that cannot ({error})."
            ) from error
        if found != (len(x), len(x)):
            raise OptionError(
                f"Expected a GPyTorch kernel with one row a point, {(len(x), len(x))} for {len(x)} points, got "
                f"{found} from {name}: give the kernel of one output; how outputs are coupled is learnt beside it."
            )

    def spec(self) -> dict[str, Any]:
        return {"type": "gpytorch", "on": self.on, "parts": [describe(part) for part in self.kernel.modules()]}

    def recipe(self) -> dict[str, Any]:
        return self.spec()  # it comes with its own first values, wherever it is given


def as_kernel(kernel: Any) -> Kernel:
    """One of ours as it is, one of GPyTorch's wrapped."""
    if isinstance(kernel, Kernel):
        return kernel
    if any(t.__module__.partition(".")[0] == "gpytorch" for t in type(kernel).__mro__):
        if any(isinstance(part, Kernel) for part in kernel.modules()):
            raise OptionError("Expected a GPyTorch kernel with none of ours in it: write GPyTorchKernel(k) + RBF().")
        return GPyTorchKernel(kernel)
    raise OptionError(f"Expected a posthoc or GPyTorch kernel, got {type(kernel).__name__}.")


def describe(part: nn.Module) -> dict[str, Any]:
    """A module's class and plain settings, by which two kernels of one form are told from others."""
    plain = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str) and k != "training"}
    return {"class": type(part).__name__, **{k: v for k, v in plain.items() if not k.startswith("_")}}


def median_distance(x: Tensor) -> Tensor:  # ()
    """The median distance between different rows, or 1 where there is none."""
    distances = torch.pdist(x)
    distances = distances[distances > 0]
    return distances.median() if distances.numel() else x.new_ones(())


def count(points: Points) -> int:
    return len(next(iter(points.values())))


def log_positive(value: Any, name: str) -> Tensor:
    tensor = as_numbers(value, torch.float64)
    if tensor is None or not bool(((tensor > 0) & tensor.isfinite()).all()):
        raise OptionError(
            f"Expected {name} above zero, got {value.tolist() if isinstance(value, Tensor) else value!r}."
        )
    return tensor.log()


def one_log_positive(value: Any, name: str) -> nn.Parameter:  # ()
    """The logarithm of a single number above zero, to be learnt."""
    log = log_positive(value, name)
    if log.numel() != 1:
        raise OptionError(f"Expected {name}, which is one number, got {log.numel()}.")
    return nn.Parameter(log.reshape(()))
