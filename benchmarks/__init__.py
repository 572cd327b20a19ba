"""Benchmarks, each a module: `python -m benchmarks.step_speed` from the root of the repository."""
