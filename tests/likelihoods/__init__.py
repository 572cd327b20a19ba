"""Likelihoods of other packages: each is one file, with its predictions."""
