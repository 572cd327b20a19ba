"""What ELLA and VaLLA share: options, and features that are made of the network's Jacobians."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from posthoc.base import Job, Method
from posthoc.collect.loaders import Batch, iterate
from posthoc.collect.network import Backbone, collect, evaluating, exclusive
from posthoc.config import FeatureConfig, SeedConfig, option
from posthoc.errors import OptionError
from posthoc.fmgp.inducing_points import distinct
from posthoc.likelihoods.base import Likelihood
from posthoc.methods.laplace.last_layer import require_last_layer
from posthoc.methods.ntk.ntk import Jacobian, gradients


class TangentBackbone(Backbone):
    """A network whose features are made of its Jacobians. What reads features can then read these."""

    def __init__(self, plain: Backbone, tangent_features: Callable[[Batch], Tensor]) -> None:
        super().__init__(plain.model, plain.layer if not plain.takes_input else None, plain._device)
        self.tangent_features, self.has_features = tangent_features, True

    def listen(self, heard: Callable[[Any], None]) -> None:
        """No layer has these features."""

    def features_of(self, batch: Batch, captured: Tensor | None, rows: int) -> Tensor:
        return self.tangent_features(batch)


@dataclass(frozen=True, kw_only=True)
class NTKConfig(FeatureConfig, SeedConfig):
    """Options of methods on the neural tangent kernel."""

    weights: Literal["last", "all"] = "last"
    num_inducing: int = option(100, least=1)
    prior_precision: float | None = option(None, above=0.0)
    max_gigabytes: float = option(8.0, above=0.0, saved=False)


class NTKMethod(Method):
    """A method on the tangent kernel.

    With `weights="last"` it reads the features in front of the last layer and needs no network. With "all" it needs
    one, and its features are products of the Jacobians with tangents: directions in the space of weights, which a fit
    chooses and keeps as `tangents`.
    """

    Config = NTKConfig
    config: NTKConfig
    needs_classes = True
    jacobian: Jacobian
    _fitted: Any

    def __init__(self, model: Any = None, likelihood: str | Likelihood | None = None, **options: Any) -> None:
        super().__init__(model, likelihood, **options)
        if self.config.weights == "all":
            if self.backbone is None or self.backbone.module is None:
                raise OptionError('weights="all" needs the network itself, an nn.Module; else use weights="last".')
            self.black_box, self._reads_again = False, True
            self.jacobian = Jacobian(self.backbone.module, self._likelihood.task)

    @abstractmethod
    def _tangent_features(self, tangents: Tensor, batch: Batch) -> Tensor:  # (N, D)
        """The features of a batch, from its Jacobians and tangents (K, P)."""

    def _draw_pairs(self, points: int, outputs: int) -> Tensor:  # (M,)
        """Random pairs of a point and an output, as point * outputs + output."""
        count, generator = points * outputs, torch.Generator().manual_seed(self.config.seed)
        return distinct(count, min(self.config.num_inducing, count), generator)

    def _draw_gradients(self, job: Job, features: int) -> tuple[Tensor, Tensor]:  # (M, P), (M,)
        """Gradients at random pairs of a point and an output, and the outputs of the pairs, in ascending order. Refuses
        those that would not fit into memory, with as many features of each point and output."""
        assert self.backbone is not None
        points, outputs, limit = len(job.train), job.train.outputs[0].numel(), self.config.max_gigabytes
        pairs = self._draw_pairs(points, outputs).sort().values
        needed = ((len(pairs) + outputs) * self.jacobian.row_bytes + 8 * points * outputs * features) / 1e9
        if needed > limit:
            fits = 'lower num_inducing, raise max_gigabytes, or use weights="last"'
            raise OptionError(f"Gradients of {points:,} points need {needed:.3g} GB, more than {limit:g} GB: {fits}.")
        with evaluating(self.jacobian.module), exclusive(self.jacobian.module):
            rows = gradients(self.jacobian, self.backbone.batches(iterate(job.data, 256)), pairs, outputs)
        owners = pairs % outputs
        order = owners.argsort(stable=True)
        return rows[order.to(rows.device)], owners[order]

    def _with_features(self, job: Job, tangents: Tensor) -> Job:
        """The job with the features that these tangents give."""
        read = partial(collect, self._tangent_backbone(tangents), features=True, inputs=False)
        val = self._checked(read(job.val_data)) if job.val_data is not None else None
        return replace(job, train=self._checked(read(job.data)), val=val)

    def _tangent_backbone(self, tangents: Tensor) -> TangentBackbone:
        assert self.backbone is not None
        return TangentBackbone(self.backbone, partial(self._tangent_features, tangents))

    def _predicting_backbone(self) -> Backbone:
        last = self.config.weights == "last"
        return super()._predicting_backbone() if last else self._tangent_backbone(self._fitted.tangents)

    def _reads(self) -> tuple[str, ...]:
        if self.config.weights == "all":  # their features are made after the fit has chosen tangents
            return ()
        require_last_layer(self.backbone)
        return ("features",)
