"""The registry, the network as it is, and temperature scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from posthoc import FMGP, MAP, Categorical, FileError, Gaussian, OptionError, Outputs, PosthocWarning, Temperature, load
from posthoc.errors import TrainingError
from posthoc.evaluate.evaluate import evaluate
from posthoc.io import write_head
from posthoc.methods import REGISTRY, method_named
from tests.cases import Noisy, answers, inputs, labels, mlp, recorded, same, values

G = torch.Generator


def classified(n: int = 400, classes: int = 5, scale: float = 3.0, seed: int = 0) -> Outputs:
    """Logits that are `scale` times too sure of themselves."""
    g = G().manual_seed(seed)
    logits = torch.randn(n, classes, generator=g, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(1)
    return Outputs(scale * logits, y)


def nll(data: Outputs, temperature: float) -> float:
    return float(torch.nn.functional.cross_entropy(data.outputs / temperature, data.targets))


def temperature(data):
    """As `Temperature` finds it."""
    return Temperature(prior=None).fit(data).likelihood.temperature.item()


def test_registry_knows_methods_by_their_names():

    assert all(method.name == name for name, method in REGISTRY.items())
    assert method_named("fmgp") is FMGP
    with pytest.raises(OptionError, match=r"Expected a method among beta, .*, laplace, .*, got 'laplase'"):
        method_named("laplase")


def test_head_of_a_method_nobody_knows_is_refused(tmp_path):
    names = ("rounding", "network", "columns", "classes")
    header = {"method": "from_the_future", "config": {}, "likelihood": {}, "shapes": {}, **dict.fromkeys(names)}
    write_head(tmp_path / "head", {"a": torch.zeros(1)}, header)
    with pytest.raises(FileError, match="head of 'from_the_future'"):
        load(tmp_path / "head")


def test_map_is_the_softmax_of_the_network():
    data = classified()
    pred = MAP(None, "classification").fit(data).predict(data)
    torch.testing.assert_close(pred.probs, data.outputs.softmax(-1))
    assert (pred.latent.variance == 0).all()


@pytest.mark.parametrize("width", [1, 3])
def test_map_has_the_constant_noise_that_is_best_on_validation_data(width):
    g = G().manual_seed(1)
    outputs, residual = torch.randn(300, width, generator=g), torch.randn(300, width, generator=g)
    spread = torch.arange(1, width + 1)
    data, val = (Outputs(outputs, outputs + s * residual) for s in (0.1, spread))
    pred = MAP(None, "regression").fit(data, val=val).predict(val)
    torch.testing.assert_close(pred.std[0], (spread * residual).square().mean(0).sqrt())
    best = float(pred.log_prob(val.targets).mean())
    for factor in (0.95, 1.05):
        worse = torch.distributions.Normal(outputs, factor * pred.std).log_prob(val.targets).sum(-1).mean()
        assert float(worse) < best
    alone = MAP(None, "regression").fit(data).predict(val)
    torch.testing.assert_close(alone.std[0], 0.1 * residual.square().mean(0).sqrt())


def test_the_bare_predictor_behind_a_head():
    data = classified()
    head = FMGP(None, "classification", steps=3, num_inducing=4).fit(data)
    torch.testing.assert_close(MAP.beside(head).predict(data).probs, data.outputs.softmax(-1))
    reals = recorded(mlp(2), torch.randn(50, 3), values(50, 2))
    head = FMGP(None, Gaussian(noise="per_output"), steps=3, num_inducing=4).fit(reals)
    bare = MAP.beside(head).predict(reals)
    torch.testing.assert_close(bare.std[0], (reals.targets - reals.outputs).square().mean(0).sqrt())


def test_evaluate_gives_the_figures_of_both():
    data = classified()
    head = Temperature(None, "classification").fit(data)
    figures = evaluate(head, data, ood=classified(200, scale=0.1))
    assert figures["base_nll"] == pytest.approx(nll(data, 1.0), rel=1e-6)
    assert figures["nll"] == pytest.approx(nll(data, temperature(data)), rel=1e-6)
    assert figures["nll"] < figures["base_nll"]
    assert figures["accuracy"] == figures["base_accuracy"]
    assert figures["ood_auc"] > 0.7
    own = {name for name in figures if not name.startswith("base_")}
    assert figures.keys() - own == {f"base_{name}" for name in own}


class Failing(Noisy):
    """Raises, or overflows, once it has run `after` times."""

    def __init__(self, error: type[Exception] | None) -> None:
        super().__init__(3)
        self.runs, self.after, self.error = [0], 10**9, error

    def forward(self, x: Tensor) -> Tensor:
        self.runs[0] += 1
        fails = self.runs[0] > self.after
        if fails and self.error is not None:
            raise self.error("out of order")
        return self.last(self.body(x) * (math.nan if fails else 1.0))  # type: ignore[no-any-return]


def everything(network: nn.Module) -> list[Any]:
    """All that a fit must leave as it was, apart from the values of the state."""
    parts = list(network.modules())
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts]
    parameters = [(id(p), p.requires_grad, p.grad) for p in network.parameters()]
    flags = [(type(part), part.training) for part in parts]
    return [hooks, parameters, flags, torch.backends.mha.get_fastpath_enabled(), *dict(network.named_modules())]


TRAINED: dict[str, Any] = {"steps": 30, "batch_size": 10}
BOUNDED = {**TRAINED, "norm_bound": 0.1, "num_features": 16}


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("mfvi", {**TRAINED, "means": "fixed"}, None),
        ("mfvi", {**TRAINED, "means": "moved"}, RuntimeError),
        ("sngp", BOUNDED, None),
        ("sngp", BOUNDED, RuntimeError),
        ("dropout", {}, RuntimeError),
    ],
)
def test_a_fit_that_fails_leaves_everything_as_it_was(name, options, error):
    network, x, y = Failing(error), inputs(), values(outputs=3)
    network.body[3].eval()
    before, state = everything(network), {k: v.clone() for k, v in network.state_dict().items()}
    method = method_named(name)(network, "regression", **options).fit((x, y))
    fitted = answers(method.predict(x))
    assert everything(network) == before
    network.runs[0], network.after = 0, 20
    with pytest.raises(error or TrainingError, match="out of order" if error else "The loss became nan at step"):
        method.fit((x, y))
    network.after = 10**9
    assert everything(network) == before
    assert same(dict(network.state_dict()), state)
    assert same(answers(method.predict(x)), fitted)
    assert everything(network) == before


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("mfvi", {"means": "free"}, "means"),
        ("mfvi", {"kl_weight": 0}, "kl_weight to be a number above 0, got 0"),
        ("mfvi", {"initial_std": "small"}, "initial_std to be a number above 0, got 'small'"),
        ("mfvi", {"momentum": 0.9}, "Unknown option 'momentum'"),
        ("sngp", {"prediction": "exact"}, "prediction"),
        ("sngp", {"lengthscale": math.nan}, "lengthscale to be a number above 0"),
        ("sngp", {"prior_precision": True}, "prior_precision to be a number above 0, got True"),
        ("hmc", {"samples": 3}, "samples"),
        ("vector", {"ridge": math.nan}, "Expected ridge to be a number above 0"),
    ],
)
def test_bad_options_are_refused(name, options, match):
    with pytest.raises(OptionError, match=match):
        method_named(name)(mlp(3), "classification", **options)


@pytest.mark.parametrize(
    ("name", "network", "match"),
    [
        ("mfvi", nn.Sequential(nn.BatchNorm1d(3)), "got a Sequential without any"),
        ("sngp", nn.Sequential(nn.Flatten()), "last Linear layer, got a Sequential without any"),
        ("dropout", nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 2)), "needs dropout layers, got a Sequential"),
    ],
)
def test_networks_without_the_layers_that_a_method_needs_are_refused(name, network, match):
    with pytest.raises(OptionError, match=match):
        method_named(name)(network, "regression")


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0, 20.0])
def test_temperature_is_the_one_a_line_search_finds(scale):
    data = classified(scale=scale)
    best = minimize_scalar(lambda t: nll(data, t), bounds=(0.01, 100), method="bounded", options={"xatol": 1e-10})
    assert temperature(data) == pytest.approx(best.x, rel=1e-5)


def test_temperature_does_not_depend_on_shifts_nor_on_how_rows_are_read(monkeypatch):
    data = classified()
    whole, shifts = temperature(data), 1000.0 * torch.randn(len(data), 1, dtype=torch.float64)
    assert temperature(data.with_outputs(data.outputs + shifts)) == pytest.approx(whole, rel=1e-9)
    monkeypatch.setattr("posthoc.likelihoods.temperature.rows_that_fit", lambda numbers: 7)
    assert temperature(data) == pytest.approx(whole, rel=1e-9)


def test_a_network_that_is_always_right_or_never_is_told():
    logits = 2.0 * torch.eye(3).repeat(10, 1)
    for scale in (1e-6, 1.0, 1e6):
        with pytest.warns(PosthocWarning, match="all right on these data, so the temperature was limited to"):
            right = temperature(Outputs(scale * logits, logits.argmax(-1)))
        # In units of the root mean square of the logits below the top one, whatever their own are.
        assert right == pytest.approx(1e-4 * scale * 2.0 * math.sqrt(2 / 3))
        with pytest.warns(PosthocWarning, match="no better than chance"):
            temperature(Outputs(scale * logits, (logits.argmax(-1) + 1) % 3))


@pytest.mark.filterwarnings("error::posthoc.PosthocWarning")
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
def test_temperature_takes_logits_of_any_size(scale):
    data = classified()
    scaled = temperature(data.with_outputs(scale * data.outputs))
    assert scaled == pytest.approx(scale * temperature(data), rel=1e-6)


def test_temperature_is_for_classes_and_learns_it():
    with pytest.raises(OptionError, match="temperature is for classification, not for regression"):
        Temperature(None, "regression")
    with pytest.raises(OptionError, match="learns the temperature"):
        Temperature(None, Categorical(temperature=2.0)).fit(classified())


@pytest.mark.parametrize("name", ["fmgp", "map", "temperature", "vector"])
def test_probabilities_serve_as_well_as_logits(name, tmp_path):
    data = classified(60, 3)
    said = {"probs": data.outputs.softmax(-1), "log-probs": data.outputs.log_softmax(-1)}
    options = {"steps": 5, "num_inducing": 4, "inducing": "random"} if name == "fmgp" else {}
    make = REGISTRY[name]
    logits = Outputs(said["log-probs"], data.targets)
    expected = make(None, "classification", **options).fit(logits).predict(logits)
    for kind, outputs in said.items():
        head = make(None, "classification", outputs_are=kind, **options).fit(Outputs(outputs, data.targets))
        found = head.predict(Outputs(outputs)).probs
        torch.testing.assert_close(found, expected.probs)
        head.save(tmp_path / "head")
        assert torch.equal(load(tmp_path / "head").predict(Outputs(outputs)).probs, found)
    with pytest.raises(OptionError, match="outputs_are"):
        make(None, "classification", outputs_are="odds")


@pytest.mark.parametrize("columns", [1, 3])
def test_probabilities_taken_for_logits_are_doubted(columns):
    p = torch.rand(50, columns, generator=G().manual_seed(0))
    outputs = Outputs(p if columns == 1 else p.log().softmax(-1), labels(50, max(2, columns)))
    with pytest.warns(PosthocWarning, match="look like probabilities and are taken for logits"):
        MAP(None, "classification").fit(outputs)
    MAP(None, "classification", outputs_are="probs").fit(outputs)
