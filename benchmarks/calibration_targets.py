"""What `benchmarks.calibration` must reach, checked on the results of a row or of fits on few rows."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.calibration_rows import CASES, MEANS, OURS, PEERS

Checks = dict[str, dict[str, Any]]
"""By name: a value, its limit, and whether it was met."""

KEEPING = ("temperature", "ensemble-temperature", "capped structured-matrix", "fmgp network")
"""What `mean="fixed"` must be as good as: methods that keep the class."""
LEAST_GAIN = 0.85
"""The share of structured scaling's gain that must be had from 100 rows on."""


def variants(methods: Any) -> dict[str, str]:
    """The kinds of the mean and their method; FMGP without a choice of it stands for all."""
    named = {mean: f"fmgp {mean}" if f"fmgp {mean}" in OURS else "fmgp" for mean in MEANS}
    return {mean: name for mean, name in named.items() if name in methods}


def check(value: float, limit: float, *, least: bool = False) -> dict[str, Any]:
    return {"value": value, "limit": limit, "met": value >= limit if least else value <= limit}


def row_checks(row: str, found: dict[str, Any]) -> dict[str, Checks]:
    """The checks of one row: those of each kind of the mean, and those of the order of the rows."""
    methods = {name: each for name, each in found["methods"].items() if "nll" in each}
    ours = variants(methods)
    checks: dict[str, Checks] = {}
    if CASES[row].judged:
        checks |= {mean: JUDGES[mean](ours[mean], methods, found["pairs"]) for mean in JUDGES if mean in ours}
        for mean, limits in CASES[row].limits.items():
            for figure, limit in limits.items() if mean in ours else ():
                value, least = methods[ours[mean]][figure], figure == "ood_auc"
                checks[mean][f"{figure} as required"] = check(value, limit, least=least)
    spreads = {
        name: check(methods[name]["nll_spread"], max(0.002, 0.005 * methods[name]["nll"]))
        for name in dict.fromkeys(ours.values())
        if "nll_spread" in methods[name]
    }
    return checks | {"order": spreads}


def fixed(name: str, methods: dict[str, Any], pairs: dict[str, Any]) -> Checks:
    """No class moved, no worse than what keeps the class, and as well calibrated as temperature scaling."""
    own = methods[name]
    checks = {"classes moved": check(own["classes_moved"], 0.0)}
    for peer in KEEPING:
        if peer in pairs[name]:
            difference, error = pairs[name][peer]
            checks[f"nll against {peer}"] = check(difference, max(0.001, error))
    if "temperature" in methods:
        limit = methods["temperature"]["ece"] + 0.003 + 2.0 * own["ece_error"]
        checks["ece"] = check(own["ece"], max(limit, 0.01))
    return checks


def calibrated(name: str, methods: dict[str, Any], pairs: dict[str, Any]) -> Checks:
    """No worse than the best of all others, and calibrated where that is."""
    others = [other for other in (*PEERS, "fmgp network") if other in pairs[name]]
    if not others:
        return {}
    best = min(others, key=lambda other: methods[other]["nll"])
    difference, error = pairs[name][best]
    checks = {f"nll against {best}": check(difference, max(0.002, error))}
    if methods[best]["ece"] <= 0.03:
        checks["ece"] = check(methods[name]["ece"], 0.035)
    return checks


JUDGES = {"fixed": fixed, "calibrated": calibrated}


def few_checks(row: str, size: int, nlls: dict[str, list[float]]) -> Checks:
    """The checks of fits on random subsets of so many rows, given the NLL of each by method."""
    bare, scaled = (statistics.mean(nlls[name]) for name in ("bare", "temperature"))
    checks: Checks = {}
    for name in [each for each in OURS if each in nlls]:
        own, mean = nlls[name], statistics.mean(nlls[name])
        if size <= 50:
            gain = bare - scaled
            limit = bare - gain / 3.0 if gain > 0.1 else min(bare, scaled) + 0.02
            checks[f"{name}: mean"] = check(mean, limit)
            checks[f"{name}: worst"] = check(max(own), bare + 0.1)
            continue
        excess = [a - b for a, b in zip(own, nlls["temperature"], strict=True)]
        checks[f"{name}: mean above temperature"] = check(statistics.mean(excess), 0.002)
        checks[f"{name}: worst above temperature"] = check(max(excess), 0.02)
        if row == "llm_emotion/mistral7b" and name == variants(nlls).get("calibrated"):
            share = (scaled - mean) / (scaled - statistics.mean(nlls["structured-matrix"]))
            checks[f"{name}: share of structured scaling's gain"] = check(share, LEAST_GAIN, least=True)
    return checks
