"""Compares methods on a task: accuracy with intervals, forwards, speed, routers' cost, distance to the oracle.

python eval/compare.py 'methods=[sequential,threshold,eb_decode,oracle]' limit=256 batch_size=16 out=runs/compare
python eval/compare.py 'methods=[sequential,"threshold:commit.tau=0.8"]' limit=64
"""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from eval.report import draw_accuracy, draw_commit_steps, print_table, write_results
from eval.runner import Comparison, Setting, choose_problems
from infer.compose import build_method


@hydra.main(config_path="../conf", config_name="compare", version_base="1.3")
def main(cfg: DictConfig) -> None:
    overrides = list(HydraConfig.get().overrides.task)
    if not cfg.methods or len(set(cfg.methods)) != len(cfg.methods):
        raise ValueError(f"methods={list(cfg.methods)}: name at least one, each once")
    if cfg.limit < 1:
        raise ValueError(f"limit={cfg.limit}: need at least 1 problem")
    methods = {entry: build_method("compare", entry, overrides) for entry in cfg.methods}
    reference = build_method("compare", "sequential", overrides)
    backbone, task = instantiate(cfg.backbone), instantiate(cfg.task)
    setting = Setting(cfg.decode.gen_length, cfg.batch_size, cfg.decode.temperature, cfg.decode.seed)
    comparison = Comparison(backbone, task, methods, reference, setting)
    comparison.run(choose_problems(task, cfg.split, backbone, cfg.decode.gen_length, cfg.limit))

    out, rows = Path(cfg.out), comparison.rows()
    write_results(out, rows, [s for samples in comparison.samples.values() for s in samples])
    draw_accuracy(out / "accuracy.png", rows)
    example = comparison.samples[cfg.methods[0]][0].id
    chosen = [next(s for s in samples if s.id == example) for samples in comparison.samples.values()]
    pieces = {s.method: [backbone.tokenizer.decode([t]) for t in s.output] for s in chosen}
    draw_commit_steps(out / "commit_steps.png", chosen, pieces)
    print_table(rows)
    print(f"results, samples and pictures in {out}: results.json samples.jsonl accuracy.png commit_steps.png")


if __name__ == "__main__":
    main()
