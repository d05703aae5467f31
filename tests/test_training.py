"""Data of the trainings: masking, splits, shuffles, padding; the optimiser; the backbone's training from end to end."""

import csv
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from backbones.denoiser import load_llada
from train.copying_init import start_from_copying
from train.denoiser import Denoiser
from train.denoiser_data import (
    DenoisingBatches,
    Example,
    Masking,
    Mixture,
    batches_of_an_epoch,
    make_batch,
    two_stream_batch,
)
from train.drills import LARGEST, LIST_LENGTH, SUMS, Drills, asked_for_results, drill, equation
from train.hardware import resolve_precision
from train.optim import MuonAdamW, orthogonalise
from train.trace_data import EpochShuffle, pad_table, split_trajectories

ROOT = Path(__file__).resolve().parents[1]
MASK, EOS, DIGIT = 3, 2, 21


def masking(**changes):
    settings = {
        "gen_length": 64, "block_length": 16, "blockwise": 0.0, "full_tail": 0.0, "two_stream": 0.0, "eos_weight": 0.25,
        "digit_weight": 2.0, "mask_id": MASK, "eos_id": EOS, "digit_ids": (DIGIT,),
    }  # fmt: skip
    return Masking(**{**settings, **changes})


def examples(count=24, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(30, 60, rng.integers(3, 20)), np.append(rng.integers(30, 60, rng.integers(2, 40)), DIGIT))
        for _ in range(count)
    ]


@pytest.mark.parametrize("blockwise", [0.0, 1.0])
@pytest.mark.parametrize("full_tail", [0.0, 1.0])
def test_a_batch_is_what_the_objective_says(blockwise, full_tail):
    items, m = examples(), masking(blockwise=blockwise, full_tail=full_tail)
    batch = make_batch(items, m, np.random.default_rng(1))
    changed = batch.clean_BT != batch.noisy_BT
    assert (batch.noisy_BT[changed] == MASK).all() and not (batch.clean_BT == MASK).any()
    torch.testing.assert_close(batch.loss_BT.sum(dim=1), torch.full((24,), 1 / 24))  # every row weighs the same
    assert (changed | (batch.loss_BT == 0)).all(), "a visible token has a loss"
    longest = max(len(e.solution) for e in items)
    width = batch.clean_BT.shape[1]
    for i, e in enumerate(items):
        pad = int((~batch.attend_BTT[i, 0]).sum())
        start = pad + len(e.prompt)
        response = batch.clean_BT[i, start:]
        assert batch.clean_BT[i, pad:start].tolist() == e.prompt.tolist()
        assert batch.position_BT[i, pad:].tolist() == list(range(width - pad))
        assert batch.attend_BTT[i, :, pad:].all() and not batch.attend_BTT[i, :, :pad].any()
        assert response[: len(e.solution)].tolist() == e.solution.tolist()
        assert (response[len(e.solution) :] == EOS).all() and len(response) > len(e.solution)
        assert not changed[i, :start].any(), "a prompt token is masked"
        assert len(response) == (64 if full_tail else -(-(longest + 1) // 16) * 16)
        weights = batch.loss_BT[i, start:]
        counted = weights > 0
        if len(set(response[counted].tolist())) > 2:
            text = weights[counted & (response != EOS) & (response != DIGIT)][0]
            assert torch.allclose(weights[counted & (response == EOS)], 0.25 * text)
            assert torch.allclose(weights[counted & (response == DIGIT)], 2 * text)
        if blockwise:
            masks = changed[i, start:].nonzero()[:, 0]
            first = int(masks[0])
            assert changed[i, start + first + 16 :].all(), "behind the block everything is masked"
            assert not counted[first + 16 :].any(), "only the block has a loss"
    assert width == start + len(response)


def test_two_streams_ask_every_token_from_those_before_it_and_leak_nothing():
    """Gradients through a real model show which tokens a prediction depends on: those before it in the order, only."""
    torch.manual_seed(0)
    rows, m = 6, masking()
    items = examples(rows, seed=4)
    batch = two_stream_batch(items, m, np.random.default_rng(2))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2)
    ).double()
    denoiser = Denoiser(
        model, max_steps=1, lr_matrix=0, lr_other=0, weight_decay=0, warmup=1, decay=0, digit_ids=(DIGIT,), eos_id=EOS
    )
    asked = batch.loss_BT > 0
    torch.testing.assert_close(batch.loss_BT.sum(dim=1), torch.full((rows,), 1 / rows))
    response = int(asked[0].sum())
    prompt_length = asked.shape[1] - 2 * response
    first, second = slice(prompt_length, prompt_length + response), slice(prompt_length + response, None)
    assert (asked[:, second]).all() and (batch.noisy_BT[:, second] == MASK).all()
    assert torch.equal(batch.clean_BT[:, first], batch.clean_BT[:, second])
    assert torch.equal(batch.position_BT[:, first], batch.position_BT[:, second])

    seen = {}
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda _module, _inputs, out: seen.update(x=out))
    logits = denoiser(batch, asked).view(rows, response, -1)
    clean, masks = [], []
    for i in range(response):
        picked = logits[torch.arange(rows), i, batch.clean_BT[:, first][:, i]].sum()
        (grad,) = torch.autograd.grad(picked, seen["x"], retain_graph=True)
        depends = grad.abs().sum(-1) > 0
        pad = ~batch.attend_BTT[:, 0, :prompt_length]
        assert not (depends[:, :prompt_length] & pad).any()
        assert (depends[:, :prompt_length] | pad).all(), "the whole prompt is in sight"
        assert not depends[torch.arange(rows), prompt_length + i].any(), "a mask sees its own answer"
        clean.append(depends[:, first])
        masks.append(depends[:, second])
    before, beside = torch.stack(clean, dim=1), torch.stack(masks, dim=1)  # (B, i, j): what i depends on
    assert torch.equal(beside, ~before & ~before.mT), "of two tokens one comes first, or their masks see each other"
    assert torch.equal(before | beside, ~before.mT), "none sees a token that comes after it"
    for row in range(rows):  # groups in an order: as many tokens before a token as the groups before its own hold
        sizes = torch.unique(before[row].sum(1), return_counts=True)
        assert sizes[0].tolist() == [0, *sizes[1].cumsum(0)[:-1].tolist()]
    assert len({int(b.sum()) for b in beside}) > 1, "rows draw groups of different sizes"


