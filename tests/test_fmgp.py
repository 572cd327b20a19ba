"""Options of `FMGP`."""

from __future__ import annotations

from typing import Any

import pytest

from posthoc import FMGP, OptionError


@pytest.mark.parametrize(("task", "steps", "lr"), [("classification", 1000, 0.01), ("regression", None, 0.02)])
def test_steps_and_learning_rate_have_defaults_of_their_own(task: str, steps: int | None, lr: float) -> None:
    def resolved(**options: Any) -> tuple[int | None, float | None]:
        config = FMGP(None, task, **options).config
        return config.steps, config.lr

    assert resolved() == resolved(steps=None, lr=None) == (steps, lr)
    assert resolved(steps=1000) == (1000, lr)
    assert resolved(lr=0.05) == (steps, 0.05)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(OptionError, match=r"Unknown option 'novelty' of fmgp. Its options are: .*ood_strength"):
        FMGP(None, "classification", novelty=1.0)
