"""ONNX files, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posthoc.errors import DataError, LayerError
from posthoc.integrations.files import expecting
from posthoc.optional import require

Arrays = dict[str, np.ndarray[Any, Any]]


def onnx_files(path: Path) -> list[Path]:
    """The file of the graph, and the files beside it that large weights are stored in."""
    return sorted(file for file in path.parent.iterdir() if file.name.startswith(path.name) and file.is_file())


class OnnxGraph:
    """A function of tensors that ONNX Runtime computes.

    Args:
        path: The ONNX file. If it was exported for batches of one size, it is given batches of that size.
        layer: The name of the output that is the features; the first output is the prediction.
        device: Where the graph runs.
    """

    def __init__(self, path: Path, layer: str | None, device: torch.device) -> None:
        runtime = require("onnxruntime", "onnx", "An ONNX predictor")
        wanted = ["CUDAExecutionProvider"] if device.type == "cuda" else []
        providers = [name for name in (*wanted, "CPUExecutionProvider") if name in runtime.get_available_providers()]
        with expecting(f"an ONNX graph in {path}"):
            self.session = runtime.InferenceSession(str(path), providers=providers)
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        outputs = [output.name for output in self.session.get_outputs()]
        if layer is not None and layer not in outputs[1:]:
            known = f"The outputs are: {', '.join(outputs)}; the first is the prediction."
            raise LayerError(f"Expected another output of the graph as layer, got {layer!r}. {known}")
        self.outputs = [outputs[0], *([layer] if layer is not None else [])]
        # "tensor(float)" is NumPy's float32; ONNX's other names of numbers are NumPy's.
        names = {name: i.type.removeprefix("tensor(").removesuffix(")") for name, i in self.inputs.items()}
        self.types = {name: "float32" if kind == "float" else kind for name, kind in names.items()}
        sizes = {i.shape[0] for i in self.inputs.values() if i.shape and isinstance(i.shape[0], int)}
        self.batch_size = min(sizes, default=None)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        given = {**dict(zip(self.inputs, args, strict=False)), **kwargs}
        if len(args) > len(self.inputs) or given.keys() != self.inputs.keys():
            expected = f"Expected inputs {', '.join(self.inputs)}, got {len(args)} without a name and {list(kwargs)}"
            raise DataError(f"{expected}: the --transform of a graph of several inputs returns them by name.")
        arrays = {name: np.asarray(value.cpu(), self.types[name]) for name, value in given.items()}
        rows = len(next(iter(arrays.values())))
        size = self.batch_size or rows
        parts = [self._run({k: v[at : at + size] for k, v in arrays.items()}, size) for at in range(0, rows, size)]
        columns = [torch.from_numpy(np.concatenate(column)[:rows]) for column in zip(*parts, strict=True)]
        return dict(zip(self.outputs, columns, strict=True))

    def _run(self, arrays: Arrays, size: int) -> list[np.ndarray[Any, Any]]:
        """The outputs for at most `size` rows; where there are fewer, the last one is repeated."""
        filled = {name: array[np.minimum(np.arange(size), len(array) - 1)] for name, array in arrays.items()}
        with expecting("inputs that the graph can be run on", DataError):
            outputs: list[np.ndarray[Any, Any]] = self.session.run(self.outputs, filled)
        return outputs