def test_drills_are_right_and_small(tokenizer):
    """Every line is true, every label and expression is in the prompt, and the last value is the answer."""
    words, rng = ["apples", "pears", "Ann", "Bob", "days", "nuts", "eggs", "cups"], np.random.default_rng(0)
    for _ in range(300):
        prompt, solution = drill(words, rng)
        *lines, answer = re.split(r"\n|, |\. ", solution)
        items = re.split(r"\n|, |\. ", prompt)
        assert sorted(line.partition(" = ")[0] for line in lines) == sorted(items)
        for line in lines:
            left, _, value = line.partition(" = ")
            expression = left.partition(" ")[2].replace("x", "*")
            result = int(value) if value else int(expression)
            assert result == eval(expression) and 0 <= result <= LARGEST
            assert all(int(n) <= LARGEST for n in re.findall(r"\d+", expression))
        assert answer == f"#### {result}"
    drills = Drills(tokenizer)
    prompt, solution = drills.draw(np.random.default_rng(1))
    assert len(drills.words) > 20 and "####" in tokenizer.decode(solution.tolist())
    again = drills.draw(np.random.default_rng(1))
    assert prompt.tolist() == again[0].tolist() and solution.tolist() == again[1].tolist()


def test_sums_are_right_and_only_their_results_are_asked(tokenizer):
    words, rng = ["apples", "pears"], np.random.default_rng(0)
    for _ in range(500):
        left, value = equation(words, rng)
        expression = re.sub(r"[^\d+*/.x-]", "", re.sub("apples|pears", "", left)).replace("x", "*")
        assert eval(expression) == pytest.approx(int(value)) and 0 <= int(value) <= LARGEST, (left, value)
    drills = Drills(tokenizer)
    for seed in range(20):
        _, solution, counted = drills.draw_sums(np.random.default_rng(seed))
        text = tokenizer.decode(solution.tolist())
        found = re.findall(r"= ?[$£]?(\d+)", text)
        assert len(found) == SUMS or len(solution) == LIST_LENGTH
        assert "".join(found).startswith(tokenizer.decode(solution[counted].tolist()).replace(" ", ""))
        assert len(solution) == len(counted) <= LIST_LENGTH and counted.any()


