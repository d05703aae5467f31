"""Prompts, splits and graders. Knows no model."""
