"""A digest that tells a network from others: of its state dict, and of the classes and settings of its layers.

Names of classes are taken without their modules: a class may move, and is in `__main__` where it is first tried. A
program (scripted, traced, exported) does not say which layers it was made of, and is known by its state dict alone.
Buffers that are not in the state dict are caches more often than not, and are left out.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from posthoc.errors import FileError

MOST_VALUES = 65536
"""The number of values of a tensor, evenly spaced, that are hashed: a network of billions takes seconds."""

ONLY_IN_TRAINING = ("p=", "inplace", "momentum=")
"""Settings in `extra_repr` that do not change what a layer computes in eval mode."""

NOT_IN_REPR = ("num_heads", "norm_first", "activation_relu_or_gelu")
"""Settings of attention and transformer layers that their `extra_repr` leaves out."""


def fingerprint(module: nn.Module | None) -> str | None:
    """A digest of the weights and, where they can be seen, of the layers; None without a module.

    Example:
        >>> fingerprint(nn.Linear(2, 1)) == fingerprint(nn.Linear(2, 1))  # of other random weights
        False
    """
    if module is None:
        return None
    parts = [hash_weights(module)]
    if not any(isinstance(part, torch.jit.ScriptModule | GraphModule) for part in module.modules()):
        layers = [f"{path} {type(part).__name__} {settings(part)}\n" for path, part in module.named_modules()]
        parts.append(hashlib.sha256("".join(layers).encode()).hexdigest())
    return ":".join(parts)


def require_same_network(expected: str | None, module: nn.Module | None) -> None:
    """Refuses a network of another fingerprint; where a part of either is not known, that part is not compared."""
    found = fingerprint(module)
    if expected is None or found is None:
        return
    kinds = ("weights or buffers", "layers (their classes or settings)")
    for kind, then, now in zip(kinds, expected.split(":"), found.split(":"), strict=False):
        if then != now:
            found = f"another ({now[:12]}): its {kind} differ. Load the right network, or fit again."
            raise FileError(f"Expected the network this head was fitted on (fingerprint {then[:12]}), found {found}")


def hash_weights(module: nn.Module) -> str:
    """The SHA-256 of the names, shapes and (for large tensors, some) values of the weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.layout == torch.strided and not tensor.is_quantized:  # the others have no plain values to read
            flat = tensor.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // MOST_VALUES)].cpu().contiguous()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def settings(part: nn.Module) -> list[str]:
    """The settings of PyTorch's own layers; those of other classes may change as they run."""
    if not type(part).__module__.startswith("torch.nn.modules."):
        return []
    shown = [each for each in part.extra_repr().split(", ") if each and not each.startswith(ONLY_IN_TRAINING)]
    return shown + [f"{name}={getattr(part, name)}" for name in NOT_IN_REPR if hasattr(part, name)]