def test_half_of_the_sums_are_lines_of_the_problems(tokenizer, task):
    solutions = [p.solution for p in islice(task.problems("train"), 60)]
    lines = {line for s in solutions for line in s.split("\n")}
    drills = Drills(tokenizer, solutions)
    of_problems = 0
    for seed in range(60):
        _, ids, counted = drills.draw_sums(np.random.default_rng(seed))
        first = tokenizer.decode(ids.tolist()).split("\n")[0]
        of_problems += first in lines
        if first in lines:
            result = re.findall(r"= ?[$£€]?(\d+(?:\.\d+)?)", first)[-1]
            assert tokenizer.decode(ids[counted].tolist()).replace(" ", "").startswith(result), first
    assert 15 < of_problems < 45


def test_results_of_a_solution_are_found(tokenizer):
    solution = "She has 3 * £4 = £12.\nSo 12+1.5=13.5 pears\n#### 13.5"
    ids = tokenizer(solution, add_special_tokens=False).input_ids
    counted = asked_for_results(tokenizer, solution)
    assert tokenizer.decode(np.array(ids)[counted].tolist()).replace(" ", "") == "1213.5"


def test_two_streams_in_order_see_all_that_precedes(tokenizer):
    items = examples(4)
    batch = two_stream_batch(items, masking(gen_length=200), np.random.default_rng(0), in_order=True)
    again = two_stream_batch(items, masking(gen_length=200), np.random.default_rng(7), in_order=True)
    assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True)), "nothing is drawn"
    asked = batch.loss_BT > 0
    for row in range(len(items)):
        for query in torch.nonzero(asked[row])[:, 0].tolist():
            seen = batch.attend_BTT[row, query] & ~asked[row]
            position = batch.position_BT[row]
            assert (position[seen] < position[query]).all()
            assert int(seen.sum()) == int(position[query]), "prompt and all response tokens before it"


def test_uncounted_tokens_have_no_mask_and_no_loss(tokenizer):
    drills = Drills(tokenizer)
    items = [Example(*drills.draw_sums(np.random.default_rng(i))) for i in range(4)]
    batch = two_stream_batch(items, masking(gen_length=200, mask_id=tokenizer.mask_token_id), np.random.default_rng(0))
    asked = batch.loss_BT > 0
    for i, item in enumerate(items):
        assert batch.clean_BT[i][asked[i]].tolist() == item.solution[item.counted].tolist()
        assert (batch.noisy_BT[i][asked[i]] == tokenizer.mask_token_id).all()
        start = int(batch.position_BT[i][asked[i]][0])
        where = len(item.prompt) + np.flatnonzero(item.counted)
        assert start == where[0] and batch.position_BT[i][asked[i]].tolist() == where.tolist()


def test_shares_of_a_mixture(tokenizer):
    items, words = examples(64), {"user": tokenizer.convert_tokens_to_ids("<|user|>")}  # no example has it
    for drills, sums in ((0.0, 0.0), (0.5, 0.0), (0.0, 1.0), (0.5, 0.5)):
        mixture = Mixture(Drills(tokenizer), drills, sums)
        batches = iter(DenoisingBatches(items, masking(gen_length=200), 8, seed=0, mixture=mixture))
        made = [next(batches).clean_BT for _ in range(60)]
        assert abs(np.mean([bool((b == words["user"]).any()) for b in made]) - drills - sums) < 0.2
        assert abs(np.mean([len(b) == 16 for b in made]) - sums) < 0.2
    with pytest.raises(ValueError, match="data.drills=0.7, data.sums=0.5"):
        Mixture(None, 0.7, 0.5)


