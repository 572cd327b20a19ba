"""torchvision's classifiers, with the transforms that belong to their weights."""

from __future__ import annotations

from difflib import get_close_matches

from torch import nn

from posthoc.errors import OptionError
from posthoc.integrations.transforms import Each
from posthoc.integrations.weights import load_weights, only_tensors, read_weights, sized_for, weights_file
from posthoc.optional import require

__all__ = ["load_torchvision"]


def load_torchvision(name: str, weights: str | None) -> tuple[nn.Module, Each]:
    """A model by name, such as `resnet50`, with weights by name (`DEFAULT`, `IMAGENET1K_V2`) or from a file. A file's
    transforms are those of the model's default weights."""
    models = require("torchvision.models", "torchvision", "A torchvision predictor")
    if name not in models.list_models():
        near = get_close_matches(name, models.list_models(), 5)
        raise OptionError(f"Expected the name of a torchvision model, got {name!r}. {suggestion(near)}")
    published = models.get_model_weights(name)
    path = weights_file(weights)
    chosen = "DEFAULT" if weights is None or path is not None else weights.rpartition(".")[2]
    if chosen not in published.__members__:
        known = ", ".join(published.__members__) or "none"
        raise OptionError(f"Expected weights of {name} or a file of weights, got {chosen!r}. The weights are: {known}.")
    if path is not None:
        tensors = read_weights(path)
        model = sized_for(lambda **size: models.get_model(name, weights=None, **size), tensors)
        load_weights(model, tensors, path)
    else:
        with only_tensors():
            model = models.get_model(name, weights=published[chosen])
    transform = published[chosen].transforms()
    return model, Each(transform, " ".join(str(transform).split()), takes="an image")


def suggestion(names: list[str]) -> str:
    return f"Do you mean {', '.join(names)}?" if names else "See torchvision.models.list_models()."
