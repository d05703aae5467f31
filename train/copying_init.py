"""Weights from which a small model can look things up on its first step.

Copying takes two attention layers that only help together: one that writes into each position what stands before it,
one that finds an earlier position with the same things before it and takes what stands there. Random weights find that
late, and a model of this size trained for an hour finds it not at all. So the first layers start as such heads, in the
spirit of mimetic initialisation (Trockman and Kolter, 2023); training is free to change every one of them.

The residual stream is split into orthogonal parts: a constant that every token shares (a head that attends by
distance has nothing else to read), the tokens' identities, and a part for what the neighbours are.
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

OFFSETS = (1, 2, 3, -1, -2)  # the first layer's heads: how far before its position a head looks
FREQUENCIES = 4  # the fastest rotary frequencies tell neighbours apart
SHARPNESS = 1.5
CONSTANT = IDENTITY = 0.5**0.5  # norms of a token embedding's parts
NEIGHBOUR = 0.09  # gain of the first layer's output: what stands before a position then weighs as much as itself
COPY = 0.15  # gain of what the matching heads take over
HEAD = 0.15  # norm of the output head's rows


@torch.no_grad()
def start_from_copying(model: LlamaForCausalLM, mask_id: int, seed: int) -> None:
    """Sets embeddings, head, and the attention of the first three layers of `model`, in place.

    Raises ValueError for models that are too small for it.
    """
    config = model.config
    width, heads, layers = config.hidden_size, config.num_attention_heads, model.model.layers
    size = width // heads
    if len(layers) < 3 or heads < 4 or config.num_key_value_heads != heads or size < 16:
        raise ValueError("model.copying_init: needs 3 layers, 4 heads of 16 or wider, and as many key heads")
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, columns: int) -> Tensor:
        return torch.linalg.qr(torch.randn(columns, rows, generator=generator)).Q.mT

    basis = orthonormal(width, width)
    half = (width - 1) // 2
    constant, identity, before = basis[0], basis[1 : 1 + half], basis[1 + half :]

    table = torch.randn(config.vocab_size, half, generator=generator)
    table = table / table.norm(dim=1, keepdim=True) @ identity
    table[mask_id] = 0  # a mask is nobody: as a neighbour it says nothing, and copied it adds nothing
    model.model.embed_tokens.weight.copy_(CONSTANT * constant + IDENTITY * table)
    model.lm_head.weight.copy_(HEAD * table)

    frequencies = model.model.rotary_emb.inv_freq.cpu().float()
    fast = torch.zeros_like(frequencies)
    fast[:FREQUENCIES] = FREQUENCIES**-0.5
    attention = layers[0].self_attn
    for head, offset in enumerate(OFFSETS[:heads]):
        rows = slice(head * size, (head + 1) * size)
        angle = frequencies * offset
        query = torch.cat([fast * angle.cos(), -fast * angle.sin()])
        key = torch.cat([fast, torch.zeros_like(fast)])
        attention.q_proj.weight[rows] = SHARPNESS * torch.outer(query, constant)
        attention.k_proj.weight[rows] = SHARPNESS * torch.outer(key, constant)
        slot = before[head * size : (head + 1) * size]
        attention.v_proj.weight[rows][: len(slot)] = orthonormal(len(slot), half) @ identity
        attention.o_proj.weight[:, rows][:, : len(slot)] = NEIGHBOUR * slot.mT

    slow = torch.cat([frequencies, frequencies]) < 0.05  # what two positions share counts at any distance
    for layer in layers[1:3]:
        attention = layer.self_attn
        parts = identity.split(size)
        for head in range(min(heads, len(parts))):
            rows = slice(head * size, (head + 1) * size)
            match = torch.zeros(size, width)
            match[slow] = SHARPNESS * orthonormal(int(slow.sum()), len(before)) @ before
            attention.q_proj.weight[rows] = match
            attention.k_proj.weight[rows] = match
            attention.v_proj.weight[rows] = 0
            attention.v_proj.weight[rows][: len(parts[head])] = parts[head]
            attention.o_proj.weight[:, rows] = 0
            attention.o_proj.weight[:, rows][:, : len(parts[head])] = COPY * parts[head].mT
