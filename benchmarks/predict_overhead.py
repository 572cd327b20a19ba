"""What error bars cost when predicting: ResNet-50 alone, and with FMGP around it.

    python -m benchmarks.predict_overhead [--quick] [--device cuda] [--batch 256] [--rounds 30] [--out results.json]

1,000 classes, 100 inducing points, features of width 2,048, images of 224 x 224 pixels that are on the device already.
The two are timed in turn in every round; the median round counts. "The head alone" predicts from outputs and features
that are known; what remains of the difference goes into watching the network.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.harness import console, finish, options, timed, verdict
from benchmarks.resnet import ResNet, resnet50
from benchmarks.simulated import Simulated
from posthoc import FMGP, Outputs

MOST = 0.05
FIT_ROWS, FIT_STEPS, INDUCING = 2000, 20, 100


@dataclass(frozen=True)
class Size:
    """Of the network and of what it is shown."""

    batch: int
    pixels: int
    classes: int
    inducing: int

    def network(self) -> ResNet:
        return resnet50(self.classes) if self.classes == 1000 else ResNet((1, 1), 8, self.classes)


class Bfloat16(nn.Module):
    """A network under autocast, in the layout that it likes best."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.network(x)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    size = Size(4, 32, 20, 10) if args.quick else Size(args.batch, 224, 1000, INDUCING)
    rounds = 2 if args.quick else args.rounds

    result: dict[str, Any] = {"batch": size.batch, "pixels": size.pixels, "classes": size.classes}
    result |= {"inducing": size.inducing, "rounds": rounds, "target": f"at most {MOST:.0%} more time", "runs": {}}
    result["tf32"] = torch.backends.cudnn.allow_tf32  # for float32 convolutions, on a GPU that has it
    for name, half in {"float32": False, "bfloat16, channels last": True}.items():
        result["runs"][name] = overhead(size, half, device, rounds)
    show(result)
    finish("predict_overhead", args, result)


@torch.no_grad()
def overhead(size: Size, half: bool, device: torch.device, rounds: int) -> dict[str, Any]:
    """Milliseconds of each, and by how much FMGP is slower."""
    torch.manual_seed(0)
    network = size.network()
    width = network.width
    model = (Bfloat16(network) if half else network).to(device).eval()
    x = torch.randn(size.batch, 3, size.pixels, size.pixels, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if half else x
    method = fitted(model, width, size, device)
    mean = check(method, model, x)
    known = Outputs(mean, features=torch.randn(size.batch, width, device=device))
    runs = {
        "network": lambda: model(x),
        "network and FMGP": lambda: method.predict(x),
        "the head alone": lambda: method.predict(known),
    }
    for run in runs.values():
        run()  # so that libraries have made their choices
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, device))
    ratios = [b / a for a, b in zip(times["network"], times["network and FMGP"], strict=True)]
    added = statistics.median(ratios) - 1.0
    return {
        "milliseconds": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "features": width,
        "added_time": added,
        "met": added <= MOST,
    }


def fitted(model: nn.Module, width: int, size: Size, device: torch.device) -> FMGP:
    """A head of the right shape; how good it is does not change what it costs."""
    data = Simulated(FIT_ROWS, size.classes, width).outputs()
    method = FMGP(
        model, "classification", num_inducing=size.inducing, steps=FIT_STEPS, device=device, progress=False
    ).fit(data)
    assert method.head is not None
    assert method.head.coordinates.spaces == ["features"]
    return method


def check(method: FMGP, model: nn.Module, x: Tensor) -> Tensor:
    """The mean is the network's own output, exactly, and the head saw the input of its last layer."""
    seen: list[Tensor] = []
    last = [part for part in model.modules() if isinstance(part, nn.Linear)][-1]
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    mean = model(x)
    handle.remove()
    pred = method.predict(x)
    assert torch.equal(pred.latent.mean, mean), "the mean is not the network's own output"
    alone = method.predict(Outputs(mean, features=seen[0]))
    torch.testing.assert_close(pred.probs, alone.probs, rtol=1e-5, atol=1e-8)
    return mean


def show(result: dict[str, Any]) -> None:
    screen = console()
    table = Table("precision", "", "ms a batch", "added", "target", title=f"Predicting batches of {result['batch']}")
    for name, r in result["runs"].items():
        for run, ms in r["milliseconds"].items():
            both = run == "network and FMGP"
            verdicts = (f"{r['added_time']:+.1%}", verdict(r["met"], result["target"])) if both else ("", "")
            table.add_row(name, run, f"{ms:.2f}", *verdicts)
        table.add_section()
    screen.print(table)


if __name__ == "__main__":
    main()
