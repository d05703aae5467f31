"""Figures of a comparison, against numbers worked out by hand or published."""

import json

import pytest

from eval.metrics import Sample, Timing, agreement, result_row, text_agreement, wilson
from eval.plain_loop import PlainLoop
from eval.report import draw_accuracy, draw_commit_steps, print_table, write_results
from eval.runner import Comparison, Setting, choose_problems
from infer.canvas import Request, text_length
from infer.compose import expand
from infer.loop import Decoder
from infer.rules import Method
from infer.when.oracle import Oracle
from infer.when.threshold import Threshold
from infer.when.top_k import TopK
from infer.where.fixed import Fixed
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH


def sample(name, correct, nfe, tokens, output, latency=10.0):
    return Sample("m", name, "?", "text", correct, nfe, tokens, latency, [0] * len(output), "1", output)


def test_wilson():
    # Newcombe (1998), table I: 81 of 263 and 15 of 148.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    for successes, n in ((0, 5), (5, 5), (0, 256), (256, 256), (1, 3), (0, 0)):
        low, high = wilson(successes, n)
        p = successes / n if n else 0.5
        assert 0 <= low <= p <= high <= 1


@pytest.mark.parametrize(
    ("output", "length"), [([5, 6, 2, 2], 2), ([2, 5], 0), ([5, 6], 2), ([], 0), ([5, 2, 6, 2], 1)]
)
def test_generated_tokens_are_those_before_eos(output, length):
    assert text_length(output, eos_id=2) == length


def test_entries_expand_to_a_sweep():
    assert expand(["threshold", "lbs:commit.tau=0.5|0.9,commit.k=1|2"]) == [
        "threshold", "lbs:commit.tau=0.5,commit.k=1", "lbs:commit.tau=0.5,commit.k=2",
        "lbs:commit.tau=0.9,commit.k=1", "lbs:commit.tau=0.9,commit.k=2",
    ]  # fmt: skip
    assert expand(["dus:filters=[dilated_spacing,no_eos_first],block=full"]) == [
        "dus:filters=[dilated_spacing,no_eos_first],block=full"
    ]
    for entries in ([], ["a", "a"], ["a:k=1|1"]):
        with pytest.raises(ValueError, match="each once"):
            expand(entries)


@pytest.mark.parametrize(("tau", "commit"), [(None, TopK()), (0.3, Threshold(0.3))])
@pytest.mark.parametrize("stop", ["eos", "full_length"])
def test_the_plain_loop_commits_what_ours_does(backbone, tau, commit, stop):
    requests = [Request(str(i), tuple(range(20, 20 + n))) for i, n in enumerate((3, 30, 11))]
    method = Method("m", Fixed(BLOCK_LENGTH), commit, stop=stop)
    ours = {c.id: c for c in Decoder(backbone, method, gen_length=GEN_LENGTH, batch_size=3).run(requests)}
    plain = PlainLoop(backbone, gen_length=GEN_LENGTH, block_length=BLOCK_LENGTH, stop=stop, tau=tau)
    for theirs in plain.run(requests):
        mine = ours[theirs.id]
        assert theirs.tokens.tolist() == mine.tokens.tolist() and theirs.nfe == mine.nfe
        assert theirs.committed_at.tolist() == mine.committed_at.tolist()
        assert theirs.block.tolist() == mine.block.tolist()


def test_row():
    samples = [sample("a", True, 4, 8, [1, 2, 3]), sample("b", False, 6, 2, [1, 2, 9], latency=30.0)]
    reference = {"a": [1, 2, 3], "b": [1, 2, 3]}
    first = {"nfe": 10.0, "tokens_per_second": 2.5}
    row = result_row(
        "m", samples, Timing(wall=2.0, backbone=1.0, observe=0.5, router=0.25), 16, first, reference, 2.0, eos_id=3
    )
    assert row["n"] == 2 and row["accuracy"] == 0.5 and row["nfe"] == 5 and row["batch_size"] == 16
    assert row["tokens_per_forward"] == 1.0 and row["tokens_per_second"] == 5.0 and row["latency_ms"] == 20.0
    assert row["speedup_nfe"] == 2.0 and row["speedup_tps"] == 2.0 and row["router_share"] == 0.25
    assert row["agreement"] == pytest.approx(5 / 6) == agreement(samples, reference)
    assert row["share_of_oracle"] == 0.5 and row["observe_share"] == 0.5
    # The last position is EOS in the reference; before it all agree.
    assert row["text_agreement"] == 1.0 == text_agreement(samples, reference, 3)
    assert text_agreement(samples, reference, 7) == pytest.approx(5 / 6)
    assert result_row("m", samples, Timing(1, 1, 0, 0), 1, None, reference, None, 3)["share_of_oracle"] is None


