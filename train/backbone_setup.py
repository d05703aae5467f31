"""What `train/backbone.py` needs before the first step: tokenizer, tokenised problems, model, module."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from backbones.llada_format import llada_config
from tasks.gsm_symbolic import GsmSymbolic
from train.denoiser_data import DenoisingBatches, Example, Masking, Mixture, make_batch, two_stream_batch
from train.drills import Drills, asked_for_results
from train.tokenizer_bpe import digit_ids, train_tokenizer


def make_tokenizer(cfg: DictConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of `data.tokenizer`, or a new one trained on all of gsm_symbolic's sound templates."""
    if cfg.data.tokenizer:
        return PreTrainedTokenizerFast.from_pretrained(cfg.data.tokenizer, local_files_only=True)
    problems = islice(GsmSymbolic(tasks_ok, max_number=None).problems("train"), cfg.data.tokenizer_examples)
    return train_tokenizer((text for p in problems for text in (p.prompt, p.solution)), cfg.model.vocab_size)


def tokenise(tokenizer, problems, count: int, gen_length: int, label: str) -> list[Example]:
    """Up to `count` problems as ids; those with more than 126 prompt or `gen_length - 1` solution ids are left out."""
    examples = []
    for p in tqdm(islice(problems, count), total=count, desc=label, mininterval=2):
        messages = [{"role": "user", "content": p.prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        solution = tokenizer(p.solution, add_special_tokens=False).input_ids
        if len(prompt) <= 126 and len(solution) < gen_length:
            examples.append(Example(np.array(prompt, dtype=np.int16), np.array(solution, dtype=np.int16)))
    return examples


def make_masking(cfg: DictConfig, tokenizer, **changes) -> Masking:
    digits = digit_ids(tokenizer)
    settings = {**cfg.masking, **changes}
    return Masking(mask_id=tokenizer.mask_token_id, eos_id=tokenizer.eos_token_id, digit_ids=digits, **settings)


def make_loaders(cfg: DictConfig, tokenizer, first: int) -> tuple[DataLoader, list[DataLoader]]:
    """The endless training loader from batch `first` on, and six validation loaders of fixed masks.

    Validation masks held-out problems uniformly at ratios 0.25, 0.5 and 0.75, and block-wise, and drills at 0.5; and
    it asks for the results of the problems' equations, each with everything before it given.
    """
    task = GsmSymbolic(cfg.data.templates, cfg.data.max_number)
    length = cfg.masking.gen_length
    train = tokenise(tokenizer, task.problems("train"), cfg.data.examples, length, "training problems")
    held_out = tokenise(tokenizer, task.problems("validation"), 192, length, "validation problems")
    held_out = held_out[: len(held_out) // 48 * 48]
    drills = Drills(tokenizer, tokenizer.batch_decode([e.solution.tolist() for e in train]))
    mixture = Mixture(drills, cfg.data.drills, cfg.data.sums)
    batches = DenoisingBatches(train, make_masking(cfg, tokenizer), cfg.data.batch_size, cfg.seed, first, mixture)
    rng = np.random.default_rng(0)
    exercises = [Example(*drills.draw(rng)) for _ in range(96)]
    loaders = [DataLoader(batches, batch_size=None)]
    for i, (items, ratio) in enumerate([*((held_out, r) for r in (0.25, 0.5, 0.75, None)), (exercises, 0.5)]):
        masking = make_masking(cfg, tokenizer, blockwise=float(ratio is None), full_tail=0.0, two_stream=0.0)
        rng = np.random.default_rng(i)
        fixed = [make_batch(items[j : j + 48], masking, rng, ratio) for j in range(0, len(items), 48)]
        loaders.append(DataLoader(fixed, batch_size=None))
    results = [_asking_results(e, tokenizer) for e in held_out]
    masking, rng = make_masking(cfg, tokenizer), np.random.default_rng(0)
    fixed = [two_stream_batch(results[j : j + 48], masking, rng, in_order=True) for j in range(0, len(results), 48)]
    loaders.append(DataLoader(fixed, batch_size=None))
    return loaders[0], loaders[1:]


def _asking_results(example: Example, tokenizer) -> Example:
    counted = asked_for_results(tokenizer, tokenizer.decode(example.solution.tolist()))
    return replace(example, counted=counted)


def make_config(cfg: DictConfig, tokenizer) -> dict:
    """`config.json` in LLaDA's format for the settings in `model`."""
    sizes = {k: v for k, v in cfg.model.items() if k not in ("init", "copying_init", "vocab_size")}
    return llada_config(
        vocab_size=len(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )


def last_checkpoint(out: Path) -> Path | None:
    found = out / "last.ckpt"
    return found if found.is_file() else None
