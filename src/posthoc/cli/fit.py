"""`posthoc fit`: a head from a file of outputs."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posthoc.cli.options import (
    Device,
    Features,
    Force,
    Inputs,
    OutputColumns,
    Targets,
    open_data,
    read_config,
    refuse,
)

if TYPE_CHECKING:
    from posthoc.base import Method
    from posthoc.collect.outputs import Outputs

__all__ = ["fit"]


DATA = (
    "Outputs on data that the network has not memorised: a .npz, .safetensors, Parquet or CSV file, or a folder; "
    "'file.npz[:5000]' for some rows."
)


class Task(StrEnum):
    """What is predicted."""

    regression = "regression"
    classification = "classification"


class Kind(StrEnum):
    """What a classifier's outputs are."""

    logits = "logits"
    log_probs = "log-probs"
    probs = "probs"


def fit(
    data: Annotated[str, typer.Argument(help=DATA)],
    task: Annotated[Task, typer.Option(help="What is predicted.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the head goes (.safetensors).")],
    val: Annotated[str | None, typer.Option(help="More outputs, to stop early by.")] = None,
    method: Annotated[
        str,
        typer.Option(help="fmgp, map (the bare predictor), temperature, vector, laplace, ella, valla or gp."),
    ] = "fmgp",
    config: Annotated[Path | None, typer.Option(help="The method's options, as TOML.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One of them: --set steps=2000.")] = None,
    outputs_are: Annotated[
        Kind | None, typer.Option(help="What a classifier's outputs are.", show_default="logits")
    ] = None,
    num_data: Annotated[int | None, typer.Option(help="How many points the data stand for, if not their own.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    device: Device = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder to go on from, should this be killed.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 200,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint, if there is one.")] = False,
    outputs: OutputColumns = None,
    targets: Targets = None,
    features: Features = None,
    inputs: Inputs = None,
    force: Force = False,
) -> None:
    """Fits error bars to a predictor's outputs and writes them as a head, a small file to predict with.

    With several processes: torchrun --nproc-per-node=2 -m posthoc fit ... Inducing points, which the head holds, may be
    rows of your data or close to them.
    """
    refuse(out, force or resume)  # a run that is resumed after its end writes the same head again
    options = read_config(config, set_ or [])
    if outputs_are is not None:
        options["outputs_are"] = outputs_are.value
    from posthoc.methods import method_named
    from posthoc.training.distributed import distributed

    if seed is not None:
        options |= method_named(method).known_options({"seed": seed})

    begin = time.perf_counter()
    with distributed(device) as ranks:
        head = build(method, task.value, options, ranks.place(device))
        rows = open_data(data, outputs, targets, features, inputs)
        held_out = open_data(val, outputs, targets, features, inputs) if val is not None else None
        head.fit(
            rows,
            val=held_out,
            num_data=num_data,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            resume=resume,
        )
        if ranks.first:
            head.save(out)
            typer.echo(f"fitted {method} on {describe(rows)} in {time.perf_counter() - begin:.1f} s, wrote {out}")


def build(name: str, task: str, options: dict[str, Any], device: str | None) -> Method:
    """A method by name, with its options."""
    from posthoc.errors import OptionError
    from posthoc.kernels.registry import kernel_from_spec
    from posthoc.likelihoods.base import make_likelihood
    from posthoc.methods import method_named

    options = dict(options)
    table = options.pop("likelihood", {})
    if not isinstance(table, dict) or "type" in table:
        raise OptionError("Expected [likelihood] to be a table of options, and the task to come from --task.")
    likelihood = make_likelihood({"type": task, **table})
    if isinstance(options.get("kernel"), dict | str):
        spec = options["kernel"]
        options["kernel"] = kernel_from_spec({"type": spec} if isinstance(spec, str) else spec)
    return method_named(name)(None, likelihood, device=device, **options)


def describe(rows: Outputs) -> str:
    """The size of some outputs, in words."""
    widths = {name: rows.space(name) for name in ("outputs", "features", "inputs")}
    sizes = (f"{block.shape[1]:,} {name}" for name, block in widths.items() if block is not None)
    return f"{len(rows):,} rows ({', '.join(sizes)})"
