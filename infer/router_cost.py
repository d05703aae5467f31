"""What both routers cost beside a backbone of real size, with random weights: nothing is downloaded.

python infer/router_cost.py                       # LLaDA-8B's shapes; on a CPU one layer is timed and scaled
python infer/router_cost.py layers=32 dtype=bfloat16 device=cuda

Times one step at batch 1 with every generation position masked: the trunk, the head over the block's positions, the
observation of them, LPS on them; and, as at a step that opens a block, head, observation and LBS over all masked
positions.
"""

import statistics
import time
from collections.abc import Callable

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import LlamaForCausalLM

from backbones.bidirectional import make_bidirectional
from backbones.llada_format import llama_config
from backbones.placement import DTYPES, candidates, check_dtype
from infer.canvas import Canvas, Request
from infer.observation import observe
from infer.when.lps import Lps
from infer.where.lbs import Lbs
from routers.config import LBSConfig, LPSConfig, Origin
from routers.lbs import LBS
from routers.lps import LPS

LLADA_8B = {
    "model_type": "llada", "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288,
    "vocab_size": 126464, "embedding_size": 126464, "max_sequence_length": 4096, "rope_theta": 500000.0,
    "eos_token_id": 126081,
}  # fmt: skip
MASK_ID, EOS_ID, DEPTH = 126336, 126081, 32


def milliseconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median time of `work` after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


class Shape:
    """Stands in for the backbone where a rule is bound: ids, device and embedding."""

    name, fingerprint, vocabulary, vocab_size = "random", "random", "random", LLADA_8B["vocab_size"]

    def __init__(self, model: LlamaForCausalLM):
        self.embedding, self.device = model.model.embed_tokens.weight, model.lm_head.weight.device


@hydra.main(config_path="../conf", config_name="router_cost", version_base="1.3")
@torch.inference_mode()
def main(cfg: DictConfig) -> None:
    check_dtype(cfg.dtype, "dtype")
    if not 1 <= cfg.layers <= DEPTH or cfg.repeats < 1 or not 1 <= cfg.block_length <= cfg.gen_length:
        raise ValueError(
            f"layers={cfg.layers}, repeats={cfg.repeats}, block_length={cfg.block_length}: need 1 to {DEPTH} layers, "
            "at least 1 repeat, and a block within the generation"
        )
    device = candidates(cfg.device, "device")[0]
    torch.manual_seed(0)
    config = llama_config({**LLADA_8B, "n_layers": cfg.layers})
    with torch.device(device):
        torch.set_default_dtype(DTYPES[cfg.dtype])
        model = make_bidirectional(LlamaForCausalLM(config)).eval()
        torch.set_default_dtype(torch.float32)
    length, block = cfg.gen_length, cfg.block_length
    shape = Shape(model)
    origin = Origin("random", "random", shape.vocab_size, MASK_ID, length, block)
    lbs, lps = Lbs(LBS(LBSConfig(origin, embedding_size=4096))), Lps(LPS(LPSConfig(origin)))
    for rule in (lbs, lps):
        rule.bind(shape, length)
    canvas = Canvas.of([Request("r", (1,) * cfg.prompt_length)], length, MASK_ID, EOS_ID, device)
    row_B = torch.ones(1, dtype=torch.bool, device=device)
    block_BL = torch.arange(length, device=device)[None] < block
    canvas.open_blocks(row_B, block_BL)
    forbidden = torch.tensor([MASK_ID], device=device)
    hidden = model.model(input_ids=canvas.tokens_BT, use_cache=False).last_hidden_state[0, -length:]
    few_NV, all_NV = model.lm_head(hidden[:block]), model.lm_head(hidden)
    few = observe(few_NV, block_BL, lps.needs, forbidden)
    everything = observe(all_NV, canvas.masked_BL, lps.needs | lbs.needs, forbidden)

    work = {
        "trunk": lambda: model.model(input_ids=canvas.tokens_BT, use_cache=False),
        "head, block": lambda: model.lm_head(hidden[:block]),
        "head, all": lambda: model.lm_head(hidden),
        "observe, block": lambda: observe(few_NV, block_BL, lps.needs, forbidden),
        "observe, all": lambda: observe(all_NV, canvas.masked_BL, lps.needs | lbs.needs, forbidden),
        "LPS": lambda: lps.choose(canvas, few, canvas.candidates_BL),
        "LBS": lambda: lbs.form(canvas, everything, row_B),
    }
    found = {k: milliseconds(w, cfg.repeats, device) for k, w in tqdm(work.items(), desc="timing")}
    trunk = found["trunk"] * DEPTH / cfg.layers
    step, opening = trunk + found["head, block"], trunk + found["head, all"]
    table = Table("", "ms", "over the forward", title=f"LLaDA-8B's shapes, {cfg.dtype} on {device}, {length} positions")
    table.add_row(
        f"trunk, {DEPTH} layers" + ("" if cfg.layers == DEPTH else f" (from {cfg.layers})"), f"{trunk:.1f}", ""
    )
    overs = {"head, block": step, "observe, block": step, "LPS": step}
    overs |= {"head, all": opening, "observe, all": opening, "LBS": opening}
    for name, over in overs.items():
        table.add_row(name, f"{found[name]:.2f}", f"{found[name] / over:.2%}")
    console = Console()
    console.print(table)
    share = (found["LPS"] + found["LBS"] / cfg.steps_per_block) / step
    worst = (found["LPS"] + found["LBS"]) / step
    console.print(
        f"Both routers: {share:.2%} of a step's forward with a block opened every {cfg.steps_per_block} steps, "
        f"{worst:.2%} at a step that opens one. (EB-Decode reports 6.21% on an A100.)",
        highlight=False,
    )


if __name__ == "__main__":
    main()
