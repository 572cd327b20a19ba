"""Predictive distributions: what `predict` returns."""
