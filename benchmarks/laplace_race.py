"""The last layer's Laplace approximation beside laplace-torch's, on a ResNet20's outputs for CIFAR-10.

    POSTHOC_DATA=... python -m benchmarks.laplace_race [--rounds 3] [--device cuda] [--out results.json]

Both are fitted on the training set's features, by the marginal likelihood, and scored on the test set: their negative
log-likelihoods are to agree, and ours is to take no more time. laplace-torch gets the layer as a network of its own and
the features as its data, in batches of a thousand; times are the best of the rounds, which alternate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.calibration_rows import read
from benchmarks.harness import console, finish, options, timed, with_data, yes
from posthoc import Laplace, Outputs
from posthoc.methods.laplace.last_layer import find_last_layer

KNOWN = {"kron": 0.2414, "full": 0.2384}
"""What laplace-torch gives from the network itself."""
CLOSE = 0.001


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    device, folder = torch.device(args.device), args.data_dir / "cifar10_resnet20"
    train, test = (read(folder, part, device) for part in ("train[:2000]" if args.quick else "train", "test"))
    found = {form: race(form, train, test, 1 if args.quick else args.rounds) for form in KNOWN}
    show(found)
    finish("laplace_race", args, {"rows": len(train), "rounds": args.rounds, "forms": found})


def race(form: Any, train: Outputs, test: Outputs, rounds: int) -> dict[str, Any]:
    device = train.outputs.device
    network = last_layer(train)
    rivals = {
        "posthoc": partial(ours, form, train, test),
        "laplace-torch": partial(theirs, form, network, train, test),
    }
    losses = {name: loss(run(), test) for name, run in rivals.items()}  # which wakes the libraries, too
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            times[name].append(timed(run, device))
    rows = {name: {"nll": losses[name], "seconds": min(times[name])} for name in rivals}
    mine, other = rows.values()
    agree = max(abs(mine["nll"] - other["nll"]), abs(mine["nll"] - KNOWN[form])) <= CLOSE
    return {**rows, "agree": agree, "no_slower": mine["seconds"] <= other["seconds"]}


def ours(form: Any, train: Outputs, test: Outputs) -> Tensor:
    return Laplace(None, "classification", curvature=form).fit(train).predict(test).probs


def theirs(form: Any, network: nn.Module, train: Outputs, test: Outputs) -> Tensor:
    from laplace import Laplace as LaplaceTorch

    assert train.features is not None
    assert train.targets is not None
    assert test.features is not None
    data = DataLoader(TensorDataset(train.features, train.targets), batch_size=1000)
    found: Any = LaplaceTorch(network, "classification", subset_of_weights="last_layer", hessian_structure=form)
    found.fit(data)
    found.optimize_prior_precision(method="marglik")
    return torch.cat([found(part, link_approx="probit") for part in test.features.split(1000)])


def last_layer(train: Outputs) -> nn.Module:
    """The layer as a network, which gives the outputs from the features."""
    home = train.outputs.device
    found = find_last_layer(None, train, home)
    assert found.bias is not None
    linear = nn.Linear(found.weight.shape[1], found.weight.shape[0], device=home)
    nn.utils.vector_to_parameters(torch.cat([found.weight.flatten(), found.bias]).float(), linear.parameters())
    return nn.Sequential(nn.Identity(), linear)


def loss(probs: Tensor, test: Outputs) -> float:
    assert test.targets is not None
    return -float(probs.double().log().gather(-1, test.targets[:, None]).mean())


def show(found: dict[str, Any]) -> None:
    table = Table("curvature", "", "nll", "fit and predict (s)", "agree, no slower")
    for form, row in found.items():
        for name in ("posthoc", "laplace-torch"):
            verdict = f"{yes(row['agree'])}, {yes(row['no_slower'])}" if name == "posthoc" else ""
            table.add_row(
                form if name == "posthoc" else "",
                name,
                f"{row[name]['nll']:.4f}",
                f"{row[name]['seconds']:.2f}",
                verdict,
            )
        table.add_section()
    console().print(table)


if __name__ == "__main__":
    main()
