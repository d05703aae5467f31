"""Compares methods on a task: accuracy with intervals, forwards, speed, routers' cost, distance to the oracle.

python eval/compare.py 'methods=[sequential,threshold,eb_decode,oracle]' limit=256 batch_size=16 out=runs/compare
python eval/compare.py 'methods=[sequential,"threshold:commit.tau=0.8"]' limit=64
python eval/compare.py 'methods=[sequential,"local_leap:commit.tau=0.6|0.75|0.9,commit.window=2|4"]'    # a sweep
"""

import json
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from backbones.checkpoint import write_atomically
from eval.report import draw_accuracy, draw_commit_steps, print_table, write_results
from eval.runner import Comparison, Setting, choose_problems
from infer.compose import build_method, compose_method, expand, hash_routers


def comparison_record(cfg: DictConfig, overrides: list[str], fingerprint: str) -> dict:
    """What decides the results: the config, the backbone's weights, and each method with hashes of its routers."""
    record = OmegaConf.to_container(cfg, resolve=True)
    for name in ("router", "method", "reuse", "out"):
        record.pop(name)
    methods = {entry: compose_method("compare", entry, overrides).method for entry in expand(cfg.methods)}
    record["fingerprint"] = fingerprint
    record["methods"] = {k: hash_routers(OmegaConf.to_container(m, resolve=True)) for k, m in methods.items()}
    return record


@hydra.main(config_path="../conf", config_name="compare", version_base="1.3")
def main(cfg: DictConfig) -> None:
    overrides = list(HydraConfig.get().overrides.task)
    if not isinstance(cfg.methods, ListConfig):
        raise ValueError(f"methods={cfg.methods}: give a list: 'methods=[a,b]'")
    entries = expand(cfg.methods)
    if cfg.limit < 1:
        raise ValueError(f"limit={cfg.limit}: need at least 1 problem")
    backbone, task = instantiate(cfg.backbone), instantiate(cfg.task)
    out, record = Path(cfg.out), comparison_record(cfg, overrides, backbone.fingerprint)
    marker = out / "config.json"
    if cfg.reuse and marker.is_file() and json.loads(marker.read_text()) == record:
        print_table(json.loads((out / "results.json").read_text()))
        print(f"{out} holds the results of this very comparison already")
        return
    methods = {entry: build_method("compare", entry, overrides) for entry in entries}
    reference = "sequential" if "sequential" in methods else build_method("compare", "sequential", overrides)
    setting = Setting(cfg.decode.gen_length, cfg.batch_size, cfg.decode.temperature, cfg.decode.seed)
    comparison = Comparison(backbone, task, methods, reference, setting)
    comparison.run(choose_problems(task, cfg.split, backbone, cfg.decode.gen_length, cfg.limit))

    rows = comparison.rows()
    marker.unlink(missing_ok=True)  # it vouches for all files of `out`, so it goes first and comes back last
    write_results(out, rows, [s for samples in comparison.samples.values() for s in samples])
    draw_accuracy(out / "accuracy.png", rows)
    example = comparison.samples[entries[0]][0].id
    chosen = [next(s for s in samples if s.id == example) for samples in comparison.samples.values()]
    pieces = {s.method: [backbone.tokenizer.decode([t]) for t in s.output] for s in chosen}
    draw_commit_steps(out / "commit_steps.png", chosen, pieces)
    write_atomically(marker, lambda path: path.write_text(json.dumps(record, indent=2) + "\n"))
    print_table(rows)
    print(f"results, samples and pictures in {out}: results.json samples.jsonl accuracy.png commit_steps.png")


if __name__ == "__main__":
    main()
