"""The loop: batch invariance, slots, stopping, and what it never does."""

import pytest
import torch

from backbones.base import Sizes
from infer.canvas import STOPPED, Request
from infer.loop import Decoder
from infer.rules import Method, Rule
from infer.when.oracle import Oracle
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from infer.where.full import Full
from infer.where.lbs import Lbs
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH, METHODS, decode, same

CACHED = ("sequential", "threshold", "full", "eb_decode", "lsp", "dus_counts", "klass", "klass_learned")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", ["eos", "full_length"])
def test_a_row_does_not_depend_on_its_batch(backbone, make_method, requests, name, stop):
    alone, _ = decode(backbone, make_method(name, stop), requests, batch_size=1)
    for batch_size in (5, 16):
        together, _ = decode(backbone, make_method(name, stop), requests, batch_size=batch_size)
        assert together.keys() == alone.keys()
        for name_ in alone:
            assert same(together[name_], alone[name_]), f"{name_} differs at batch {batch_size}"
    reordered, _ = decode(backbone, make_method(name, stop), requests[::-1], batch_size=5)
    assert all(same(reordered[i], alone[i]) for i in alone)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cached_row_does_not_depend_on_its_batch(backbone, make_method, requests, name, cache):
    method = {"stop": "eos", "cache": cache, "refresh_every": 3}
    alone, _ = decode(backbone, make_method(name, **method), requests, batch_size=1)
    together, _ = decode(backbone, make_method(name, **method), requests, batch_size=5)
    assert all(same(together[i], alone[i]) for i in alone)


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_refreshed_each_step_is_no_cache(backbone, make_method, requests, name, cache):
    plain, _ = decode(backbone, make_method(name), requests, batch_size=5)
    fresh, _ = decode(backbone, make_method(name, cache=cache, refresh_every=1), requests, batch_size=5)
    stale, decoder = decode(backbone, make_method(name, cache=cache), requests, batch_size=5)
    assert all(same(plain[i], fresh[i]) for i in plain)
    # Guards the line above: without refreshing the cache is stale, and fewer positions are computed.
    assert not all(same(plain[i], stale[i]) for i in plain) or name == "full"
    assert all(len(c.tokens) == GEN_LENGTH for c in stale.values())


class Logging:
    """A backbone that keeps what it was asked and what it answered."""

    def __init__(self, backbone):
        self.__dict__.update(backbone.__dict__)
        self.backbone, self.embedding, self.calls = backbone, backbone.embedding, []

    def new_cache(self, rows, length):
        return self.backbone.new_cache(rows, length)

    def sources(self, asked_BT, pad_B):
        return self.backbone.sources(asked_BT, pad_B)

    def cached_logits(self, tokens_BT, pad_B, asked_BT, compute_BT, rows_B, cache, sizes):
        assert sizes == Sizes.of(pad_B, asked_BT, compute_BT, rows_B)
        found = self.backbone.cached_logits(tokens_BT, pad_B, asked_BT, compute_BT, rows_B, cache, sizes)
        plain = self.backbone.logits(tokens_BT, pad_B, asked_BT & rows_B[:, None])
        self.calls.append((compute_BT & rows_B[:, None], rows_B, pad_B, float((found - plain).abs().max())))
        return found


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_what_a_cached_step_computes(backbone, make_method, requests, name, cache):
    """A block's first forward equals the uncached one; the others compute the block, or from its start on, alone."""
    watched = Logging(backbone)
    decode(watched, make_method(name, "full_length", cache=cache), requests[:1], batch_size=1)
    first_of_block = [i for i, call in enumerate(watched.calls) if call[0].all()]
    assert 0 in first_of_block
    assert all(watched.calls[i][3] < 1e-4 for i in first_of_block)
    partial = [call[0][0, -GEN_LENGTH:] for call in watched.calls if not call[0].all()]
    if name == "full" and cache == "prefix":
        assert all(p.all() for p in partial)
    for computed in partial:
        last = int(computed.nonzero()[-1])
        if cache == "prefix" or name in ("full", "lsp"):
            assert computed[int(computed.nonzero()[0]) :].all() and last == GEN_LENGTH - 1
        else:
            assert computed.sum() <= BLOCK_LENGTH if name in ("sequential", "threshold") else computed.any()
    if name == "lsp":
        starts = [int(p.nonzero()[0]) for p in partial]
        assert starts == sorted(starts) and starts[-1] > 0, "the cached prefix grows"
    assert max(call[3] for call in watched.calls) > 1e-3 or len(partial) == 0, (
        "a cache without staleness caches nothing"
    )


