"""Trace stores survive kills and refuse what does not fit; labels are what a second look gives."""

import json
from itertools import islice

import numpy as np
import pytest
import torch

from infer.canvas import Request
from infer.loop import Decoder
from infer.observation import STATISTICS, observe
from infer.rules import Method
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from infer.where.lbs import Lbs
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH
from trace_gen.masked import blockwise_mask, masked_rows
from trace_gen.recorder import Recorder, trajectory_row
from trace_gen.store import TraceStore, differences

SPEC = {"kind": "replay", "shard_size": 2, "method": {"commit": {"tau": 0.9}}}


class Watcher:
    """Keeps what the denoiser saw, to check the recorder against."""

    def __init__(self):
        self.seen = []

    def step(self, canvas, seen, chosen_BL):
        for row, name in enumerate(canvas.ids):
            self.seen.append((name, int(canvas.step_B[row]), canvas.tokens_BT[row].clone(), int(canvas.pad_B[row])))

    def finished(self, completion):
        pass


@pytest.fixture(scope="module")
def recorded(backbone, task, lbs):
    """Completions, labelled rows and canvases of six problems, learned blocks, batches of ragged rows."""
    requests = [Request(p.id, backbone.encode(p.prompt)) for p in islice(task.problems("router"), 6)]
    recorder, watcher = Recorder(), Watcher()
    method = Method("m", Lbs(lbs, l_min=2, fallback=BLOCK_LENGTH), Threshold(0.3))
    decoder = Decoder(
        backbone, method, gen_length=GEN_LENGTH, batch_size=4, observers=[recorder, watcher], extra_needs=recorder.needs
    )
    done = {c.id: c for c in decoder.run(requests)}
    completions = [done[r.id] for r in requests]
    rows = [recorder.labelled(i, c) for i, c in enumerate(completions)]
    return completions, rows, watcher.seen


def test_rows_are_what_the_denoiser_said(recorded, backbone):
    """Runs the denoiser again on each recorded canvas, alone, and compares every number."""
    completions, rows, seen = recorded
    canvases = {(name, step): (tokens, pad) for name, step, tokens, pad in seen}
    for completion, steps in zip(completions, rows, strict=True):
        assert [r["step"] for r in steps] == list(range(completion.nfe))
        for row in steps:
            tokens, pad = canvases[completion.id, row["step"]]
            asked = torch.zeros(1, GEN_LENGTH, dtype=torch.bool)
            asked[0, row["position"]] = True
            asked_BT = torch.zeros(1, len(tokens), dtype=torch.bool)
            asked_BT[:, -GEN_LENGTH:] = asked
            logits = backbone.logits(tokens[None], torch.tensor([pad]), asked_BT)
            again = observe(logits, asked, frozenset(STATISTICS), backbone.forbidden_ids)
            assert again.top1_BL[asked].tolist() == row["top1"].tolist()
            for name in STATISTICS:
                value = getattr(again, f"{name}_BL")[asked]
                torch.testing.assert_close(value, torch.tensor(row[name]), atol=1e-4, rtol=1e-4)


def test_labels_are_their_definition(recorded):
    completions, rows, _ = recorded
    some_unstable = False
    for completion, steps in zip(completions, rows, strict=True):
        final = completion.tokens.tolist()
        for k, row in enumerate(steps):
            for j, position in enumerate(row["position"]):
                later = [
                    bool(r["top1"][list(r["position"]).index(position)] == final[position])
                    for r in steps[k:]
                    if position in r["position"]
                ]
                assert row["right"][j] == later[0] and row["stable"][j] == all(later)
                some_unstable |= bool(row["right"][j]) and not row["stable"][j]
        # What a step commits is right by definition at that step, and is no longer recorded after it.
        for position, step in enumerate(completion.committed_at.tolist()):
            mine = [r for r in steps if position in r["position"]]
            if step >= 0:
                assert mine[-1]["step"] == step
                assert mine[-1]["right"][list(mine[-1]["position"]).index(position)]
    assert some_unstable, "no prediction ever changed: the labels were not put to the test"


