"""`posthoc collect`: a predictor run once over a data set, into a folder that every other command reads."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from posthoc.cli.shared import Engine, describe, interruptible
from posthoc.errors import FileError

MAX_WORKERS = 8
"""The most processes that read data, unless --workers asks for more."""

predictor_option = partial(typer.Option, rich_help_panel="Predictor")
data_option = partial(typer.Option, rich_help_panel="Data")
run_option = partial(typer.Option, rich_help_panel="Running")

PREDICTOR = "torchvision:NAME, timm:NAME, hf:NAME-OR-FOLDER, package.module:function, or a file: .onnx, .pt, .ts, .pt2."
DATA = "A folder of images (one sub-folder a class, or images alone), .parquet, .csv, .jsonl, .npz, or hf:NAME:SPLIT."
WEIGHTS = "Published weights (a name, tag or revision), or a file of a state_dict. none: the function loads its own."
TRANSFORM = "package.module:function from an input to a tensor; none: images in [0, 1]. Default: that of the weights."


def collect(
    predictor: Annotated[str, typer.Argument(metavar="PREDICTOR", help=PREDICTOR)],
    data: Annotated[str, typer.Argument(metavar="DATA", help=DATA)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    layer: Annotated[str | None, predictor_option(help="Where features are. Default: the last linear's input.")] = None,
    weights: Annotated[str | None, predictor_option(help=WEIGHTS)] = None,
    transform: Annotated[str | None, predictor_option(help=TRANSFORM)] = None,
    trust_code: Annotated[bool, predictor_option("--trust-code", help="Allow predictors that run code.")] = False,
    input_column: Annotated[list[str] | None, data_option(help="Column of the inputs; repeat it for several.")] = None,
    target_column: Annotated[str | None, data_option(help="Column of the targets. Default: label, y ...")] = None,
    inputs: Annotated[bool, data_option("--inputs/--no-inputs", help="Store the flattened inputs too.")] = False,
    device: Annotated[str | None, run_option(help="cpu, cuda, cuda:1. Default: a GPU if there is one.")] = None,
    batch_size: Annotated[int, run_option(min=1, help="Rows that the predictor is run on at a time.")] = 64,
    workers: Annotated[int | None, run_option(min=0, help="Processes that read data, or Ray's actors.")] = None,
    engine: Annotated[Engine, run_option(help="This process, or a Ray cluster.")] = "local",
    force: Annotated[bool, run_option("--force", help="Collect anew into an existing folder of outputs.")] = False,
) -> None:
    """Runs a predictor once over a data set and stores its outputs, the features and the targets.

    The folder is all that the other commands need. It is read row by row
    and may be larger than memory. After a crash the same command resumes.

    \b
    posthoc collect torchvision:resnet50 imagenet/val -o val
    posthoc collect hf:textattack/bert-base-uncased-SST-2 \\
        hf:stanfordnlp/sst2:validation -o sst2
    posthoc collect model.onnx tiles.parquet --input-column tile -o tiles
    posthoc collect nets:make data.npz --weights net.pt --trust-code -o out
    """
    from posthoc.integrations.models import Plan
    from posthoc.io import require_outside_outputs

    require_outside_outputs(out.absolute().parent)
    if out.is_file():
        raise FileError(f"Expected a folder to write, found a file: {out}.")
    columns = (tuple(input_column or ()), target_column)
    plan = Plan(predictor, data, layer, weights, transform, *columns, inputs, device, trust_code)
    options: dict[str, Any] = {"batch_size": batch_size, "force": force}
    with interruptible(f"run the same command again to go on in {out}"):
        if engine == "ray":
            from posthoc.integrations.ray import collect_with_ray

            collected = collect_with_ray(plan, out, actors=workers, **options)
        else:
            from posthoc.collect.to_folder import collect_to_folder

            model, rows = plan.open()
            if workers is None:
                workers = min(MAX_WORKERS, os.cpu_count() or 1) if rows.costly else 0
            options |= {"identity": model.identity, "collate": model.collate, "inputs": inputs, "workers": workers}
            collected = collect_to_folder(model.backbone, rows, out, **options)
    advice = "; no features: name a layer with --layer" if collected.features is None else ""
    targets = "with" if collected.targets is not None else "without"
    typer.echo(f"wrote {out}: {describe(collected)} {targets} targets{advice}")
