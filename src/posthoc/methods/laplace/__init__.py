"""The Laplace approximation of the last layer."""
