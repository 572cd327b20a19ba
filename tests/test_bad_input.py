"""What cannot be served is refused, with what was expected, what was found and what to do."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from posthoc import FMGP, RBF, Categorical, Gaussian, Outputs
from posthoc.errors import DataError, LayerError, NotFittedError, OptionError, PosthocError, PosthocWarning
from tests.cases import HIDDEN, QUICK, WIDTH, N, answers, in_eval, inputs, labels, mlp, numbers, recorded, same, values

BAD = [math.nan, math.inf, -math.inf]


def spoiled(x: Tensor, value: float, row: int = 4) -> Tensor:
    x = x.clone()
    x[row] = value
    return x


def regression(**options: Any) -> FMGP:
    return FMGP(**{"model": mlp(), "likelihood": "regression", **QUICK, **options})


def classification(**options: Any) -> FMGP:
    return regression(**{"model": mlp(3), "likelihood": "classification", **options})


def fitted(**options: Any) -> FMGP:
    return regression(**options).fit((inputs(), values()))


@pytest.mark.parametrize("value", BAD)
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    expected = rf"finite inputs, got {value} in row 4 \({WIDTH} such values\)\. Remove those rows"
    with pytest.raises(DataError, match=expected):
        regression().fit((spoiled(inputs(), value), values()))
    with pytest.raises(DataError, match=expected):
        fitted().predict(spoiled(inputs(), value))
    with pytest.raises(DataError, match=expected):
        fitted().predict(DataLoader(TensorDataset(spoiled(inputs(), value)), batch_size=10))


@pytest.mark.parametrize("value", BAD)
def test_outputs_that_are_not_finite_are_refused(value: float) -> None:
    def broken(x: Tensor) -> Tensor:
        return spoiled(x[:, :1], value)

    healthy = fit_to(lambda x: x[:, :1])
    healthy.backbone.model = broken  # type: ignore[union-attr]
    for call in (lambda: fit_to(broken), lambda: healthy.predict(inputs())):
        with pytest.raises(DataError, match=rf"finite outputs, got {value} in row 4"):
            call()


def test_features_that_are_not_finite_are_refused_though_the_outputs_are() -> None:
    model: Any = mlp()
    model[0].bias.data.fill_(math.inf)
    with pytest.raises(DataError, match=r"finite features, got inf in row 0"):
        fit_to(model, layer="0")


@pytest.mark.parametrize("part", ["outputs", "targets", "features", "inputs"])
def test_outputs_object_refuses_what_is_not_finite(part: str) -> None:
    columns = {name: values() for name in ("outputs", "targets", "features", "inputs")}
    with pytest.raises(DataError, match=f"finite {part}, got nan in row 4"):
        Outputs(**{**columns, part: spoiled(columns[part], math.nan)})


def label(value: int) -> Tensor:
    return labels().index_fill(0, torch.tensor([4]), value)


def of_shapes(outputs: tuple[int, ...], targets: tuple[int, ...]) -> Outputs:
    return Outputs(torch.zeros(outputs), torch.ones(targets))


EMPTY: list[Any] = []
NOTHING = r"at least one data point.*got none"
NO_TARGETS = r"Expected targets: batches \(x, y\), mappings with labels, Outputs"
REGRESSIONS: list[tuple[Any, str]] = [
    *(((inputs(), spoiled(values(), bad)), f"finite targets, got {bad} in row 4.*Remove those rows") for bad in BAD),
    ((spoiled(inputs(300), math.nan, row=280), values(300)), "in row 280"),
    ((inputs(), torch.ones(N, 1, dtype=torch.bool)), r"real numbers as regression targets, got torch\.bool"),
    ((inputs(), torch.ones(N, 1, dtype=torch.complex64)), r"real numbers as regression targets, got torch\.complex64"),
    ((inputs(), values(N - 1)), r"as many rows each, got \[29, 30\]"),
    ([(inputs(), values()), (inputs(),)], "targets in every batch, got them in 1 of 2"),
    (inputs(), NO_TARGETS),
    ([inputs()], NO_TARGETS),
    ([(inputs(),)], NO_TARGETS),
    ({"input": inputs()}, NO_TARGETS),
    (Outputs(values()), NO_TARGETS),
    *((empty, "at least one data point, got none") for empty in (EMPTY, (inputs(0), values(0)), iter(()))),
    (Outputs(values(0), values(0)), "at least one data point, got none"),
    (3, "DataLoader, a pair of arrays .*got int"),
    (None, "DataLoader, a pair of arrays .*got NoneType"),
    (object(), "DataLoader, a pair of arrays .*got object"),
    (of_shapes((N, 2, 2), (N, 2, 2)), r"\(N,\) or \(N, outputs\), got \(30, 2, 2\): wrap the model"),
    (of_shapes((N,), (N, N)), r"output shape \(30,\), got \(30, 30\): reshape the targets"),
    (of_shapes((N, 1), (N, N)), r"output shape \(30, 1\), got \(30, 30\): reshape the targets"),
    (of_shapes((N, 1), (N, 2)), r"output shape \(30, 1\), got \(30, 2\): reshape the targets"),
    (of_shapes((N, 2), (N,)), r"output shape \(30, 2\), got \(30,\): reshape the targets"),
    (of_shapes((N, 2), (N, 1)), r"output shape \(30, 2\), got \(30, 1\): reshape the targets"),
    (of_shapes((N, 3), (N, 1, 3)), r"output shape \(30, 3\), got \(30, 1, 3\): reshape the targets"),
]
CLASSIFICATIONS: list[tuple[Any, str]] = [
    ((inputs(), label(3)), r"labels from 0 to 2 \(the network has 3 outputs\), got 3 in row 4"),
    ((inputs(), label(-1)), r"labels from 0 to 2 .* got -1 in row 4"),
    ((inputs(), labels().float()), r'integer class labels.*got torch.float32.*\.long\(\).*likelihood="regression"'),
    ((inputs(), labels().bool()), r"integer class labels.*got torch.bool"),
    ((inputs(), torch.eye(3)[labels()].long()), rf"shape \({N},\), got \({N}, 3\)\. These look one-hot: use y\.argmax"),
    ((inputs(), torch.eye(3)[labels()]), r"one-hot: use y\.argmax\(-1\)"),
    ([(inputs(2), ["cat", "dog"])], "Expected numbers, got an array of"),
    (of_shapes((N, 3, 2), (N,)), r"logits of shape \(N, classes\) with at least 2 .*got \(30, 3, 2\)"),
]


@pytest.mark.parametrize(("data", "message"), REGRESSIONS)
def test_data_that_no_regression_takes_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        regression().fit(data)


@pytest.mark.parametrize(("data", "message"), CLASSIFICATIONS)
def test_data_that_no_classification_takes_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        classification().fit(data)


def itself(**options: Any) -> FMGP:
    return regression(model=lambda x: x, **options)


def ones(*widths: int) -> tuple[Tensor, ...]:
    return tuple(torch.ones(5, width) for width in widths)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.auxiliary = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def fit_to(model: Any, **options: Any) -> FMGP:
    return regression(model=model, **options).fit((inputs(), values()))


def of_classes(given: Any) -> FMGP:
    return classification(inducing_classes=given).fit((inputs(), labels()))


UNUSED = r"'auxiliary' was not used.*layer=\.\.\.; the layers are: used, auxiliary"
NO_TENSOR = r"return a tensor \(or an object with \.logits\), got"
CALLS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: itself().fit([ones(3, 3), ones(4, 4)]),
        DataError,
        r"outputs of one width, got .* widths \[\(3,\), \(4,\)\]",
    ),
    (
        lambda: regression(model=lambda x: x[:, :1], kernel=RBF(on="inputs")).fit([ones(3, 1), ones(4, 1)]),
        DataError,
        r"inputs of one width, got batches of widths \[\(3,\), \(4,\)\]",
    ),
    (lambda: itself().fit(ones(3, 3), val=ones(4, 4)), DataError, r"shape \('N', 3\) as in fit, got \('N', 4\)"),
    (lambda: of_shapes((N,), (1, N)), DataError, f"as many rows of targets as of outputs, {N}, got 1"),
    (lambda: Outputs(values(), None, inputs(N - 1)), DataError, "as many rows of features as of outputs, 30, got 29"),
    (lambda: itself(kernel=RBF(on="outputs")).fit([*zip(inputs(), labels(), strict=True)]), PosthocError, "Expected"),
    (
        lambda: FMGP(lambda x: x.argmax(-1), "classification", **QUICK).fit((inputs(), labels())),
        DataError,
        r"real-valued outputs \(logits or regression values\), got torch\.int64",
    ),
    (lambda: FMGP({"weights": 1}, "regression"), DataError, r"model that can be called \(or None\), got dict"),
    (lambda: regression(layer="penultimate"), LayerError, r"got 'penultimate'\. The layers are: 0, 1, 2\."),
    (lambda: itself(layer="head"), LayerError, r"nn\.Module to take layer 'head' from, got function\. Leave layer out"),
    (lambda: fitted(kernel=RBF(lengthscale=torch.ones(2))), OptionError, f"each of the {HIDDEN} features, got 2"),
    (lambda: of_classes([0, 1, 2, 3]), OptionError, r"4 inducing_classes from 0 to 2, got \[0, 1, 2, 3\]"),
    (lambda: of_classes("abcd"), OptionError, "4 inducing_classes from 0 to 2, got 'abcd'"),
    (lambda: regression(inducing=None), OptionError, "points of your own"),
    *((lambda x=x: fitted().predict(x), DataError, NOTHING) for x in (EMPTY, inputs(0), iter(()), Outputs(values(0)))),
    (lambda: fit_to(Unused()), LayerError, UNUSED),
    (lambda: fit_to(Unused(), layer="auxiliary"), LayerError, UNUSED),
    (lambda: fit_to(lambda x: (x, x)), DataError, f"{NO_TENSOR} tuple. Wrap it"),
    (lambda: fit_to(lambda x: [x]), DataError, f"{NO_TENSOR} list. Wrap it"),
    (lambda: fit_to(lambda x: {"scores": x}), DataError, f"{NO_TENSOR} dict. Wrap it"),
    (lambda: fit_to(lambda x: None), DataError, f"{NO_TENSOR} NoneType. Wrap it"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_calls_that_cannot_be_served_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("space", ["features", "inputs"])
def test_kernel_on_what_the_outputs_lack_is_refused(space: Any) -> None:
    with pytest.raises(DataError, match=rf'Expected {space} .*got only outputs.*on="outputs"'):
        regression(model=None, kernel=RBF(on=space)).fit(Outputs(values(), values()))


@pytest.mark.parametrize("model", [lambda x: x[:, 0, :1], nn.Sequential(nn.Conv1d(1, 1, WIDTH), nn.Flatten())])
def test_kernel_on_features_is_refused_where_there_are_none(model: Any) -> None:
    with pytest.raises(LayerError, match=r'layer to take features from.*found none.*layer=.*kernel on="inputs"'):
        regression(model=model, kernel=RBF(on="features")).fit((inputs()[:, None], values()))


@pytest.mark.parametrize("y", [labels(N, 3).reshape(1, N), labels(2 * N).reshape(N, 2), labels(N - 1), labels(N + 1)])
def test_class_labels_of_another_shape_are_refused(y: Tensor) -> None:
    for make in (lambda: Outputs(mlp(3)(inputs()), y), lambda: (inputs(), y)):
        with pytest.raises(DataError, match=r"Expected (one class label a row|as many rows|arrays with as many rows)"):
            classification().fit(make())


@pytest.mark.parametrize(
    "form", [Tensor.int, Tensor.byte, lambda y: y[:, None], lambda y: y.numpy().astype(np.uint16), Tensor.tolist]
)
def test_usual_forms_of_class_labels_are_taken(form: Any) -> None:
    found = classification().fit([(inputs(), form(labels()))])
    assert same(numbers(found), numbers(classification().fit((inputs(), labels()))))


@pytest.mark.parametrize(("outputs", "targets"), [((N,), (N, 1)), ((N, 1), (N,))])
def test_a_column_and_a_flat_target_are_the_same_numbers(outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    mean, y, features = values(seed=8), values(), inputs()
    expected = FMGP(None, "regression", **QUICK).fit(Outputs(mean, y, features))
    found = FMGP(None, "regression", **QUICK).fit(Outputs(mean.reshape(outputs), y.reshape(targets), features))
    assert same(numbers(found), numbers(expected))
    assert found.predict(Outputs(mean.reshape(outputs), None, features)).variance.shape == outputs


def test_log_prob_is_as_strict_about_observations_as_fit() -> None:
    pred = fitted().predict(inputs())
    assert pred.log_prob(values().squeeze(1)).shape == (N,)
    for shape in ((N, N), (1,)):
        with pytest.raises(DataError, match="not broadcast"):
            pred.log_prob(torch.zeros(shape))
    with pytest.raises(DataError, match="finite targets, got nan in row 4"):
        pred.log_prob(spoiled(values(), math.nan))


def test_outputs_of_no_rows_may_be_selected_and_predicting_them_is_refused() -> None:
    at = recorded(mlp(), inputs())
    nothing = at[torch.zeros(N, dtype=torch.bool)]
    assert len(nothing) == 0
    assert nothing.features.shape == (0, HIDDEN)  # type: ignore[union-attr]
    with pytest.raises(DataError, match=NOTHING):
        fitted().predict(nothing)


def test_an_empty_batch_among_others_is_passed_over() -> None:
    batches = [(inputs(0), values(0)), (inputs(), values())]
    method = regression().fit(batches)
    assert same(numbers(method), numbers(fitted()))
    assert len(method.predict(batches)) == N


def test_batch_that_the_network_cannot_take_raises_its_own_error_with_a_note() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fitted().predict(torch.ones(4, WIDTH + 1))
    assert "your model" in caught.value.__notes__[0]


@pytest.mark.parametrize("form", ["batch", "loader"])
def test_predicting_outputs_of_another_width_is_refused(form: str) -> None:
    method = itself().fit((inputs(), inputs()))
    good, bad = inputs(4), torch.ones(4, 4)
    with pytest.raises(DataError, match=r"shape \('N', 3\) as in fit, got \('N', 4\)"):
        method.predict(bad if form == "batch" else iter([good, bad]))


def test_predicting_features_of_another_width_is_refused() -> None:
    outputs = Outputs(values(), values(), inputs())
    method = FMGP(None, "regression", **QUICK).fit(outputs)
    with pytest.raises(DataError, match="features of width 3 as in fit, got 2"):
        method.predict(Outputs(values(), None, inputs()[:, :2]))
    with pytest.raises(DataError, match="Expected features, which the kernel looks at, got outputs without them"):
        method.predict(Outputs(values()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_half_precision_is_served_with_a_warning(task: str, dtype: torch.dtype) -> None:
    model = mlp(3, dtype=dtype)
    x, y = inputs(dtype=dtype), values(N, 3) if task == "regression" else labels()
    method = FMGP(model, task, **QUICK)
    with pytest.warns(PosthocWarning, match=rf"{dtype}: means stay as they are.*float64.*float32") as caught:
        method.fit((x, y))
    assert caught[0].filename == __file__
    pred = method.predict(x)
    assert pred.latent.mean.dtype == dtype
    assert torch.equal(pred.latent.mean, in_eval(model, x))
    assert pred.latent.variance.dtype == torch.float32
    assert bool(((pred.latent.variance > 0) & pred.latent.variance.isfinite()).all())
    assert bool(pred.log_prob(y).isfinite().all())
    # The answer is that of the same outputs in full precision.
    at = recorded(model, x, y)
    full = Outputs(at.outputs.double(), y, at.features.double())  # type: ignore[union-attr]
    expected = FMGP(None, task, **QUICK).fit(full).predict(full)
    torch.testing.assert_close(pred.latent.variance.double(), expected.latent.variance, rtol=1e-5, atol=1e-7)


def test_real_arrays_are_cast_for_a_half_precision_network() -> None:
    method = FMGP(mlp(dtype=torch.bfloat16), "regression", **QUICK)
    with pytest.warns(PosthocWarning, match="bfloat16"):
        method.fit((inputs().double().numpy(), values().numpy()))
    assert method.predict(inputs().numpy()).mean.dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["pairwise", "logit_scaling"])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_alpha_other_than_one_is_refused_where_the_training_form_ignores_it(alpha: float, form: Any) -> None:
    with pytest.raises(OptionError, match=rf'{form}.*got alpha = {alpha}.*Categorical\(training="monte_carlo"\)'):
        FMGP(mlp(3), Categorical(training=form), alpha=alpha)
    FMGP(mlp(3), Categorical(training="monte_carlo"), alpha=alpha)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"alpha": bad}, f"alpha .* at most 1, got {bad}") for bad in (-0.1, 1.1, math.nan, math.inf)),
        ({"stepz": 3}, "stepz.*Did you mean steps"),
        ({"novelty": 1.0}, "Unknown option 'novelty' of fmgp. Its options are: .*ood_strength"),
        *(({"steps": bad}, f"steps to be an integer of at least 0 or None, got {bad}") for bad in (-1, 1.5)),
        *(({name: 0}, f"{name} to be an integer of at least 1, got 0") for name in ("batch_size", "eval_every")),
        ({"seed": -1}, "seed to be an integer of at least 0 .*, got -1"),
        *(({"lr": bad}, f"lr to be a number above 0 or None, got {bad}") for bad in (0.0, math.nan)),
        ({"patience": 0}, "patience to be an integer of at least 1 or None, got 0"),
        ({"variance": "diagonal"}, "'auto', 'per_output', 'shared', 'separable', got 'diagonal'"),
        ({"inducing": "grid"}, "'kmeans', 'random', 'per_class', got 'grid'"),
        ({"inducing": "per_class"}, "needs classes"),
        ({"kl": "twice"}, "'copies', 'once' or None, got 'twice'"),
        *(({"num_inducing": bad}, f"num_inducing to be an integer of at least 1, got {bad}") for bad in (0, 2.5)),
        *(({"output_rank": bad}, "output_rank") for bad in (0, -1)),
        ({"kernel": "rbf"}, "posthoc or GPyTorch kernel, got str"),
        ({"ood_strength": 1.0}, "ood_strength is an option for classification and does nothing for regression"),
        ({"outputs_are": "probs"}, "outputs_are is an option for classification, got 'probs' for a regression"),
        ({"variance": "per_output", "kl": "once"}, 'kl does nothing for variance="per_output": leave it out'),
        ({"variance": "shared", "output_rank": 2}, 'output_rank does nothing for variance="shared"'),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FMGP(mlp(), "regression", **options)


NUM_DATA = "num_data to be an integer of at least 1, got"
NO_LIKELIHOOD = (
    r'Expected the likelihood "regression" or "classification" \(or an object, Gaussian\(\) or Categorical\(\)\), '
)
NO_LIKELIHOODS = (None, 3, nn.CrossEntropyLoss(), Gaussian, ["regression"], {"type": ["gaussian"]}, {"noise": "shared"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FMGP("classification"), r"a model first, got 'classification': FMGP\(likelihood='classification'\)"),
        (lambda: classification(residuals="gaussian"), "residuals is an option for regression and does nothing for"),
        (lambda: FMGP(mlp(), "ranking"), '"regression" or "classification" .*got \'ranking\''),
        (lambda: Gaussian(noise="free"), "'shared', 'per_output', got 'free'"),
        (lambda: Categorical(training="exact"), "'monte_carlo', got 'exact'"),
        (lambda: Categorical(prediction="exact"), "'monte_carlo', got 'exact'"),
        (lambda: Categorical(temperature=0.0), "positive temperature, or None to learn it, got 0.0"),
        (lambda: Categorical(temperature="hot"), "positive temperature.*got 'hot'"),
        (lambda: Categorical(temperature=torch.ones(2)), "positive temperature.*got tensor"),
        (lambda: Categorical(temperature=math.inf), "positive temperature.*got inf"),
        (lambda: Categorical(samples=0), "samples to be an integer of at least 1, got 0"),
        (lambda: RBF(on="pixels"), "'inputs', 'features', 'outputs', got 'pixels'"),
        (lambda: RBF(lengthscale=-1.0), "length-scales above zero, got -1.0"),
        (lambda: RBF(amplitude=math.nan), "amplitude above zero, got nan"),
        *((lambda n=n: fitted().fit((inputs(), values()), num_data=n), NUM_DATA) for n in (0, 2.5, "5")),
        *((lambda given=given: FMGP(mlp(), given), NO_LIKELIHOOD) for given in NO_LIKELIHOODS),
    ],
)
def test_options_of_the_parts_that_make_no_sense_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize("inducing", ["kmeans", "random", "per_class"])
def test_more_inducing_points_than_data_are_cut_with_a_warning(inducing: str) -> None:
    method = classification(inducing=inducing, num_inducing=9)
    with pytest.warns(PosthocWarning, match="9 inducing points but there are only 5 data points: using 5"):
        method.fit((inputs(5), labels(5)))
    assert method.head.process.l_raw.shape == (5, 5)  # type: ignore[union-attr]
    assert bool(method.predict(inputs()).latent.variance.isfinite().all())


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_one_data_point_is_enough(task: str) -> None:
    model, x = mlp(3), inputs(1)
    y = values(1, 3) if task == "regression" else labels(1)
    method = FMGP(model, task, **{**QUICK, "num_inducing": 1}).fit((x, y))
    variance = method.predict(inputs()).latent.variance
    assert bool(((variance > 0) & variance.isfinite()).all())
    assert torch.equal(method.predict(x).latent.mean, in_eval(model, x))


@pytest.mark.parametrize("form", ["tensor", "numpy", "mapping"])
def test_inducing_points_of_ones_own_are_taken(form: str) -> None:
    z = values(4, HIDDEN)
    given: Any = {"tensor": z, "numpy": z.numpy(), "mapping": {"features": z}}[form]
    method = regression(inducing=given, standardize=False, steps=0).fit((inputs(), values()))
    assert torch.equal(method.head.process.z["features"].detach(), z.double())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("z", "error", "message"),
    [
        (torch.zeros(4, 2), DataError, rf"shape \(M, {HIDDEN}\) for features, got \(4, 2\)"),
        (torch.zeros(0, HIDDEN), DataError, rf"shape \(M, {HIDDEN}\) for features, got \(0, {HIDDEN}\)"),
        (torch.full((4, HIDDEN), math.nan), DataError, "finite inducing points"),
        ({"inputs": torch.zeros(4, WIDTH)}, OptionError, "points for features, got them for inputs"),
        (None, OptionError, r'"kmeans" or "random".*points of your own, numbers of shape \(M, D\), got None'),
        ([["a"]], OptionError, r"points of your own.*got \[\['a'\]\]"),
        ({"features": "a"}, OptionError, "points of your own.*got 'a'"),
    ],
)
def test_inducing_points_that_do_not_fit_are_refused(z: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fitted(inducing=z)


def test_without_a_model_only_outputs_are_taken() -> None:
    method = FMGP(None, "regression", **QUICK)
    expected = r"Expected posthoc\.Outputs.*no model to run, got"
    with pytest.raises(DataError, match=rf"{expected} tuple.*FMGP\(model, \.\.\.\)"):
        method.fit((inputs(), values()))
    method.fit(recorded(mlp(), inputs(), values()))
    with pytest.raises(DataError, match=f"{expected} Tensor"):
        method.predict(inputs())


def test_predicting_and_saving_need_a_fit(tmp_path: Path) -> None:
    for name, given in (("predict", inputs()), ("save", tmp_path / "head.safetensors")):
        with pytest.raises(NotFittedError, match=rf"Call fit\(\.\.\.\) before {name}\(\), or load"):
            getattr(regression(), name)(given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data",
    [(inputs(), spoiled(values(), math.nan)), (spoiled(inputs(), math.nan), values()), (inputs(), values(N, 2)), []],
)
def test_failed_fit_leaves_the_method_as_it_was(data: Any) -> None:
    method = regression()
    with pytest.raises(DataError):
        method.fit(data)
    assert not method.fitted
    with pytest.raises(NotFittedError):
        method.predict(inputs())
    method.fit((inputs(), values()))
    before, history = answers(method.predict(inputs())), copy.deepcopy(method.history)
    with pytest.raises(DataError):
        method.fit(data)
    assert method.fitted
    assert same(answers(method.predict(inputs())), before)
    assert method.history == history


def test_fit_that_fails_in_training_leaves_an_earlier_one_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    method = fitted()
    before = answers(method.predict(inputs()))
    monkeypatch.setattr("posthoc.fmgp.build.train", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        method.fit((inputs(seed=9), values(seed=10)))
    assert same(answers(method.predict(inputs())), before)


def test_targets_belong_beside_inputs_that_are_arrays() -> None:
    x, y = torch.randn(30, WIDTH), torch.randn(30, 1)
    loader = DataLoader(TensorDataset(x, y))
    method = FMGP(nn.Linear(WIDTH, 1), "regression", **QUICK)
    for data, targets, message in [
        (loader, loader, r"targets as an array beside the inputs, got a DataLoader: validation data are val="),
        (loader, y, "targets inside the DataLoader, got them beside it"),
        ((x, y), y, "targets inside the tuple, got them beside it"),
        ("c.npz", y, "targets inside the str, got them beside it"),
    ]:
        with pytest.raises(DataError, match=message):
            method.fit(data, targets)


def test_a_single_point_is_met_with_advice() -> None:
    x, y = torch.randn(30, WIDTH), torch.randn(30, 1)
    for model, targets in ((nn.Linear(WIDTH, 1), y), (lambda x: x.sum(-1), y[:, 0])):
        method = FMGP(model, "regression", **QUICK).fit(x, targets)
        with pytest.raises(DataError, match=r"a single point must be a batch of one, x\[None\]"):
            method.predict(x[0])
