"""Optimizer specs: one file for each family, with its hyperparameters, state arrays, formula and native classes."""
