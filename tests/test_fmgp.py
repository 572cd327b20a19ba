"""Options of `FMGP`."""

import pytest

from posthoc import FMGP


@pytest.mark.parametrize(("task", "steps", "lr"), [("classification", 1000, 0.01), ("regression", None, 0.02)])
def test_steps_and_learning_rate_have_defaults_of_their_own(task, steps, lr):
    def resolved(**options):
        config = FMGP(None, task, **options).config
        return config.steps, config.lr

    assert resolved() == resolved(steps=None, lr=None) == (steps, lr)
    assert resolved(steps=1000) == (1000, lr)
    assert resolved(lr=0.05) == (steps, 0.05)
