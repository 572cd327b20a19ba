"""The experiments of the paper, with their data sets, networks, tables and figures."""
