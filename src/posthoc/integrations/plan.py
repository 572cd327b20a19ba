"""`Plan`: which predictor to run over which data, in words alone, so that other processes and machines can follow."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from posthoc.collect.network import Backbone
from posthoc.integrations.datasets import Rows, open_data
from posthoc.integrations.predictors import open_predictor
from posthoc.integrations.transforms import Collate

__all__ = ["OpenPlan", "Plan"]


@dataclass(frozen=True)
class OpenPlan:
    """What `collecting.collect_to_folder` takes."""

    backbone: Backbone
    data: Rows
    collate: Collate
    identity: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """See `open_predictor` and `open_data`; `inputs` is whether the inputs are kept as well."""

    predictor: str
    data: str
    layer: str | None = None
    weights: str | None = None
    transform: str | None = None
    input_columns: tuple[str, ...] = ()
    target_column: str | None = None
    inputs: bool = False
    device: str | None = None
    trust_code: bool = False

    def open(self) -> OpenPlan:
        """Opens the predictor and the data."""
        data = open_data(self.data, input_columns=self.input_columns, target_column=self.target_column)
        predictor = open_predictor(
            self.predictor,
            layer=self.layer,
            weights=self.weights,
            transform=self.transform,
            device=self.device,
            trust_code=self.trust_code,
        )
        identity = {**predictor.identity, "data": data.identity, "inputs": self.inputs}
        return OpenPlan(predictor.backbone, data, Collate(predictor.transform, predictor.backbone.dtype), identity)

    def located(self) -> Plan:
        """The same for a process in another folder."""
        weights = absolute(self.weights) if self.weights is not None else None
        return replace(self, predictor=absolute(self.predictor), data=absolute(self.data), weights=weights)


def absolute(name: str) -> str:
    """A name with the path in it, if there is one, made absolute."""
    scheme, _, rest = name.partition(":")
    if scheme == "hf":
        path, split_colon, split = rest.partition(":")
        return f"hf:{absolute(path)}{split_colon}{split}"
    return os.path.abspath(name) if os.path.exists(name) else name
