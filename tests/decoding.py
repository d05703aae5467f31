"""Every rule by a short name, and how a decode of the small stand-ins runs."""

import torch

from infer.filters import DilatedSpacing, NoEosFirst
from infer.loop import Decoder
from infer.rules import Method
from infer.when.dilated import Dilated, DilatedCounts
from infer.when.entropy_bound import EntropyBound
from infer.when.factor import Factor
from infer.when.klass import Klass
from infer.when.local_leap import LocalLeap
from infer.when.lps import Lps
from infer.when.oracle import Oracle
from infer.when.stable_prefix import FixedPrefix, ScatteredMargin, StablePrefix
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from infer.where.full import Full
from infer.where.lbs import Lbs
from infer.where.suffix import Suffix

GEN_LENGTH = 40  # not a multiple of the block length
BLOCK_LENGTH = 16
METHODS = (
    "sequential", "top_3", "threshold", "full", "lbs", "lps", "eb_decode", "oracle", "factor", "local_leap",
    "eb_sampler", "klass", "klass_learned", "dus", "dus_counts", "lsp", "lsp_fixed_prefix", "lsp_scattered", "random",
    "spaced",
)  # fmt: skip


def make(lbs, lps, name: str, stop: str = "eos", **settings) -> Method:
    fixed, learned = Fixed(BLOCK_LENGTH), Lbs(lbs, l_min=2, fallback=BLOCK_LENGTH)
    pairs = {
        "sequential": (fixed, TopK()),
        "top_3": (fixed, TopK(3)),
        "threshold": (fixed, Threshold(0.3)),
        "full": (Full(), Threshold(0.3)),
        "lbs": (learned, Threshold(0.3)),
        "lps": (fixed, Lps(lps, tau=0.6)),
        "eb_decode": (learned, Lps(lps, tau=0.6)),
        "oracle": (fixed, Oracle()),
        "factor": (fixed, Factor()),
        "local_leap": (learned, LocalLeap(0.4, 2, 0.2)),
        "eb_sampler": (fixed, EntropyBound(1.0)),
        "klass": (fixed, Klass(0.3, 2.0, 2)),
        "klass_learned": (learned, Klass(0.3, 2.0, 3)),
        "dus": (fixed, Dilated()),
        "dus_counts": (learned, DilatedCounts()),
        "lsp": (Suffix(), StablePrefix()),
        "lsp_fixed_prefix": (fixed, FixedPrefix()),
        "lsp_scattered": (Suffix(), ScatteredMargin()),
        "random": (fixed, TopK(2, "random")),
        "spaced": (fixed, TopK(6), [DilatedSpacing(), NoEosFirst()]),
    }
    return Method(name, *pairs[name], stop=stop, **settings)


def decode(backbone, method, requests, **settings):
    decoder = Decoder(backbone, method, gen_length=GEN_LENGTH, **settings)
    return {c.id: c for c in decoder.run(requests)}, decoder


def same(a, b):
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.committed_at, b.committed_at) and a.nfe == b.nfe
