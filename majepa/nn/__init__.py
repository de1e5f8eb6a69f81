"""Building blocks of the networks: layers, distributions, means and the optimizer."""
