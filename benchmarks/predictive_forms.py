"""How well each form of E[softmax(f/τ)] does, f Gaussian, against 100,000 draws: on the logits of a real classifier.

    POSTHOC_DATA=... python -m benchmarks.predictive_forms [--rows 500] [--out results.json]

The Gaussians are those of FMGP, fitted on 4,000 CIFAR-10 images with a ResNet20 (`variance="per_output"` and
"separable"); the rows are of the next 1,000. Named are the mean KL from the reference, the largest error of a
probability, how many classes change, the NLL that the form itself would have, and the time for all rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.calibration_rows import read
from benchmarks.harness import console, finish, options, with_data
from posthoc import FMGP, Outputs

REFERENCE, AT_ONCE = 100_000, 2000
Form = Callable[[Tensor, Tensor, float], Tensor]
"""From means (N, C), covariances (N, C, C) and τ to log-probabilities (N, C)."""


def pairwise(mean: Tensor, v: Tensor, tau: float) -> Tensor:
    top = mean.argmax(-1)
    rows = torch.arange(len(mean))
    apart = diagonal(v) + diagonal(v)[rows, top][:, None] - 2.0 * v[rows, top]
    return ((mean - mean[rows, top][:, None]) / (tau**2 + math.pi / 16 * apart).sqrt()).log_softmax(-1)


def max_gauge(mean: Tensor, v: Tensor, tau: float) -> Tensor:
    return logit_scaling(mean - mean.amax(-1, keepdim=True), v, tau)


def logit_scaling(mean: Tensor, v: Tensor, tau: float) -> Tensor:
    return (mean / (tau**2 + math.pi / 8 * diagonal(v)).sqrt()).log_softmax(-1)


def mean_field(mean: Tensor, v: Tensor, tau: float) -> Tensor:
    """Every pair of classes by its own difference (Lu, Ie and Sha, 2020), normalized."""
    d = diagonal(v)
    apart = d[:, :, None] + d[:, None, :] - 2.0 * v
    ratio = (mean[:, None, :] - mean[:, :, None]) / (tau**2 + math.pi / 8 * apart).sqrt()
    return -ratio.logsumexp(-1) - (-ratio.logsumexp(-1)).logsumexp(-1, keepdim=True)


def monte_carlo(samples: int, *, sobol: bool = False) -> Form:
    def form(mean: Tensor, v: Tensor, tau: float) -> Tensor:
        root = torch.linalg.cholesky(v + 1e-9 * torch.eye(v.shape[-1], dtype=v.dtype))
        total = torch.full_like(mean, -math.inf)
        generator = torch.Generator().manual_seed(1)
        engine = torch.quasirandom.SobolEngine(mean.shape[1], scramble=True, seed=1) if sobol else None
        for start in range(0, samples, AT_ONCE):
            count = min(AT_ONCE, samples - start)
            if engine is not None:
                noise = torch.special.ndtri(engine.draw(count, dtype=mean.dtype).clamp(1e-12, 1 - 1e-12))
            else:
                noise = torch.randn(count, mean.shape[1], dtype=mean.dtype, generator=generator)
            draws = mean + torch.einsum("ncd,sd->snc", root, noise)
            total = torch.logaddexp(total, (draws / tau).log_softmax(-1).logsumexp(0))
        return total - math.log(samples)

    return form


FORMS: dict[str, Form] = {
    "pairwise, the default": pairwise,
    "max-logit gauge": max_gauge,
    "logit scaling, the paper's": logit_scaling,
    "mean field over pairs": mean_field,
    "Monte Carlo, 128": monte_carlo(128),
    "Sobol points, 128": monte_carlo(128, sobol=True),
    "Monte Carlo, 1,024": monte_carlo(1024),
}


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    with_data(parser)
    parser.add_argument("--rows", type=int, default=500)
    args = parser.parse_args(argv)
    data = read(args.data_dir / "cifar10_resnet20", "test[:5000]", torch.device("cpu"))
    screen, runs = console(), {}
    for variance in ("per_output", "separable"):
        options_ = {"steps": 10} if args.quick else {}
        method = FMGP(None, "classification", variance=variance, ood_strength=0.0, progress=False, **options_).fit(
            data[:4000]
        )
        runs[variance] = errors(method, data[4000 : 4000 + args.rows], 2000 if args.quick else REFERENCE)
        table = Table("", "KL from reference", "largest error", "changed", "NLL", "ms", title=f"V of {variance}")
        for name, row in runs[variance].items():
            table.add_row(name, f"{row['kl']:.1e}", f"{row['error']:.3f}", str(row["changed"]), f"{row['nll']:.4f}",
                          f"{row['milliseconds']:.1f}")  # fmt: skip
        screen.print(table)
    finish("predictive_forms", args, {"rows": args.rows, "runs": runs})


def errors(method: FMGP, rows: Outputs, samples: int) -> dict[str, Any]:
    pred = method.predict(rows, covariance=True)
    mean, v = pred.latent.mean.double(), pred.latent.covariance.double()
    tau = float(method.likelihood.temperature.detach())  # type: ignore[operator, union-attr]
    reference = monte_carlo(samples)(mean, v, tau)
    assert rows.targets is not None
    found = {}
    for name, form in {**FORMS, "the reference": monte_carlo(samples)}.items():
        begin = time.perf_counter()
        log_p = form(mean, v, tau)
        seconds = time.perf_counter() - begin
        found[name] = {
            "kl": float((reference.exp() * (reference - log_p)).sum(-1).mean().clamp_min(0.0)),
            "error": float((reference.exp() - log_p.exp()).abs().max()),
            "changed": int((log_p.argmax(-1) != mean.argmax(-1)).sum()),
            "nll": -float(log_p.gather(-1, rows.targets[:, None]).mean()),
            "milliseconds": 1e3 * seconds,
        }
    return found


def diagonal(v: Tensor) -> Tensor:
    return v.diagonal(dim1=-2, dim2=-1)


if __name__ == "__main__":
    main()
