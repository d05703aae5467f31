"""Commit rules: when a masked position of the active block is committed. One rule a file."""
