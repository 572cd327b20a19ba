"""Likelihoods: how an observation comes from the latent outputs."""
