"""kind=masked: what the backbone predicts when its own responses are masked block-wise.

A state at ratio r is what block-wise decoding meets: whole blocks clean from the left, the next one partly clean,
everything behind it masked, with round(r * L) masks in all.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones.base import Backbone
from infer.canvas import Canvas, Completion, Request
from infer.observation import allowed, chunk_rows, observe


def blockwise_mask(length: int, ratio: float, block_length: int, generator: torch.Generator) -> Tensor:
    """(L,) bool with round(ratio * L) masks, at least one; which positions of the partly clean block are is drawn."""
    masks = max(1, round(ratio * length))
    clean = length - masks
    whole = clean // block_length * block_length
    mask_L = torch.ones(length, dtype=torch.bool)
    mask_L[:whole] = False
    partial = min(block_length, length - whole)
    mask_L[whole + torch.randperm(partial, generator=generator)[: clean - whole]] = False
    return mask_L


@torch.inference_mode()
def masked_rows(
    backbone: Backbone, items: Sequence[tuple[int, Completion]], ratio: float, block_length: int, seed: int
) -> list[dict]:
    """Rows of `schema.MASKED` for completions, (trajectory index, completion), all masked at `ratio` in one batch."""
    gen_length = len(items[0][1].tokens)
    requests = [Request(c.id, c.prompt) for _, c in items]
    canvas = Canvas.of(requests, gen_length, backbone.mask_id, backbone.eos_id, backbone.device)
    response_BL = torch.stack([c.tokens for _, c in items]).to(backbone.device)
    masks = []
    for index, _ in items:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + index) * 10_007 + round(ratio * 10_000))
        masks.append(blockwise_mask(gen_length, ratio, block_length, generator))
    mask_BL = torch.stack(masks).to(backbone.device)
    canvas.generation_BL.copy_(torch.where(mask_BL, backbone.mask_id, response_BL))

    logits_NV = backbone.logits(canvas.tokens_BT, canvas.pad_B, canvas.columns(mask_BL))
    seen = observe(logits_NV, mask_BL, frozenset({"entropy"}), backbone.forbidden_ids).check()
    chunk = chunk_rows(logits_NV)
    losses = [
        F.cross_entropy(allowed(part_MV, backbone.forbidden_ids), right_M, reduction="none")
        for part_MV, right_M in zip(logits_NV.split(chunk), response_BL[mask_BL].split(chunk), strict=True)
    ]
    loss_N = torch.cat(losses).cpu()

    # On the host from here on, by one copy each.
    mask_BL, top1_BL, entropy_BL = mask_BL.cpu(), seen.top1_BL.cpu(), seen.entropy_BL.cpu()
    right_BL = top1_BL == response_BL.cpu()
    rows = []
    for row, ((index, _), loss) in enumerate(zip(items, loss_N.split(mask_BL.sum(dim=1).tolist()), strict=True)):
        mask_L = mask_BL[row]
        rows.append(
            {
                "trajectory": index,
                "ratio": ratio,
                "position": mask_L.nonzero()[:, 0].tolist(),
                "top1": top1_BL[row][mask_L].tolist(),
                "entropy": entropy_BL[row][mask_L].tolist(),
                "loss": loss.tolist(),
                "right": right_BL[row][mask_L].tolist(),
            }
        )
    return rows