def test_a_method_that_says_nothing_has_a_row():
    """EOS at position 0 for every prompt: no token, so no speed to compare with."""
    row = result_row("m", [sample("a", False, 1, 0, [3])], Timing(1, 1, 0, 0), 1, None, {"a": [3]}, 0.0, 3)
    assert row["tokens_per_second"] == 0 and row["speedup_tps"] is None and row["share_of_oracle"] is None
    assert row["text_agreement"] == 1.0
    print_table([row])


@pytest.fixture(scope="module")
def compared(backbone, task):
    """The reference is one of the methods here, and run on its own in the second comparison."""
    fixed = Fixed(BLOCK_LENGTH)
    sequential = Method("sequential", fixed, TopK())
    chosen = choose_problems(task, "validation", backbone, GEN_LENGTH, 5)
    methods = {
        "threshold": Method("t", fixed, Threshold(0.3)),
        "oracle": Method("o", fixed, Oracle()),
        "sequential": sequential,
    }
    inside = Comparison(backbone, task, methods, "sequential", Setting(GEN_LENGTH, 2))
    inside.run(chosen)
    outside = Comparison(
        backbone, task, {k: methods[k] for k in ("threshold", "oracle")}, sequential, Setting(GEN_LENGTH, 2)
    )
    outside.run(chosen)
    return inside, outside


def test_the_reference_is_the_same_from_inside_and_outside(compared):
    inside, outside = compared
    assert inside.reference == outside.reference and len(inside.reference) == 5
    assert [r["method"] for r in inside.rows()] == ["threshold", "oracle", "sequential"]
    for a, b in zip(inside.rows(), outside.rows(), strict=False):
        assert (a["nfe"], a["agreement"], a["tokens_per_forward"]) == (
            b["nfe"],
            b["agreement"],
            b["tokens_per_forward"],
        )


def test_everybody_begins_a_round_and_an_oracle_waits_for_its_reference(compared):
    inside, outside = compared
    orders = [inside._order(turn) for turn in range(3)]
    assert orders[0] == ["threshold", "sequential", "oracle"]
    assert all(order.index("oracle") > order.index("sequential") for order in orders)
    assert {order[0] for order in orders} == {"threshold", "sequential"}
    assert [outside._order(turn)[0] for turn in range(2)] == ["threshold", "oracle"]


def test_rows_of_a_comparison(compared):
    threshold, oracle, sequential = compared[0].rows()
    assert threshold["speedup_nfe"] == 1.0 and sequential["agreement"] == 1.0
    assert oracle["nfe"] <= threshold["nfe"] < sequential["nfe"]
    assert oracle["share_of_oracle"] == 1.0 and oracle["agreement"] >= threshold["agreement"]
    # The warm-up is in no figure: every method's samples are the five problems, once.
    for samples in compared[0].samples.values():
        assert len({s.id for s in samples}) == len(samples) == 5
    assert all(s.nfe == sum(1 for c in s.committed_at if c >= 0) for s in compared[0].samples["sequential"])


def test_files_and_pictures(tmp_path, compared, capsys):
    rows, samples = compared[0].rows(), compared[0].samples
    write_results(tmp_path, rows, samples["oracle"])
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 5
    draw_accuracy(tmp_path / "a.png", rows)
    chosen = [s[0] for s in samples.values()]
    draw_commit_steps(tmp_path / "b.png", chosen, {s.method: ["$x\n"] * GEN_LENGTH for s in chosen})
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("a.png", "b.png"))
    print_table(rows)
    printed = capsys.readouterr().out
    assert "before EOS" in printed and "5 problems, batch size 2" in printed


def test_no_problem_left_is_an_error(backbone, task):
    class Empty:
        name = "empty"

        def problems(self, split):
            return iter(())

    with pytest.raises(ValueError, match="task=empty: no problem left in split 'test'"):
        choose_problems(Empty(), "test", backbone, GEN_LENGTH, 5)


def test_sampling_repeats_with_its_seed_and_only_then(backbone, task):
    """At a temperature, the same seed gives the same completions whatever the batch size, another seed others."""
    chosen = choose_problems(task, "validation", backbone, GEN_LENGTH, 4)
    methods = {
        "sequential": Method("s", Fixed(BLOCK_LENGTH), TopK()),
        "oracle": Method("o", Fixed(BLOCK_LENGTH), Oracle()),
    }

    def outputs(batch_size: int, seed: int):
        comparison = Comparison(backbone, task, methods, "sequential", Setting(GEN_LENGTH, batch_size, 0.7, seed))
        comparison.run(chosen)
        return {name: {s.id: s.output for s in samples} for name, samples in comparison.samples.items()}

    first = outputs(2, 0)
    assert outputs(4, 0) == first
    assert outputs(2, 1)["sequential"] != first["sequential"]
