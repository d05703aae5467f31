"""Frozen denoisers: token ids in, logits at the asked positions out. Knows no decoding method."""
