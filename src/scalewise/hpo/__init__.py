"""Hyperparameter search: search space, Optuna study, trial outcomes and factorial screening."""
