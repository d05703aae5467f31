"""Hydra configs; `conf/<entry>.yaml` belongs to the entry script of the same name."""