def test_cache_settings_are_named(make_method):
    with pytest.raises(ValueError, match="cache='paged'.*prefix"):
        make_method("threshold", cache="paged")
    with pytest.raises(ValueError, match="refresh_every=-1"):
        make_method("threshold", refresh_every=-1)


def test_a_backbone_without_cache_says_so(backbone, make_method):
    stub = SayingEos(backbone, others=())
    with pytest.raises(ValueError, match="cache=dual.*has no cache"):
        Decoder(stub, make_method("threshold", cache="dual"), gen_length=GEN_LENGTH)


def test_rows_finish_at_different_steps(backbone, make_method, requests):
    """Guards the test above: with all rows equally long it would not exercise refilled slots."""
    done, decoder = decode(backbone, make_method("threshold"), requests, batch_size=5)
    assert len({c.nfe for c in done.values()}) > 3
    assert max(c.nfe for c in done.values()) < decoder.clock.forwards < sum(c.nfe for c in done.values())


@pytest.mark.parametrize("name", METHODS)
def test_output_is_complete(backbone, make_method, requests, name):
    done, _ = decode(backbone, make_method(name, "full_length"), requests, batch_size=4)
    for completion in done.values():
        assert completion.tokens.shape == (GEN_LENGTH,)
        assert not torch.isin(completion.tokens, backbone.forbidden_ids).any()
        assert (completion.committed_at >= 0).all()
        assert sorted(set(completion.committed_at.tolist())) == list(range(completion.nfe)), "a step committed nothing"