def test_a_model_starts_from_copying():
    """In a sequence that repeats itself, a masked token is likelier than most from the first step on."""

    def mean_rank(model):
        ids = torch.randint(10, 500, (16, 30), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
        truth = ids[:, 45].clone()
        ids[:, 45] = MASK
        attend = torch.ones(16, 1, 60, 60, dtype=torch.bool)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=attend, use_cache=False).logits[:, 45]
        return float((logits > logits.gather(1, truth[:, None])).sum(1).float().mean())

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    assert mean_rank(model) > 200, "no better than chance among 500"
    start_from_copying(model, MASK, seed=0)
    assert mean_rank(model) < 125
    small = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=9))
    with pytest.raises(ValueError, match="copying_init.*3 layers"):
        start_from_copying(small, MASK, seed=0)


def test_weights_of_nothing_are_refused():
    with pytest.raises(ValueError, match="masking.eos_weight=0"):
        masking(eos_weight=0)


def test_mask_ratios_are_stratified():
    shares = []
    for seed in range(40):
        batch = make_batch(examples(24, seed), masking(full_tail=1.0), np.random.default_rng(seed))
        shares.append(((batch.clean_BT != batch.noisy_BT).sum(1) / 64).sort().values)
    mean = torch.stack(shares).mean(0)
    torch.testing.assert_close(mean, (torch.arange(24) + 0.5) / 24, atol=0.05, rtol=0)


def test_an_epoch_has_each_example_once_and_similar_lengths():
    items = examples(200)
    batches = batches_of_an_epoch(items, 8, np.random.default_rng(0))
    flat = [i for b in batches for i in b]
    assert len(flat) == len(set(flat)) == 200
    spread = np.mean([np.ptp([len(items[i].solution) for i in b]) for b in batches])
    assert spread < 0.4 * np.ptp([len(e.solution) for e in items])


def test_batches_resume_exactly():
    items, m = examples(50), masking(blockwise=0.5, full_tail=0.5, two_stream=0.5)
    whole = iter(DenoisingBatches(items, m, 8, seed=3))
    first = [next(whole) for _ in range(15)]
    resumed = iter(DenoisingBatches(items, m, 8, seed=3, first=9))
    for expected in first[9:]:
        assert all(torch.equal(a, b) for a, b in zip(expected, next(resumed), strict=True))


def test_orthogonalise_pushes_singular_values_to_one():
    torch.manual_seed(0)
    for shape in ((3, 24, 64), (2, 64, 24), (1, 16, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.4 and values.max() < 1.3


def test_stacking_matrices_changes_nothing():
    torch.manual_seed(0)
    grads = torch.randn(4, 8, 20)
    torch.testing.assert_close(orthogonalise(grads), torch.cat([orthogonalise(g[None]) for g in grads]))


def test_adamw_part_is_torch_adamw():
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(5))
    theirs = torch.nn.Parameter(ours.detach().clone())
    a = MuonAdamW([{"params": [ours], "kind": "adamw", "lr": 0.1, "weight_decay": 0.2}], betas=(0.9, 0.95), eps=1e-8)
    b = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        for p, optimiser in ((ours, a), (theirs, b)):
            p.grad = torch.sin(p.detach() * (step + 1))
            optimiser.step()
    torch.testing.assert_close(ours, theirs)


def test_muon_is_torch_muon_up_to_its_precision():
    """torch's runs Newton-Schulz in bfloat16, so the two agree to about that precision."""
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(12, 8))
    theirs = torch.nn.Parameter(ours.detach().clone())
    a = MuonAdamW([{"params": [ours], "kind": "muon", "lr": 0.1, "weight_decay": 0.2}])
    b = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.95)
    for _ in range(4):
        gradient = torch.randn(12, 8)
        ours.grad, theirs.grad = gradient, gradient.clone()
        a.step(), b.step()
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


