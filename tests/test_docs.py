"""The code and the commands in README and docs run, and their links lead somewhere."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typer.main import get_command

from posthoc import FMGP
from posthoc.cli import app
from posthoc.cli.shared import build_method

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
COMMANDS = re.findall(r"^ {4}(?:torchrun \S+ -m )?posthoc (.*?)(?: +#.*)?$", TEXT, flags=re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore::posthoc.PosthocWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x, y = torch.randn(200, 4), torch.randint(3, (200,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        logits, features = model(x), model[:2](x)
    names = {"model": model, "loader": DataLoader(TensorDataset(x, y), batch_size=50), "x": x, "y": y, "x_val": x}
    names |= {"logits": logits, "labels": y, "features": features, "new_logits": logits, "new_features": features}
    names |= {"calibration": (x, y), "bayes": FMGP(model, "classification", steps=5, progress=False).fit((x, y))}
    for code in blocks(page, "python"):
        exec(code, names)
        assert names["bayes"].fitted


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_commands_have_these_options(command):
    (name, *arguments), group = shlex.split(command), get_command(app)
    made = group.commands[name].make_context(name, arguments, parent=group.context_class(group))
    assert made.params


@pytest.mark.parametrize("code", [code for page in PAGES for code in blocks(page, "toml")])
def test_options_in_toml_are_known(code):
    assert not build_method("fmgp", "classification", tomllib.loads(code), "cpu").fitted


def test_pages_have_code_and_their_links_lead_somewhere():
    assert len(COMMANDS) >= 10
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)
