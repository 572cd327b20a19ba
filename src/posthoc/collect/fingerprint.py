"""What tells a network from others: its weights, its layers, its constants.

The weights (with the persistent buffers) are told by a digest of their values, and the layers by one of their places,
classes and, for PyTorch's own, settings. Names of classes are taken without their modules: a class may move, and is
`__main__`'s where it is first tried. What cannot be seen is what a `forward` does, nor the attributes of classes that
are not PyTorch's: they may be counters or caches. A program (scripted, traced, exported) does not say what it was made
of, and is known by its weights alone.

Buffers that are not saved with the network are caches more often than not: masks, positions, tables that come and grow
as it is used. Those of a few real numbers that its first batch left alone count as constants (the mean and spread of
its inputs, say), and are compared where both networks have them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from posthoc.collect.stillness import still, written
from posthoc.errors import FileError

__all__ = ["fingerprint", "mark", "refuse_another"]

VALUES = 65536
"""So many values of a tensor are looked at, so that a network of billions takes seconds."""

FEW = 32
"""A constant has fewer numbers; the shortest tables of rotary positions have as many."""

SETTINGS = (  # noqa: SIM905
    "activation_relu_or_gelu add_zero_attn align_corners alpha approximate batch_first beta bidirectional ceil_mode "
    "count_include_pad dilation dim divisor_override downscale_factor end_dim eps groups k kernel_size lambd lower "
    "max_norm max_val min_val mode negative_slope nonlinearity norm_first norm_type num_groups num_heads "
    "output_padding output_size padding padding_mode scale_factor size start_dim stride threshold unflattened_size "
    "upper upscale_factor value"
).split()
"""Attributes of PyTorch's layers that change what they compute in eval mode and that no weight shows. By name, since
another version of PyTorch may have others beside them."""


def fingerprint(module: nn.Module | None) -> str | None:
    """A digest of the weights and, where they can be seen, of the layers. None where there are no weights to see."""
    if module is None:
        return None
    with still(module):  # some layers merge weights in eval mode: in training they are the same network
        found = [weights_of(module), layers_of(module)]
    return ":".join(each for each in found if each is not None)


def mark(module: nn.Module | None) -> dict[str, Any] | None:
    """What a head keeps of the network it was fitted on."""
    if module is None:
        return None
    changing = written(module)
    constants = constants_of(module) if changing is not None else {}  # of a network that never ran, who knows?
    kept = {name: digest for name, digest in constants.items() if name.split()[0] not in (changing or ())}
    return {"fingerprint": fingerprint(module), "constants": kept}


def refuse_another(expected: Mapping[str, Any] | None, module: nn.Module | None) -> None:
    """Refuses a network that is not the one that was marked; where a part of either is not known, that part is not
    compared."""
    if expected is None or module is None:
        return
    found = fingerprint(module)
    assert found is not None
    kinds = ("weights or buffers", "layers (their classes or settings)")
    for kind, then, now in zip(kinds, expected["fingerprint"].split(":"), found.split(":"), strict=False):
        if then != now:
            refuse(kind, then, now)
    constants = constants_of(module)
    for name, then in expected["constants"].items():
        if (now := constants.get(name, then)) != then:
            refuse(f"values of {name.split()[0]}", then, now)


def refuse(kind: str, expected: str, found: str) -> None:
    raise FileError(
        f"Expected the network this head was fitted on (fingerprint {expected[:12]}), found another ({found[:12]}): "
        f"its {kind} differ. Load the right network, or fit again."
    )


def weights_of(module: nn.Module) -> str:
    """Names, shapes, types and values (evenly spaced ones of large tensors) of weights and persistent buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.layout != torch.strided or tensor.is_quantized:
            continue  # no plain values to read: its name, shape and type must do
        digest.update(some_bytes(tensor))
    return digest.hexdigest()


def layers_of(module: nn.Module) -> str | None:
    """Places, classes and settings of the layers, or None of a program."""
    if is_program(module):
        return None
    digest = hashlib.sha256()
    for path, part in module.named_modules():
        digest.update(f"{path} {type(part).__name__} {settings(part)}\n".encode())
    return digest.hexdigest()


def settings(part: nn.Module) -> list[tuple[str, Any]]:
    """What PyTorch's own layers were made with; other classes may change their attributes as they run."""
    if not type(part).__module__.startswith("torch.nn.modules."):
        return []
    values = ((name, getattr(part, name, None)) for name in SETTINGS)
    values = ((name, tuple(value) if isinstance(value, list | tuple) else value) for name, value in values)
    return [(name, value) for name, value in values if isinstance(value, bool | int | float | str | tuple)]


def constants_of(module: nn.Module) -> dict[str, str]:
    """Digests of the small, real-valued buffers that are not saved with the network, by name and shape."""
    found = {}
    for path, part in () if is_program(module) else module.named_modules():
        for name in part._non_persistent_buffers_set:
            tensor = part._buffers.get(name)
            if tensor is not None and tensor.numel() < FEW and tensor.is_floating_point() and is_there(tensor):
                place = f"{path}.{name}" if path else name
                found[f"{place} {tuple(tensor.shape)} {tensor.dtype}"] = hashlib.sha256(some_bytes(tensor)).hexdigest()
    return found


def is_program(module: nn.Module) -> bool:
    return any(isinstance(part, torch.jit.ScriptModule | GraphModule) for part in module.modules())


def is_there(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def some_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // VALUES)].cpu().contiguous().view(torch.uint8).numpy().tobytes()
