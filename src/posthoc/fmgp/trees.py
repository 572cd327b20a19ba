"""`Trees`: gradient-boosted trees as tensors. Fitting them needs scikit-learn; evaluating and loading them does not."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from posthoc.base import CHUNK
from posthoc.errors import PosthocError
from posthoc.optional import require

MAX_TREES, LEAVES, LEARNING_RATE, ROWS_PER_LEAF = 60, 15, 0.15, 20
"""Size of the boosted models."""
CHECKED_ROWS, TOLERANCE = 256, 1e-9
"""The number of rows on which the trees are compared with scikit-learn's predictions, and the tolerance relative to the
largest value. Both add the same numbers in float64."""


class Trees(nn.Module):
    """A sum of regression trees, evaluated in float64.

    A leaf is its own child, so that `depth` steps from the root end in a leaf for each row.

    Args:
        trees: The number of trees T.
        nodes: The largest number of nodes of a tree, M.
        depth: The largest number of steps from a root to a leaf.

    Example:
        >>> stump = Trees(trees=1, nodes=3, depth=1)
        >>> stump.left.copy_(torch.tensor([[1, 1, 2]])), stump.right.copy_(torch.tensor([[2, 1, 2]]))
        (tensor([[1, 1, 2]]), tensor([[2, 1, 2]]))
        >>> stump.value.copy_(torch.tensor([[0.0, -1.0, 1.0]]))
        tensor([[ 0., -1.,  1.]], dtype=torch.float64)
        >>> stump(torch.tensor([[-0.5], [0.5]]))  # the threshold is 0
        tensor([-1.,  1.], dtype=torch.float64)
    """

    feature: Tensor
    threshold: Tensor
    left: Tensor
    right: Tensor
    missing_left: Tensor
    value: Tensor
    baseline: Tensor

    def __init__(self, trees: int, nodes: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        integers = torch.zeros(trees, nodes, dtype=torch.int64)
        reals = torch.zeros(trees, nodes, dtype=torch.float64)
        for name in ("feature", "left", "right"):
            self.register_buffer(name, integers.clone())
        for name in ("threshold", "value"):
            self.register_buffer(name, reals.clone())
        self.register_buffer("missing_left", torch.zeros(trees, nodes, dtype=torch.bool))
        self.register_buffer("baseline", torch.zeros((), dtype=torch.float64))

    @classmethod
    def fit(
        cls, x: Tensor, y: Tensor, *, loss: str = "squared_error", quantile: float | None = None, trees: int = MAX_TREES
    ) -> Self:
        """Fits scikit-learn's `HistGradientBoostingRegressor` and takes over its trees.

        Args:
            x: The columns, (N, D).
            y: The values, (N,).
            loss: The loss, as scikit-learn names it. Trees of "gamma" predict the logarithm of the mean.
            quantile: The quantile to fit with loss "quantile".
            trees: The number of trees.
        """
        ensemble = require("sklearn.ensemble", "scale", "A learned scale of the residuals")
        model = ensemble.HistGradientBoostingRegressor(
            loss=loss,
            quantile=quantile,
            max_iter=trees,
            max_leaf_nodes=LEAVES,
            learning_rate=LEARNING_RATE,
            min_samples_leaf=ROWS_PER_LEAF,
            early_stopping=False,
            random_state=0,
        ).fit(x.double().cpu().numpy(), y.double().cpu().numpy())
        return cls.from_sklearn(model, x.cpu()).to(x.device)

    @classmethod
    def from_sklearn(cls, model: Any, x: Tensor) -> Self:
        """The trees of a fitted `HistGradientBoostingRegressor` with numerical columns.

        Args:
            model: The model. Of loss "gamma", the trees predict the logarithm of its predictions.
            x: Rows, (N, D), to compare the predictions on.

        Raises:
            PosthocError: The trees cannot be read, or predict something else than the model.
        """
        rows = x[:CHECKED_ROWS].double()
        try:
            expected = torch.from_numpy(model.predict(rows.numpy()))
            expected = expected.log() if model.loss == "gamma" else expected
            tables = [stage[0].nodes for stage in model._predictors]
            size, depth = max(map(len, tables)), max(int(table["depth"].max()) for table in tables)
            trees = cls(len(tables), size, depth)
            trees.baseline.fill_(float(model._baseline_prediction.item()))
            for i, table in enumerate(tables):
                trees._set(i, table)
            found = trees(rows)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise PosthocError(f"{UNREADABLE} ({error!r:.200}). {ADVICE}") from error
        if not torch.allclose(found, expected, rtol=0.0, atol=TOLERANCE * float(expected.abs().max())):
            raise PosthocError(
                f"{UNREADABLE} (predictions differ by {float((found - expected).abs().max()):.2g}). {ADVICE}"
            )
        return trees

    def _set(self, i: int, table: Any) -> None:
        """Takes over one tree, whose nodes are a structured array."""
        count = len(table)
        nodes, is_leaf = torch.arange(count), torch.from_numpy(table["is_leaf"].astype(bool))
        columns = {"feature": "feature_idx", "left": "left", "right": "right", "threshold": "num_threshold"}
        for name, field in {**columns, "missing_left": "missing_go_to_left", "value": "value"}.items():
            column = torch.from_numpy(table[field].astype("f8")).to(self.get_buffer(name).dtype)
            if name in ("left", "right"):
                column = torch.where(is_leaf, nodes, column)
            elif name in ("feature", "threshold"):
                column = torch.where(is_leaf, torch.zeros_like(column), column)
            self.get_buffer(name)[i, :count] = column

    def forward(self, x: Tensor) -> Tensor:  # (N,)
        """The predictions for some rows (N, D)."""
        return self.baseline + self.leaves(x).sum(-1)

    def leaves(self, x: Tensor) -> Tensor:
        """The value of each tree, (N, T) in float64, for some rows (N, D)."""
        return torch.cat([self._leaves(part) for part in x.double().split(CHUNK)])

    def _leaves(self, x: Tensor) -> Tensor:
        first = torch.arange(len(self.value), device=x.device) * self.value.shape[1]
        node = torch.zeros(len(x), len(self.value), dtype=torch.int64, device=x.device)
        for _ in range(self.depth):
            at = node + first
            values = x.gather(1, self.feature.take(at))
            goes_left = (values <= self.threshold.take(at)) | (values.isnan() & self.missing_left.take(at))
            node = torch.where(goes_left, self.left.take(at), self.right.take(at))
        return self.value.take(node + first)

    def shape(self) -> list[int]:
        """The arguments of the constructor."""
        return [*self.value.shape, self.depth]


UNREADABLE = "Expected boosted trees of scikit-learn that posthoc can evaluate, found others"
ADVICE = 'Use scikit-learn 1.5 to 1.9, or fit with scale="none".'
