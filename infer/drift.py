"""How far each prediction moved since the step before: the KL divergence of successive distributions.

    KL(p_now || p_before) = sum over tokens of p_now * (ln p_now - ln p_before), in nats

Kept for a rule that sets `kl_steps`; no other pays for it. "Before" is the row's last forward that was asked for the
position: with a cache that computes the block alone, that may be several steps back. Distributions are those without
temperature, and forbidden ids have no part in them.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from backbones.packing import positions
from infer.observation import chunk_rows

NEVER = -1e30  # a logit of probability 0; finite, so that a forbidden id adds 0 * 0 and not 0 * (inf - inf)


class Drift:
    """The last distribution of every position, and its last `steps` divergences H.

    It holds B * L * V float32: 130 MB a row at L = 256 and LLaDA's vocabulary.
    `forbidden` (K,) int64: ids that are never a prediction.
    """

    def __init__(self, steps: int, forbidden: Tensor):
        self.steps, self.forbidden = steps, forbidden
        self.before_BLV: Tensor | None = None  # ln p
        self.known_BL: Tensor | None = None  # whether there is a distribution yet
        self.kl_BLH: Tensor | None = None

    def keep(self, rows: list[int]) -> None:
        """The given rows alone, in that order."""
        if self.before_BLV is not None:
            self.before_BLV = self.before_BLV[rows]
            self.known_BL, self.kl_BLH = self.known_BL[rows], self.kl_BLH[rows]

    def update(self, logits_NV: Tensor, asked_BL: Tensor) -> Tensor:
        """Takes in a step; returns the divergences (B, L, H) up to it, newest last, inf where there was none yet.

        `logits_NV` holds the asked positions row-major. Rows beyond those kept are new ones. A position that is not
        asked for keeps what it has.
        """
        self._make_room(asked_BL, logits_NV.shape[1])
        row_N, position_N = positions(asked_BL, len(logits_NV))
        chunk = chunk_rows(logits_NV)
        parts = []
        for part_MV, *where in zip(logits_NV.split(chunk), row_N.split(chunk), position_N.split(chunk), strict=True):
            now_MV = part_MV.float().index_fill(1, self.forbidden, NEVER).log_softmax(dim=1)
            kl_M = torch.linalg.vecdot(now_MV.exp(), now_MV - self.before_BLV[*where])
            parts.append(kl_M.masked_fill(~self.known_BL[*where], torch.inf))
            self.before_BLV[*where] = now_MV
        newest_BL = self.kl_BLH.new_zeros(asked_BL.shape)
        newest_BL[row_N, position_N] = torch.cat(parts)
        moved_BLH = torch.cat([self.kl_BLH[..., 1:], newest_BL[..., None]], dim=2)
        self.kl_BLH = torch.where(asked_BL[..., None], moved_BLH, self.kl_BLH)
        self.known_BL = self.known_BL | asked_BL
        return self.kl_BLH

    def _make_room(self, asked_BL: Tensor, vocab_size: int) -> None:
        rows, length = asked_BL.shape
        if self.before_BLV is None:
            self.before_BLV = torch.zeros(0, length, vocab_size, device=asked_BL.device)
            self.known_BL = torch.zeros(0, length, dtype=torch.bool, device=asked_BL.device)
            self.kl_BLH = torch.zeros(0, length, self.steps, device=asked_BL.device)
        fresh = rows - len(self.known_BL)
        if fresh > 0:
            self.before_BLV = pad(self.before_BLV, (0, 0, 0, 0, 0, fresh))
            self.known_BL = pad(self.known_BL, (0, 0, 0, fresh))
            self.kl_BLH = pad(self.kl_BLH, (0, 0, 0, 0, 0, fresh), value=torch.inf)
