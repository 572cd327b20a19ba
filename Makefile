# Two commands set everything up on a fresh machine: `make demo` and `make test`. Both share .venv in this folder.
PYTHON ?= python3
BIN := .venv/bin

NAME ?= list

.PHONY: demo test reproduce lint types clean

demo: .venv/.plots
	$(BIN)/posthoc demo

# One experiment of the paper: `make reproduce NAME=cifar10`.
reproduce: .venv/.reproduction
	$(BIN)/python -m reproduction $(NAME)

test: lint types .venv/.laplace-torch
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

# An install is recorded by an empty file named after its extra, and repeated when what it depends on changes.
.venv/.%: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

# laplace-torch, which the tests compare ours with, without torchvision, which it requires and does not use there.
.venv/.laplace-torch: constraints.txt .venv/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt asdfghjkl einops einconv unfoldNd opt_einsum torchmetrics tqdm
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps backpack-for-pytorch curvlinops-for-pytorch laplace-torch
	touch $@

.venv/bin/pip:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "posthoc needs Python 3.11 to 3.13, found %d.%d: use make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist posthoc-demo.png
