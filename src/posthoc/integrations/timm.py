"""timm's classifiers, with the transforms of their data configuration."""

from __future__ import annotations

from difflib import get_close_matches

from torch import nn

from posthoc.errors import OptionError
from posthoc.integrations.transforms import Each
from posthoc.integrations.weights import load_weights, only_tensors, read_weights, sized_for, weights_file
from posthoc.optional import require

__all__ = ["load_timm"]


def load_timm(name: str, weights: str | None) -> tuple[nn.Module, Each]:
    """A model by name, such as `resnet50` or `resnet50.a1_in1k`, with its default weights, those of a tag
    (`a1_in1k`), or a file's."""
    timm = require("timm", "timm", "A timm predictor")
    data = require("timm.data", "timm", "A timm predictor")
    path = weights_file(weights)
    if path is not None:
        tensors = read_weights(path)
        require_name(timm, name)
        model = sized_for(lambda **size: timm.create_model(name, pretrained=False, **size), tensors)
        load_weights(model, tensors, path)
    else:
        if weights not in (None, "DEFAULT"):
            name = f"{name.partition('.')[0]}.{weights}"
        require_name(timm, name)
        with only_tensors():
            model = timm.create_model(name, pretrained=True)
    transform = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
    return model, Each(transform, " ".join(str(transform).split()), takes="an image")


def require_name(timm: object, name: str) -> None:
    """Refuses a name that timm does not know; names with a scheme, such as `hf-hub:`, are looked up by timm."""
    known: list[str] = timm.list_models(include_tags=True) + timm.list_models()  # type: ignore[attr-defined]
    if ":" not in name and name not in known:
        near = ", ".join(get_close_matches(name, known, 5))
        raise OptionError(
            f"Expected the name of a timm model (or of its weights), got {name!r}. "
            + (f"Do you mean {near}?" if near else "See timm.list_models().")
        )
