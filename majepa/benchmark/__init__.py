"""Grids of runs at matched budgets: what to run, running it, and what came out."""
