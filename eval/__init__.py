"""Runs methods over tasks, computes metrics, draws reports. Write `from eval.metrics import ...`."""
