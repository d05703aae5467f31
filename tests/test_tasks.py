"""Splits, determinism and grading."""

from itertools import islice

import pytest

from backbones.denoiser import load_llada
from tasks.gsm_symbolic import MAX_NUMBER, NUMBER, SMALL_TEMPLATES, GsmSymbolic, final_number


def test_splits_share_no_prompt(task):
    prompts = {
        split: {p.prompt for p in islice(task.problems(split), 9000)} for split in ("test", "validation", "router")
    }
    prompts["train"] = {p.prompt for p in islice(task.problems("train"), 3000)}
    splits = list(prompts)
    for i, a in enumerate(splits):
        for b in splits[i + 1 :]:
            assert not prompts[a] & prompts[b], f"{a} and {b}"
    assert len(prompts["test"]) == 2048 and len(prompts["validation"]) == 1024


def test_problems_are_the_same_every_time(task):
    first = list(islice(task.problems("test"), 50))
    assert first == list(islice(GsmSymbolic().problems("test"), 50))
    assert len({p.id for p in first}) == 50
    assert {int(p.template) for p in first} == set(SMALL_TEMPLATES)


def test_references_are_right_and_other_answers_wrong(task):
    for problem in islice(task.problems("test"), 200):
        assert task.grade(problem, problem.solution)
        assert not task.grade(problem, problem.solution + "1")
        assert not task.grade(problem, "")


@pytest.mark.parametrize(
    ("text", "number"),
    [("#### 5", 5), ("a\n#### -3.50", -3.5), ("#### 1,234", 1234), ("#### 4\n#### 5", 5), ("####", None), ("5", None)],
)
def test_final_number(text, number):
    assert final_number(text) == number


def test_every_default_template_reaches_every_split_and_fits_the_trained_lengths(task):
    """A template that an earlier split exhausts, or whose prompts training leaves out, would be measured untrained."""
    tokenizer = load_llada("backbones/llada_tiny", name="llada_tiny").tokenizer
    for split, count in (("test", 640), ("validation", 640), ("router", 640), ("train", 1280)):
        found = list(islice(task.problems(split), count))
        assert {int(p.template) for p in found} == set(SMALL_TEMPLATES), split
        for p in found:
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": p.prompt}], add_generation_prompt=True)
            assert len(prompt.input_ids) <= 126 and len(tokenizer(p.solution).input_ids) <= 127, p


def test_numbers_stay_within_the_limit(task):
    def largest(t):
        return max(
            float(n.replace(",", ""))
            for p in islice(t.problems("test"), 300)
            for n in NUMBER.findall(p.prompt + " " + p.solution)
        )

    assert largest(task) <= MAX_NUMBER
    assert MAX_NUMBER < largest(GsmSymbolic(max_number=200)) <= 200
    assert largest(GsmSymbolic(max_number=None)) > 200
    with pytest.raises(ValueError, match="max_number=0"):
        GsmSymbolic(max_number=0)


def test_templates_without_new_prompts_end():
    """Template 53 has few distinct prompts; the split ends instead of searching for ever."""
    few = list(GsmSymbolic([53], max_number=None).problems("test"))
    assert 0 < len(few) < 2048 and len({p.prompt for p in few}) == len(few)
    assert not {p.prompt for p in few} & {p.prompt for p in GsmSymbolic([53], max_number=None).problems("validation")}


def test_bad_input_is_named(task):
    with pytest.raises(ValueError, match="split='dev'.*validation"):
        next(task.problems("dev"))
    with pytest.raises(ValueError, match="unknown: \\[100\\]"):
        GsmSymbolic([1, 100])
    with pytest.raises(ValueError, match="at least one template"):
        GsmSymbolic([])