def test_sequential_takes_one_forward_a_token(backbone, make_method, requests):
    done, _ = decode(backbone, make_method("sequential", "full_length"), requests, batch_size=4)
    for completion in done.values():
        assert completion.nfe == GEN_LENGTH
        # Blocks are filled left to right.
        assert completion.block.tolist() == [i // BLOCK_LENGTH for i in range(GEN_LENGTH)]


def test_learned_blocks_cost_no_forward(backbone, make_method, lbs, requests):
    """One token a step in learned blocks takes exactly L forwards: forming a block is free."""
    method = Method("m", Lbs(lbs, l_min=2, fallback=BLOCK_LENGTH), TopK(), stop="full_length")
    done, _ = decode(backbone, method, requests, batch_size=4)
    assert all(c.nfe == GEN_LENGTH for c in done.values())


def test_learned_blocks_are_not_contiguous(backbone, lbs, requests):
    """Guards the tests of learned blocks: the router of the fixture skips positions and gives blocks of many sizes."""
    rule = Lbs(lbs, l_min=2, fallback=BLOCK_LENGTH)
    done, _ = decode(backbone, Method("m", rule, Threshold(0.3), stop="full_length"), requests, batch_size=4)
    sizes = {int(n) for c in done.values() for n in torch.bincount(c.block)}
    assert len(sizes) > 4
    assert any((c.block.diff() < 0).any() for c in done.values())


class Forced(Rule):
    """Commits given positions in order and writes given tokens, through a backbone-independent observation."""

    needs = frozenset({"confidence"})

    def __init__(self, order):
        self.order = order

    def choose(self, canvas, seen, candidates_BL):
        chosen_BL = torch.zeros_like(candidates_BL)
        for row, step in enumerate(canvas.step_B.tolist()):
            chosen_BL[row, self.order[step]] = True
        return chosen_BL


class SayingEos:
    """A backbone that predicts EOS everywhere except at given columns, counted from the end."""

    def __init__(self, backbone, others):
        self.__dict__.update(backbone.__dict__)
        self.embedding = backbone.embedding
        self.others, self.asked = others, []

    def logits(self, tokens_BT, pad_B, asked_BT, sizes):
        assert sizes == Sizes.of(pad_B, asked_BT)
        self.asked.append(int(asked_BT.sum()))
        scores = torch.zeros(*tokens_BT.shape, self.vocab_size)
        scores[..., self.eos_id] = 5.0
        for position in self.others:
            column = tokens_BT.shape[1] - GEN_LENGTH + position
            scores[:, column, self.eos_id] = 0.0
            scores[:, column, 40] = 5.0
        return scores[asked_BT]


def test_eos_ends_a_row_once_everything_before_it_is_committed(backbone):
    stub = SayingEos(backbone, others=(0, 1))
    order = [2, 5, 1, 0, 3]  # EOS at 2 and 5 first; nothing ends before 0 and 1 are there too
    done, _ = decode(stub, Method("m", Full(), Forced(order)), [Request("a", (stub.eos_id, 40))])
    completion = done["a"]
    assert completion.nfe == 4
    assert completion.tokens.tolist() == [40, 40] + [stub.eos_id] * (GEN_LENGTH - 2)
    assert completion.committed_at[:6].tolist() == [3, 2, 0, STOPPED, STOPPED, 1]
    assert (completion.committed_at[6:] == STOPPED).all()


def test_eos_in_the_prompt_ends_nothing(backbone):
    stub = SayingEos(backbone, others=range(GEN_LENGTH))
    done, _ = decode(stub, Method("m", Full(), TopK()), [Request("a", (stub.eos_id, stub.eos_id))])
    assert done["a"].nfe == GEN_LENGTH


def test_only_the_block_is_asked_for(backbone, lbs):
    stub = SayingEos(backbone, others=range(GEN_LENGTH))
    decode(stub, Method("m", Fixed(BLOCK_LENGTH), TopK(), stop="full_length"), [Request("a", (40,))])
    assert stub.asked[:3] == [BLOCK_LENGTH, BLOCK_LENGTH - 1, BLOCK_LENGTH - 2]
    stub.asked.clear()
    decode(stub, Method("m", Lbs(lbs, l_min=GEN_LENGTH, fallback=4), TopK(), stop="full_length"), [Request("a", (40,))])
    # A step that opens a block asks for all masks, the three after it for the block's.
    assert stub.asked[:6] == [GEN_LENGTH, 3, 2, 1, GEN_LENGTH - 4, 3]


def test_temperature_is_seeded_and_independent_of_the_batch(backbone, make_method, requests):
    hot = {"temperature": 1.0}
    first, _ = decode(backbone, make_method("threshold"), requests, batch_size=5, seed=7, **hot)
    again, _ = decode(backbone, make_method("threshold"), requests, batch_size=1, seed=7, **hot)
    other, _ = decode(backbone, make_method("threshold"), requests, batch_size=5, seed=8, **hot)
    greedy, _ = decode(backbone, make_method("threshold"), requests, batch_size=5)
    assert all(same(first[i], again[i]) for i in first)
    assert not all(same(first[i], other[i]) for i in first)
    assert not all(same(first[i], greedy[i]) for i in first)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gen_length": 0}, "gen_length=0"),
        ({"gen_length": 512}, "gen_length=512"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
    ],
)
def test_bad_settings_are_named(backbone, settings, named):
    method = Method("m", Fixed(), TopK())
    with pytest.raises(ValueError, match=named):
        Decoder(backbone, method, **{"gen_length": GEN_LENGTH, **settings})


def test_bad_stop_rule_is_named(backbone):
    with pytest.raises(ValueError, match="stop='never'.*full_length"):
        Decoder(backbone, Method("m", Fixed(), TopK(), stop="never"), gen_length=GEN_LENGTH)


@pytest.mark.parametrize("length", [0, 512 - GEN_LENGTH + 1])
def test_a_prompt_without_room_is_refused(backbone, length):
    with pytest.raises(ValueError, match="gen_length=40 leaves room for 1 to 472"):
        decode(backbone, Method("m", Fixed(), TopK()), [Request("long", (40,) * length)])


def test_nan_logits_are_refused(backbone):
    class Broken(SayingEos):
        def logits(self, *args):
            return super().logits(*args).index_fill(1, torch.tensor([9]), torch.nan)

    with pytest.raises(ValueError, match="NaN"):
        decode(Broken(backbone, ()), Method("m", Fixed(), TopK()), [Request("a", (40,))])


def test_ids_must_be_unique(backbone):
    with pytest.raises(ValueError, match="twice"):
        decode(backbone, Method("m", Fixed(), TopK()), [Request("a", (40,)), Request("a", (41,))], batch_size=2)


def test_oracle_without_references_is_refused(backbone):
    with pytest.raises(ValueError, match="oracle"):
        decode(backbone, Method("m", Fixed(), Oracle()), [Request("a", (40,))])
