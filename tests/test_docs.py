"""The README's code runs, and its files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_readme_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x, y = torch.randn(200, 4), torch.randint(3, (200,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        logits, features = model(x), model[:2](x)
    names = {"model": model, "loader": DataLoader(TensorDataset(x, y), batch_size=50), "x": x, "logits": logits}
    names |= {"labels": y, "features": features, "new_logits": logits[:5], "new_features": features[:5]}
    exec(code, names)
    if "bayes" in names:
        assert names["bayes"].fitted


def test_readme_has_code_and_its_links_lead_somewhere():
    assert len(BLOCKS) >= 3
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert link.startswith("http") or (ROOT / link).exists(), link
