"""How good predictions are: metrics, comparisons, plots and the report."""
