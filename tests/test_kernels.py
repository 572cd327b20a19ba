"""Kernels against textbook formulas and GPyTorch."""

import json
import math

import gpytorch
import pytest
import torch

from posthoc import RBF, Constant, Linear, Matern, OptionError, White
from posthoc.kernels import as_kernel, gram
from posthoc.kernels.registry import kernel_from_spec, same_form
from tests import oracles

G = torch.Generator().manual_seed(0)
A = {"inputs": torch.randn(6, 3, dtype=torch.float64, generator=G)}
B = {"inputs": torch.randn(4, 3, dtype=torch.float64, generator=G)}
THEIRS = gpytorch.kernels
SCALES = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def ready(kernel, points=A, default="inputs"):
    kernel.initialize(points, default)
    return kernel


@pytest.mark.parametrize(("nu", "name"), [(None, "rbf"), (0.5, "matern12"), (1.5, "matern32"), (2.5, "matern52")])
def test_stationary_kernels_are_their_formulas(nu, name):
    """Trap 3: length-scales are squared."""
    options = {"lengthscale": SCALES, "amplitude": 2.0}
    kernel = Matern(nu, **options) if nu else RBF(**options)
    expected = oracles.kernel_matrix(name, A["inputs"], B["inputs"], SCALES, 2.0)
    torch.testing.assert_close(ready(kernel)(A, B), expected)
    torch.testing.assert_close(kernel.diag(A), torch.full((6,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, math.inf])
def test_stationary_kernels_are_gpytorchs(nu):
    rbf = nu == math.inf
    shape = THEIRS.RBFKernel(ard_num_dims=3) if rbf else THEIRS.MaternKernel(nu, ard_num_dims=3)
    theirs = THEIRS.ScaleKernel(shape).double()
    theirs.outputscale, theirs.base_kernel.lengthscale = 1.7, SCALES
    ours = RBF(lengthscale=SCALES, amplitude=1.7) if rbf else Matern(nu, lengthscale=SCALES, amplitude=1.7)
    wrapped = ready(as_kernel(theirs))
    for a, b in ((A, B), (A, A)):
        # GPyTorch forms distances by products, so coincident points are 1e-8 apart under its square root.
        torch.testing.assert_close(ready(ours)(a, b), wrapped(a, b), rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.diag(A), wrapped.diag(A))


def test_rbf_keeps_its_digits_far_from_the_origin():
    shifted = {k: v + 1e7 for k, v in A.items()}, {k: v + 1e7 for k, v in B.items()}
    kernel = ready(RBF(lengthscale=1.0))
    torch.testing.assert_close(kernel(*shifted), kernel(A, B), rtol=1e-6, atol=1e-7)


def test_white_is_the_identity_of_a_point_not_of_its_coordinates():
    """Trap 4."""
    kernel = ready(RBF() + White(variance=0.3))
    same_place = {k: v.clone() for k, v in A.items()}
    assert float(kernel(A, same_place)[0, 0].detach()) == 1.0
    torch.testing.assert_close(kernel.diag(A), torch.full((6,), 1.3, dtype=torch.float64))
    torch.testing.assert_close(gram(kernel, A) - kernel(A, A), 0.3 * torch.eye(6, dtype=torch.float64))


def test_the_papers_classification_kernel():
    points = {**A, "features": torch.randn(6, 2, dtype=torch.float64, generator=G)}
    kernel = ready(RBF(on="inputs", lengthscale=1.5) * (Linear(on="features") + White()), points)
    rbf = oracles.kernel_matrix("rbf", A["inputs"], A["inputs"], torch.full((3,), 1.5, dtype=torch.float64), 1.0)
    linear = points["features"] @ points["features"].mT
    torch.testing.assert_close(gram(kernel, points), rbf * (linear + torch.eye(6, dtype=torch.float64)))
    torch.testing.assert_close(kernel(points, points), rbf * linear)
    assert kernel.spaces() == {"inputs", "features"}


def test_length_scales_start_from_the_median_distance():
    kernel = ready(RBF())
    distances = sorted(float((A["inputs"][i] - A["inputs"][j]).norm()) for i in range(6) for j in range(i + 1, 6))
    torch.testing.assert_close(kernel.log_lengthscale.exp(), torch.full((3,), distances[7], dtype=torch.float64))
    assert ready(RBF(), {"inputs": torch.ones(5, 2, dtype=torch.float64)}).log_lengthscale.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RBF(lengthscale=0.7, amplitude=3.0),
        lambda: Matern(1.5, on="inputs", lengthscale=SCALES).requires_grad_(False),
        lambda: RBF().requires_grad_(False) * (Linear(variance=0.1) + White(0.3)) + Constant(),
    ],
)
def test_a_recipe_gives_the_kernel_before_its_fit(make):
    again = kernel_from_spec(json.loads(json.dumps(make().recipe())))
    assert again.recipe() == make().recipe()
    for found, expected in zip(ready(again).parameters(), ready(make()).parameters(), strict=True):
        assert torch.equal(found, expected)
        assert found.requires_grad == expected.requires_grad
    loaded = ready(kernel_from_spec(make().spec()))
    loaded.load_state_dict(again.state_dict())
    assert torch.equal(gram(loaded, A), gram(again, A))


