"""`posthoc fit`: a head from a file of outputs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from posthoc.cli import shared
from posthoc.errors import OptionError


def fit(
    data: Annotated[str, typer.Argument(help=shared.DATA)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the head goes (.safetensors).")],
    task: shared.TaskOption = None,
    val: Annotated[str | None, typer.Option(help="More outputs, for early stopping.")] = None,
    method: Annotated[str, typer.Option(help="fmgp, map, temperature, vector, laplace, ella, valla or gp.")] = "fmgp",
    config: shared.Config = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="One option: --set steps=2000.")] = None,
    outputs_are: shared.OutputsAre = None,
    num_data: Annotated[int | None, typer.Option(help="Number of points, if not that of the data.")] = None,
    seed: shared.Seed = None,
    device: shared.Device = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder to resume from, if the command is killed.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)] = 200,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the checkpoint, if there is one.")] = False,
    outputs: shared.OutputColumns = None,
    targets: shared.Targets = None,
    features: shared.Features = None,
    inputs: shared.Inputs = None,
    force: shared.Force = False,
) -> None:
    """Fits error bars to a predictor's outputs and writes them as a head, a small file to predict with.

    Inducing points, which the head contains, may be rows of your data or
    close to them.

    \b
    posthoc fit train.npz -o head.safetensors
    posthoc fit preds.csv --outputs 'p_*' --outputs-are probs \\
        --targets label -o head.safetensors
    torchrun --nproc-per-node=2 -m posthoc fit train.npz -o head.safetensors
    """
    if resume and checkpoint is None:
        raise OptionError("--resume goes on from a checkpoint: name its folder with --checkpoint.")
    # A resumed run that was finished writes the same head again.
    shared.require_output(out, force=force or resume, inputs=(data, val, config))
    options = shared.read_config(config, set_)
    from posthoc.collect import open_outputs
    from posthoc.evaluate.compare import task_of
    from posthoc.methods import method_named
    from posthoc.training.distributed import distributed

    given = {name: value for name, value in {"seed": seed, "outputs_are": outputs_are}.items() if value is not None}
    options |= method_named(method).known_options(given)
    columns = shared.read_columns(outputs=outputs, targets=targets, features=features, inputs=inputs)
    begin = time.perf_counter()
    with distributed(device) as ranks:
        rows = open_outputs(data, columns=columns)
        likelihood = task or task_of(None, rows)
        if task is None and ranks.first:
            typer.echo(f"posthoc: taken as {likelihood}, by the targets (--task says otherwise)", err=True)
        head = shared.build_method(method, likelihood, options, ranks.place(device))
        advice = "add --resume to go on" if checkpoint else "with --checkpoint FOLDER a fit can be resumed"
        with shared.interruptible(advice):
            more = open_outputs(val, columns=columns) if val is not None else None
            saving: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every, "resume": resume}
            head.fit(rows, val=more, num_data=num_data, **saving)
        if ranks.first:
            head.save(out)
            if (selection := getattr(head, "selection_", None)) is not None:
                typer.echo(str(selection))
            seconds = time.perf_counter() - begin
            typer.echo(f"fitted {method} on {shared.describe(rows)} in {seconds:.1f} s, wrote {out}")
