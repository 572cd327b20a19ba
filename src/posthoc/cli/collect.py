"""`posthoc collect`: a predictor run once over a data set, into a folder that every other command reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posthoc.cli.options import Engine

if TYPE_CHECKING:
    from posthoc.collect.outputs import Outputs

__all__ = ["collect"]

PREDICTOR, DATA, RUNNING = "Predictor", "Data", "Running"
"""How the options are grouped in the help."""

WORKERS = 8
"""The most processes that read data, unless more are asked for."""


def collect(
    predictor: Annotated[
        str,
        typer.Argument(
            metavar="PREDICTOR",
            help="torchvision:NAME, timm:NAME, hf:NAME-OR-FOLDER, package.module:factory, or a file: ONNX (.onnx), "
            "TorchScript (.pt, .ts) or torch.export (.pt2).",
        ),
    ],
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A folder of images (one sub-folder a class, or images alone), a .parquet or .npz file, or "
            "hf:NAME-OR-FOLDER:SPLIT.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write; a killed run goes on in it.")],
    layer: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PREDICTOR,
            help="The layer whose output is stored as features, by its name in the network; for ONNX and TorchScript, "
            "another output of theirs. Default: the input of the last linear layer.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PREDICTOR,
            help="Published weights (DEFAULT, IMAGENET1K_V2; a timm tag; a revision on the hub), or a file of weights: "
            ".safetensors, or a state_dict that torch.save wrote.",
        ),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PREDICTOR,
            help="package.module:function of one input, or none (images as numbers in [0, 1]). Default: the one that "
            "belongs to the weights.",
        ),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            rich_help_panel=PREDICTOR,
            help="Allow what runs code of its own: import strings, TorchScript and torch.export files.",
        ),
    ] = False,
    input_column: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=DATA,
            help="The column of the inputs; repeat it for several columns of numbers. Default: one of a usual name "
            "(image, text, inputs, x).",
        ),
    ] = None,
    target_column: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DATA,
            help="The column of the targets. Default: one of a usual name (label, target, y).",
        ),
    ] = None,
    inputs: Annotated[
        bool, typer.Option("--inputs/--no-inputs", rich_help_panel=DATA, help="Store the flattened inputs too.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(rich_help_panel=RUNNING, help="cpu, cuda, cuda:1. Default: a GPU if there is one."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, rich_help_panel=RUNNING, help="Rows that the predictor is run on at a time.")
    ] = 64,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=RUNNING,
            help=f"Processes that read the data (default: one a processor, at most {WORKERS}; none for .npz), or Ray's "
            "actors (default: one a GPU, or else one a processor).",
        ),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(rich_help_panel=RUNNING, help="This process, or a Ray cluster.")
    ] = Engine.local,
    force: Annotated[
        bool, typer.Option("--force", rich_help_panel=RUNNING, help="Start the folder over, whatever is in it.")
    ] = False,
) -> None:
    """Runs a predictor once over a data set and stores what it said: outputs, features and targets.

    The folder is all that the other commands need; it is mapped, never held in memory.
    Run the same command again after a crash, and it goes on where it was.

    \b
    posthoc collect torchvision:resnet50 imagenet/val -o val
    posthoc collect hf:textattack/bert-base-uncased-SST-2 hf:stanfordnlp/sst2:validation -o sst2
    posthoc collect model.onnx tiles.parquet --input-column tile --layer features -o tiles
    posthoc collect nets:make data.npz --weights trained.safetensors --trust-code -o outputs
    """
    from posthoc.integrations.models import Plan

    plan = Plan(
        predictor=predictor,
        data=data,
        layer=layer,
        weights=weights,
        transform=transform,
        input_columns=tuple(input_column or ()),
        target_column=target_column,
        inputs=inputs,
        device=device,
        trust_code=trust_code,
    )
    try:
        if engine is Engine.ray:
            from posthoc.integrations.ray import collect_with_ray

            found = collect_with_ray(plan, out, batch_size=batch_size, actors=workers, force=force)
        else:
            from posthoc.collect.to_folder import collect_to_folder

            opened = plan.open()
            readers = min(WORKERS, os.cpu_count() or 1) if opened.data.costly else 0
            found = collect_to_folder(
                opened.backbone,
                opened.data,
                out,
                identity=opened.identity,
                collate=opened.collate,
                inputs=inputs,
                batch_size=batch_size,
                workers=readers if workers is None else workers,
                force=force,
            )
    except KeyboardInterrupt:
        typer.echo(f"posthoc: interrupted; run the same command again to go on in {out}", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"wrote {out}: {describe(found)}")


def describe(outputs: Outputs) -> str:
    """How many rows of what."""
    parts = {name: getattr(outputs, name) for name in ("outputs", "features", "inputs", "targets")}
    widths = [
        f"{name} of {' x '.join(map(str, part.shape[1:])) or '1'}" for name, part in parts.items() if part is not None
    ]
    absent = "" if outputs.features is not None else " (no features: name a layer with --layer)"
    return f"{len(outputs):,} rows, {', '.join(widths)}{absent}"
