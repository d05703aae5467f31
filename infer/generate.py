"""Completes prompts with a frozen backbone and a decoding method.

python infer/generate.py 'prompt="A kid has 13 books, and ..."' method=eb_decode watch=true
echo "Ben's sister has ..." | python infer/generate.py prompt=-
python infer/generate.py prompts=prompts.jsonl out=completions.jsonl method=threshold method.commit.tau=0.8
"""

import json
import sys
import time
from pathlib import Path

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from tqdm import tqdm

from backbones.checkpoint import write_atomically
from infer.canvas import Request, text_length
from infer.compose import make_method
from infer.loop import Decoder
from infer.prompting import read_prompts
from infer.watch import Watch


def record(backbone, completion) -> dict:
    """One line of `out`: id, text, and figures. Generated tokens are those before EOS."""
    tokens = text_length(completion.tokens.tolist(), backbone.eos_id)
    return {
        "id": completion.id,
        "completion": backbone.decode(completion.tokens),
        "nfe": completion.nfe,
        "tokens": tokens,
        "tokens_per_forward": tokens / completion.nfe,
        "latency_ms": 1000 * completion.latency_s,
    }


@hydra.main(config_path="../conf", config_name="generate", version_base="1.3")
def main(cfg: DictConfig) -> None:
    if (cfg.prompt is None) == (cfg.prompts is None):
        raise ValueError('give either prompt="text" or prompts=file.jsonl')
    if cfg.prompts and not cfg.out:
        raise ValueError("prompts=file.jsonl needs out=file.jsonl for the completions")
    if cfg.prompts:
        texts = read_prompts(Path(cfg.prompts))
        Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    else:
        texts = [("prompt", sys.stdin.read().strip() if cfg.prompt == "-" else str(cfg.prompt))]
        if not texts[0][1]:
            raise ValueError("prompt is empty; give a text, or - and the text on the standard input")
    method, backbone = make_method(cfg.method), instantiate(cfg.backbone)
    requests = [Request(name, backbone.encode(text)) for name, text in texts]
    console = Console()
    settings = {k: cfg.decode[k] for k in ("gen_length", "batch_size", "temperature", "seed")}
    if cfg.watch:
        with Watch(backbone.tokenizer, console, cfg.watch_delay) as watch:
            decoder = Decoder(backbone, method, observers=[watch], **{**settings, "batch_size": 1})
            records = [record(backbone, c) for c in decoder.run(requests)]
    else:
        decoder = Decoder(backbone, method, **settings)
        begin = time.perf_counter()
        bar = tqdm(decoder.run(requests), total=len(requests), disable=len(requests) == 1, unit="completion")
        records = [record(backbone, c) for c in bar]
        seconds = time.perf_counter() - begin
    tokens, nfe = sum(r["tokens"] for r in records), sum(r["nfe"] for r in records)
    if cfg.out:
        order = {request.id: i for i, request in enumerate(requests)}
        lines = "".join(json.dumps(r) + "\n" for r in sorted(records, key=lambda r: order[r["id"]]))
        write_atomically(Path(cfg.out), lambda path: path.write_text(lines))
        console.print(f"{len(records)} completions in {cfg.out}")
    else:
        console.print(records[0]["completion"], markup=False, highlight=False)
    speed = "" if cfg.watch else f", {tokens / seconds:.1f} tokens/s"
    console.print(
        f"\n{method.name}: NFE {nfe / len(records):.1f}, {tokens / nfe:.2f} tokens per forward{speed} "
        "(tokens before EOS)",
        highlight=False,
    )


if __name__ == "__main__":
    main()
