"""Watches infer's loop and writes labelled traces. Never decodes by itself."""