def test_precision(monkeypatch):
    assert resolve_precision("16-mixed") == "16-mixed"
    for fast, expected in ((True, "bf16-mixed"), (False, "32-true")):
        monkeypatch.setattr("train.hardware.has_fast_bf16", lambda fast=fast: fast)
        assert resolve_precision("auto") == expected


def test_trajectories_are_split_whole():
    numbers = np.repeat(np.arange(100), 7)
    train, validation, test = split_trajectories(numbers, seed=0)
    assert (len(train), len(validation), len(test)) == (80, 10, 10)
    assert sorted(np.concatenate([train, validation, test])) == list(range(100))
    assert all((a == b).all() for a, b in zip(split_trajectories(numbers, 0), (train, validation, test), strict=True))
    assert [len(p) for p in split_trajectories(np.arange(3), 0)] == [1, 1, 1]
    with pytest.raises(ValueError, match="trace.limit: 2 trajectories"):
        split_trajectories(np.arange(2), 0)


def test_shuffles_depend_on_seed_and_epoch_alone():
    sampler = EpochShuffle(20, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first != second and sorted(second) == list(range(20))


def test_padding_a_table():
    table = pa.table(
        {
            "trajectory": pa.array([4, 5], pa.int32()),
            "top1": pa.array([[7, 8, 9], [1]], pa.list_(pa.int32())),
            "right": pa.array([[True, False, True], [True]], pa.list_(pa.bool_())),
        }
    )
    batch = pad_table(table)
    assert batch.scalars["trajectory"].tolist() == [4, 5]
    assert batch.lists["top1"].tolist() == [[7, 8, 9], [1, 0, 0]]
    assert batch.lists["right"].tolist() == [[True, False, True], [True, False, False]]
    assert batch.valid_BK.tolist() == [[True, True, True], [True, False, False]]
    # Slices of a chunked table must not bring their parent's values along.
    chunked = pa.concat_tables([table.slice(1), table.slice(0, 1)])
    assert pad_table(chunked).lists["top1"].tolist() == [[1, 0, 0], [7, 8, 9]]
    assert pad_table(table.slice(1)).lists["top1"].tolist() == [[1]]


def test_loaders_accept_iterable_batches():
    batches = DenoisingBatches(examples(16), masking(), 8, seed=0)
    loader = iter(DataLoader(batches, batch_size=None))
    assert next(loader).clean_BT.shape[0] == 8


SMALL = (
    "data.examples=64", "data.tokenizer_examples=80", "data.batch_size=8", "model.vocab_size=400", "model.d_model=64",
    "model.n_layers=3", "model.n_heads=4", "model.mlp_hidden_size=48", "optim.val_every=2", "precision=32-true",
)  # fmt: skip


def train_backbone(cwd, *overrides):
    command = [sys.executable, str(ROOT / "train/backbone.py"), *SMALL, *overrides]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def train_losses(folder):
    found = {}
    for log in sorted(folder.glob("logs/version_*/metrics.csv")):
        for row in csv.DictReader(log.open()):
            if row.get("train/loss"):
                found[int(row["step"])] = row["train/loss"]
    return found


def test_backbone_training_exports_a_backbone_and_resumes(tmp_path):
    """The run that was stopped and resumed ends with the very weights of the run that was not."""
    schedule = ("optim.decay=0.5", "log_every=1", "checkpoint_every=2")
    train_backbone(tmp_path, "out=whole", "optim.max_steps=4", *schedule)
    train_backbone(tmp_path, "out=halves", "optim.max_steps=4", "stop_at=2", *schedule)
    train_backbone(tmp_path, "out=halves", "optim.max_steps=4", *schedule)
    assert len(train_losses(tmp_path / "whole")) == 4
    assert train_losses(tmp_path / "whole") == train_losses(tmp_path / "halves")
    a, b = (load_llada(str(tmp_path / run / "export"), name=run, device="cpu") for run in ("whole", "halves"))
    assert a.fingerprint == b.fingerprint
    assert a.max_length == 512 and a.vocab_size == 400
