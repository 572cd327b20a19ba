"""Networks saved as programs: TorchScript and `torch.export`. Loading one runs it: only where it is trusted."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posthoc.errors import FileError, LayerError

__all__ = ["NamedOutputs", "load_exported", "load_torchscript"]


class NamedOutputs(nn.Module):
    """A compiled network that returns a tensor, or several: by name in a mapping, or by number in a tuple.

    No hook reaches inside it, so that its features are one of the things it returns: the one called `named`, which
    passes through the module `layer` for `Backbone` to take it there. The first of the others is the output.
    """

    def __init__(self, network: Callable[..., Any], named: str | None) -> None:
        super().__init__()
        self.network = network  # a module becomes a part of this one: its weights say the device and the dtype
        self.named = named
        self.layer = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.network(*args, **kwargs)
        values = by_name(answer)
        if self.named is not None:
            if self.named not in values:
                raise LayerError(
                    f"Expected the name of something that the compiled network returns, got {self.named!r}. It "
                    f"returns: {', '.join(values)}. To have features, compile it so that it returns them too."
                )
            self.layer(values[self.named])
        outputs = [value for name, value in values.items() if name != self.named]
        return values.get("logits", outputs[0] if outputs else answer)


def by_name(answer: Any) -> dict[str, Any]:
    if isinstance(answer, Mapping):
        return {str(name): value for name, value in answer.items()}
    return {str(number): value for number, value in enumerate(answer if isinstance(answer, tuple | list) else [answer])}


def load_torchscript(path: Path, layer: str | None, device: torch.device) -> NamedOutputs:
    """A program written by `torch.jit.save`."""
    try:
        program = torch.jit.load(path, map_location=device)
    except RuntimeError as error:
        raise FileError(
            f"Expected a TorchScript program, found something else in {path}. A file of weights goes with the network "
            "it is for: posthoc collect package.module:network ... --weights FILE."
        ) from error
    return NamedOutputs(program, layer)


def load_exported(path: Path, device: torch.device) -> nn.Module:
    """A program written by `torch.export.save`, with the layers it was made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, of its own code
        try:
            program = torch.export.load(path)
        except Exception as error:  # a file of something else fails in many ways
            raise FileError(
                f"Expected a program written by torch.export.save, found something else in {path}."
            ) from error
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return torch.export.unflatten(program)
