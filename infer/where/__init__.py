"""Block rules: where to decode next. One rule a file."""