def test_ranks_and_sizes(recorded):
    _, rows, _ = recorded
    for steps in rows:
        for row in steps:
            assert (np.diff(row["position"]) > 0).all() and (np.diff(row["rank"]) > 0).all()
            assert row["rank"][-1] < row["block_size"]
        opened = {r["block"]: r for r in steps[::-1]}  # the first step of each block
        for row in opened.values():
            assert row["rank"].tolist() == list(range(row["block_size"]))


def write(store, number, recorded, indices):
    completions, rows, _ = recorded
    store.write_shard(
        number, [trajectory_row(i, completions[i]) for i in indices], [row for i in indices for row in rows[i]]
    )


def test_a_store_reads_back_what_was_written(tmp_path, recorded):
    completions, rows, _ = recorded
    store = TraceStore.create_or_open(tmp_path, SPEC, "1")
    for number, indices in enumerate(((0, 1), (2, 3), (4, 5))):
        write(store, number, recorded, indices)
    again = TraceStore.open(tmp_path)
    assert again.counts == [2, 2, 2] and not again.pending(6)
    stored = again.rows()
    flat = [row for steps in rows for row in steps]
    assert len(stored) == len(flat)
    assert stored[3]["top1"] == flat[3]["top1"].tolist() and stored[3]["stable"] == flat[3]["stable"].tolist()
    assert again.trajectories()[5]["tokens"] == completions[5].tokens.tolist()
    assert not list(tmp_path.glob(".*.parquet*")), "temporary files are left"


def test_killed_and_started_again_nothing_is_lost_or_doubled(tmp_path, recorded):
    store = TraceStore.create_or_open(tmp_path, SPEC, "1")
    write(store, 0, recorded, (0, 1))
    # Killed after the files of shard 1, before the manifest lists it; rows of another length to tell them apart.
    manifest = (tmp_path / "manifest.json").read_bytes()
    write(store, 1, recorded, (2,))
    (tmp_path / "manifest.json").write_bytes(manifest)

    store = TraceStore.create_or_open(tmp_path, SPEC, "2")
    assert store.pending(5) == [range(2, 4), range(4, 5)]
    assert store.trajectories()["trajectory"] == [0, 1]
    write(store, 1, recorded, (2, 3))
    write(store, 2, recorded, (4,))
    assert store.trajectories()["trajectory"] == [0, 1, 2, 3, 4]
    assert store.manifest["code_version"] == "1"
    # A larger limit makes the short last shard again and goes on.
    assert store.pending(5) == [] and store.pending(7) == [range(4, 6), range(6, 7)]
    write(store, 2, recorded, (4, 5))
    assert TraceStore.open(tmp_path).trajectories()["trajectory"] == [0, 1, 2, 3, 4, 5]


def test_a_failed_shard_leaves_nothing(tmp_path, recorded, monkeypatch):
    store = TraceStore.create_or_open(tmp_path, SPEC, "1")
    with pytest.raises(Exception, match="trajectory|convert|int"):
        store.write_shard(0, [{"trajectory": "not a number"}], [])
    assert not list(tmp_path.iterdir())


def test_a_split_without_more_problems_is_complete(tmp_path, recorded):
    store = TraceStore.create_or_open(tmp_path, SPEC, "1")
    write(store, 0, recorded, (0, 1))
    write(store, 1, recorded, (2,))
    assert store.pending(10)[0] == range(2, 4)
    store.mark_exhausted()
    assert TraceStore.open(tmp_path).pending(10) == []


def test_another_config_is_refused_with_what_differs(tmp_path, recorded):
    write(TraceStore.create_or_open(tmp_path, SPEC, "1"), 0, recorded, (0, 1))
    other = {**SPEC, "method": {"commit": {"tau": 0.5}}}
    with pytest.raises(ValueError, match="method.commit.tau: 0.9 -> 0.5"):
        TraceStore.create_or_open(tmp_path, other, "1")
    # Asked to replace them, it removes the old traces and nothing else.
    (tmp_path / "notes.txt").write_text("mine")
    store = TraceStore.create_or_open(tmp_path, other, "1", replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    write(store, 0, recorded, (2, 3))
    assert TraceStore.open(tmp_path).trajectories()["trajectory"] == [2, 3]
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}) == []
    assert differences({"a": 1}, {"b": 1}) == ["a: 1 -> None", "b: None -> 1"]


