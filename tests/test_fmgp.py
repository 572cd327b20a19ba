"""Options of `FMGP`."""

import pytest
import torch

from posthoc import FMGP, Outputs


@pytest.mark.parametrize(("task", "steps", "lr"), [("classification", 1000, 0.01), ("regression", None, 0.02)])
def test_steps_and_learning_rate_have_defaults_of_their_own(task, steps, lr):
    def resolved(**options):
        config = FMGP(None, task, **options).config
        return config.steps, config.lr

    assert resolved() == resolved(steps=None, lr=None) == (steps, lr)
    assert resolved(steps=1000) == (1000, lr)
    assert resolved(lr=0.05) == (steps, 0.05)


def test_steps_of_a_regression_are_resolved_by_each_fit():
    data = Outputs(torch.zeros(1600, 1), torch.randn(1600, 1, generator=torch.Generator().manual_seed(0)))
    method = FMGP(None, "regression", num_inducing=2, residuals="gaussian", batch_size=10)
    assert [method.fit(data[:rows]).config.steps for rows in (10, 1600, 10)] == [200, 280, 200]
    assert len(method.history.losses) == 200