def test_forms_of_kernels_are_told_apart():
    paper = RBF(on="inputs") * (Linear(on="features") + White())
    assert same_form(paper.spec(), paper.recipe())
    assert same_form(RBF().spec(), RBF(on="inputs", lengthscale=2.0).recipe())
    for other in (RBF(on="inputs"), RBF(on="inputs") * (Linear(on="outputs") + White()), RBF() + (Linear() + White())):
        assert not same_form(paper.spec(), other.spec())
    assert not same_form(Matern(0.5).spec(), Matern(1.5).spec())


def test_gradients_agree_with_finite_differences():
    kernel = ready(RBF() * (Linear() + White()) + Matern(2.5) + Constant())
    names, values = zip(*kernel.named_parameters(), strict=True)

    def evaluate(x, z, *parameters):
        settings = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(kernel, settings, ({"inputs": x}, {"inputs": z}))

    x, z = A["inputs"][:2].clone().requires_grad_(), B["inputs"][:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(evaluate, (x, z, *values), atol=1e-7)


@pytest.mark.parametrize("of_points", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: RBF(lengthscale=SCALES, amplitude=2.0), lambda: RBF() * (Linear() + White()), lambda: Matern(1.5)]
)
def test_one_evaluation_for_both_has_the_gradients_of_two(make, of_points):
    """Also where nobody asks for the gradient of the points, which training does not."""
    kernel = ready(make())
    x, z = A["inputs"].clone().requires_grad_(of_points), B["inputs"].clone().requires_grad_()
    asked = [z, *kernel.parameters(), *([x] if of_points else [])]
    weights = torch.randn(10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    one = kernel.joint({"inputs": x}, {"inputs": z})
    two = torch.cat([kernel({"inputs": x}, {"inputs": z}), gram(kernel, {"inputs": z})])
    found, expected = (torch.autograd.grad((k * weights).sum(), asked) for k in (one, two))
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RBF(on="pixels"), "'inputs', 'features', 'outputs', got 'pixels'"),
        (lambda: RBF(lengthscale=-1.0), "above zero"),
        (lambda: Matern(3.0), "0.5, 1.5 or 2.5"),
        (lambda: ready(RBF(lengthscale=torch.ones(2))), "each of the 3 inputs, got 2"),
        (lambda: as_kernel("rbf"), "posthoc or GPyTorch kernel, got str"),
        (lambda: kernel_from_spec({"type": "magic"}), "got 'magic'"),
        (lambda: RBF(lengthscale="long"), "length-scales above zero, got 'long'"),
        (lambda: Linear(variance=None), "a variance above zero, got None"),
        (lambda: Matern(amplitude=torch.ones(2)), "an amplitude, which is one number, got 2"),
        (lambda: ready(as_kernel(THEIRS.MultitaskKernel(THEIRS.RBFKernel(), 2))), r"one row a point.*MultitaskKernel"),
        (lambda: ready(as_kernel(THEIRS.RBFKernel(batch_shape=torch.Size([2])))), r"one row a point.*\(2, 2, 2\)"),
        (lambda: ready(as_kernel(THEIRS.RBFKernel(ard_num_dims=7))), "looks at 3 inputs, got a RBFKernel that cannot"),
    ],
)
def test_impossible_kernels_are_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()