def test_bad_stores_are_refused(tmp_path, recorded):
    with pytest.raises(ValueError, match="no manifest.json"):
        TraceStore.open(tmp_path)
    store = TraceStore.create_or_open(tmp_path, SPEC, "1")
    with pytest.raises(ValueError, match="no shard yet"):
        store.rows()
    assert not list(tmp_path.iterdir()), "a store without shards touched the disk"
    write(store, 0, recorded, (0, 1))
    shard = tmp_path / "rows-00000.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="rows-00000.parquet is corrupt"):
        TraceStore.open(tmp_path).rows()
    shard.unlink()
    with pytest.raises(ValueError, match="rows-00000.parquet is corrupt or missing"):
        TraceStore.open(tmp_path).rows()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 0}))
    with pytest.raises(ValueError, match="schema version 0, this code reads 1"):
        TraceStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        TraceStore.open(tmp_path)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.5, 0.31, 0.02, 0.001])
def test_blockwise_mask(ratio):
    mask = blockwise_mask(40, ratio, 16, torch.Generator().manual_seed(0))
    assert int(mask.sum()) == max(1, round(40 * ratio))
    clean = (~mask).nonzero()[:, 0]
    first = int(mask.nonzero()[0])
    # Behind the block of the first mask everything is masked.
    assert (clean < (first // 16 + 1) * 16).all()


def test_masked_rows(recorded, backbone):
    completions, _, _ = recorded
    items = list(enumerate(completions))
    rows = masked_rows(backbone, items, 0.6, BLOCK_LENGTH, seed=0)
    again = masked_rows(backbone, items[2:3], 0.6, BLOCK_LENGTH, seed=0)
    assert again[0]["position"] == rows[2]["position"], "a row does not depend on its batch"
    for row, completion in zip(rows, completions, strict=True):
        assert len(row["position"]) == round(0.6 * GEN_LENGTH)
        target = completion.tokens[row["position"]]
        assert row["right"] == (torch.tensor(row["top1"]) == target).tolist()
        # Where the prediction is right, its loss is -log of the largest probability, so at most the entropy's bound.
        tokens = completion.tokens.clone()
        tokens[row["position"]] = backbone.mask_id
        full = torch.cat([torch.tensor(completion.prompt), tokens])[None]
        logits = backbone.logits(full, torch.tensor([0]), full == backbone.mask_id).clone()
        logits[:, backbone.forbidden_ids] = -torch.inf
        expected = -logits.log_softmax(-1)[torch.arange(len(target)), target]
        torch.testing.assert_close(torch.tensor(row["loss"]), expected, atol=1e-4, rtol=1e-4)


def test_sequential_traces_have_every_state(backbone, task):
    """A block of B masks is recorded B times, one mask fewer each time; what is committed is right at that step."""
    recorder = Recorder()
    request = Request("a", backbone.encode(next(task.problems("router")).prompt))
    decoder = Decoder(
        backbone, Method("m", Fixed(BLOCK_LENGTH), TopK(), stop="full_length"), gen_length=GEN_LENGTH,
        observers=[recorder], extra_needs=recorder.needs,
    )  # fmt: skip
    (completion,) = decoder.run([request])
    rows = recorder.labelled(0, completion)
    assert [len(r["position"]) for r in rows[:BLOCK_LENGTH]] == list(range(BLOCK_LENGTH, 0, -1))
    assert len(rows) == GEN_LENGTH
    committed = completion.committed_at.tolist()
    for row in rows:
        (position,) = (p for p in row["position"].tolist() if committed[p] == row["step"])
        at = row["position"].tolist().index(position)
        assert row["right"][at] and row["top1"][at] == completion.tokens[position]
        assert row["confidence"][at] == max(row["confidence"])
