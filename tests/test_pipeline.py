"""The whole main job on a small random backbone, through the entry scripts, as a user runs it."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backbones.denoiser import load_dream
from infer.observation import observe
from routers.lbs import LBS
from routers.lps import LPS
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH
from tests.random_dream import save_dream
from trace_gen.store import TraceStore

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *overrides: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    return subprocess.run(
        [sys.executable, str(ROOT / script), *overrides], cwd=cwd, env=environment, capture_output=True, text=True
    )


def succeed(script: str, *overrides: str, cwd: Path) -> str:
    done = run(script, *overrides, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def shared(backbone_folder):
    return (
        f"backbone.path={backbone_folder}",
        "backbone.name=random",
        f"decode.gen_length={GEN_LENGTH}",
        f"decode.block_length={BLOCK_LENGTH}",
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, shared):
    """A working directory in which both routers were trained, with what the scripts printed."""
    cwd = tmp_path_factory.mktemp("work")
    small = ("trace.limit=20", "trace.shard_size=8", "trainer.max_epochs=2", "trainer.enable_progress_bar=false")
    printed = {
        "lbs": succeed("train/lbs.py", *shared, *small, "out=lbs", "logger=wandb", cwd=cwd),
        "lps": succeed(
            "train/lps.py", *shared, *small, "router.lbs=lbs/export", "out=lps", "fpr_budget=1", "logger=wandb", cwd=cwd
        ),
    }
    return cwd, printed


def test_routers_are_exported_with_where_they_belong(finished, backbone):
    cwd, _ = finished
    for kind, cls in (("lbs", LBS), ("lps", LPS)):
        router = cls.from_pretrained(cwd / kind / "export")
        assert router.config.origin.fingerprint == backbone.fingerprint
        assert router.config.origin.gen_length == GEN_LENGTH
        assert {"test/auroc", "test/precision", "test/recall", "test/fpr", "test/calibration_error"} <= set(
            router.config.metrics
        )
    assert 0.8 <= router.config.threshold <= 0.9999
    assert "val/recall_at_threshold" in router.config.metrics
    assert 0 <= router.config.metrics["test/confidence_recall_at_that_fpr"] <= 1
    assert len((cwd / "lps" / "thresholds.csv").read_text().splitlines()) == 251
    assert list((cwd / "lps" / "wandb").glob("offline-run-*")), "W&B wrote nothing offline"


def test_traces_are_there(finished):
    cwd, _ = finished
    replay = TraceStore.open(cwd / "runs/traces/random/lbs_sequential-replay")
    assert replay.counts == [8, 8, 4]
    masked = TraceStore.open(cwd / "runs/traces/random/threshold-masked")
    assert len(masked.rows()) == 20 * 10
    assert masked.spec["backbone"]["name"] == "random"


def test_a_second_run_finds_the_traces(finished, shared):
    cwd, _ = finished
    text = succeed("trace_gen/generate.py", *shared, "trace=masked", "trace.limit=20", "trace.shard_size=8", cwd=cwd)
    assert "are there already" in text and "20 trajectories" in text


def test_other_traces_in_the_same_folder_are_refused(finished, shared):
    cwd, _ = finished
    done = run("trace_gen/generate.py", *shared, "trace=masked", "method.commit.tau=0.5", cwd=cwd)
    assert done.returncode != 0
    assert "method.commit.tau: 0.9 -> 0.5" in done.stderr


def test_missing_traces_give_the_command(finished, shared):
    cwd, _ = finished
    done = run("train/lbs.py", *shared, "trace.generate=false", "trace.out=nowhere", cwd=cwd)
    assert done.returncode != 0
    assert "python trace_gen/generate.py trace=masked" in done.stderr and "trace.out=nowhere" in done.stderr
    assert not (cwd / "nowhere").exists()


def test_an_impossible_budget_is_an_error(finished, shared):
    cwd, _ = finished
    done = run(
        "train/lps.py", *shared, "router.lbs=lbs/export", "trace.limit=20", "trace.shard_size=8", "fpr_budget=-1",
        "trainer.max_epochs=1", "out=strict", cwd=cwd,
    )  # fmt: skip
    assert done.returncode != 0
    assert "fpr_budget=-1" in done.stderr and "best is FPR" in done.stderr
    assert not (cwd / "strict" / "export").exists()


def losses(folder: Path) -> dict[tuple[str, str], str]:
    """Training and validation losses by step, from the CSV logs of all runs in a folder; later runs overwrite."""
    found = {}
    for log in sorted(folder.glob("logs/version_*/metrics.csv")):
        for row in csv.DictReader(log.open()):
            found |= {(name, row["step"]): row[name] for name in ("train/loss", "val/loss") if row.get(name)}
    return found


@pytest.mark.parametrize("kind", ["lbs", "lps"])
def test_resumed_training_repeats_the_loss_bit_for_bit(finished, shared, kind):
    """The halves: stopped in the middle of the second epoch, then resumed, which repeats that epoch."""
    cwd, _ = finished
    args = (
        f"train/{kind}.py", *shared, "trace.limit=20", "trace.shard_size=8", "router.lbs=lbs/export", "batch_size=16",
        "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1", "optim.horizon=3", "trainer.max_epochs=3",
        *(["fpr_budget=1"] if kind == "lps" else []),
    )  # fmt: skip
    whole, halves = f"out={kind}_whole", f"out={kind}_halves"
    succeed(*args, whole, cwd=cwd)
    per_epoch = len([1 for name, _ in losses(cwd / f"{kind}_whole") if name == "train/loss"]) // 3
    assert per_epoch > 2
    succeed(*args, halves, f"+trainer.max_steps={per_epoch + 2}", cwd=cwd)
    assert 0 < len(losses(cwd / f"{kind}_halves")) < len(losses(cwd / f"{kind}_whole"))
    succeed(*args, halves, "resume=true", cwd=cwd)
    assert losses(cwd / f"{kind}_whole") == losses(cwd / f"{kind}_halves")
    weights = [(cwd / f"{kind}_{run}/export/model.safetensors").read_bytes() for run in ("whole", "halves")]
    assert weights[0] == weights[1]


def test_reuse_does_nothing_exactly_where_nothing_changed(finished, shared):
    cwd, _ = finished
    small = ("trace.limit=20", "trace.shard_size=8", "trainer.max_epochs=2", "trainer.enable_progress_bar=false")
    lbs = ("train/lbs.py", *shared, *small, "out=lbs", "reuse=true")
    assert "already" in succeed(*lbs, cwd=cwd).splitlines()[-1]
    before = (cwd / "lbs/export/model.safetensors").read_bytes()
    assert "exported" in succeed(*lbs, "out=lbs2", cwd=cwd)
    assert (cwd / "lbs2/export/model.safetensors").read_bytes() == before, "the same seed gives the same router"
    assert "exported" in succeed(*lbs, "out=lbs2", "loss.reward=0.4", cwd=cwd)

    compare = ("eval/compare.py", *shared, "methods=[threshold,lbs]", "limit=2", "out=reused", "reuse=true")
    assert "already" not in succeed(*compare, "router.lbs=lbs/export", cwd=cwd)
    assert "already" in succeed(*compare, "router.lbs=lbs/export", cwd=cwd)
    assert "already" not in succeed(*compare, "router.lbs=lbs2/export", cwd=cwd), "another router at another path"


def test_bad_trace_settings_leave_nothing(finished, shared):
    cwd, _ = finished
    for override, named in (("method.commit.tau=1.5", "tau=1.5"), ("trace.ratios=[2]", "trace.ratios")):
        done = run("trace_gen/generate.py", *shared, "trace=masked", override, "trace.out=poisoned", cwd=cwd)
        assert done.returncode != 0 and named in done.stderr
        assert not (cwd / "poisoned").exists()


def test_comparison(finished, shared):
    cwd, _ = finished
    methods = (
        "methods=[sequential,threshold,'threshold:commit.tau=0.1|0.2,cache=dual','local_leap:block=lbs',lsp,lbs,lps,"
        "eb_decode,oracle]"
    )
    routers = ("router.lbs=lbs/export", "router.lps=lps/export")
    text = succeed("eval/compare.py", *shared, *routers, methods, "limit=5", "batch_size=2", "out=table", cwd=cwd)
    assert "before EOS" in text
    rows = json.loads((cwd / "table/results.json").read_text())
    assert [r["method"] for r in rows][:5] == [
        "sequential", "threshold", "threshold:commit.tau=0.1,cache=dual", "threshold:commit.tau=0.2,cache=dual",
        "local_leap:block=lbs",
    ]  # fmt: skip
    keys = {
        "method", "n", "accuracy", "accuracy_low", "accuracy_high", "nfe", "tokens_per_forward", "tokens_per_second",
        "latency_ms", "batch_size", "speedup_nfe", "speedup_tps", "router_share", "agreement", "share_of_oracle",
    }  # fmt: skip
    by_method = {r["method"]: r for r in rows}
    for row in rows:
        assert keys <= set(row)
        assert row["n"] == 5 and row["batch_size"] == 2
    assert by_method["sequential"]["agreement"] == 1 and by_method["sequential"]["speedup_nfe"] == 1
    assert by_method["sequential"]["router_share"] == 0 < by_method["eb_decode"]["router_share"]
    assert by_method["threshold:commit.tau=0.2,cache=dual"]["nfe"] < by_method["threshold"]["nfe"]
    assert by_method["oracle"]["share_of_oracle"] == 1
    samples = [json.loads(line) for line in (cwd / "table/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 10 * 5
    first = samples[0]
    assert set(first) == {
        "method", "id", "prompt", "completion", "correct", "nfe", "tokens", "latency_ms", "committed_at",
        "template",
    }  # fmt: skip
    assert len(first["committed_at"]) == GEN_LENGTH
    for picture in ("accuracy.png", "commit_steps.png"):
        assert (cwd / "table" / picture).read_bytes().startswith(b"\x89PNG")


def test_speed(finished, shared):
    cwd, _ = finished
    settings = ("methods=[threshold,sequential]", "caches=[none,dual]", "batch_sizes=[1,2]", "limit=3", "out=speed")
    text = succeed("eval/speed.py", *shared, *settings, cwd=cwd)
    assert (
        "plain loop, threshold" in text
        and "x the prompts per second of the plain loop" in text
        and "cache dual, batch 2" in text
    )
    rows = {(r["method"], r["cache"], r["batch_size"]): r for r in json.loads((cwd / "speed/speed.json").read_text())}
    assert len(rows) == 2 * 2 * 2 + 2
    for name in ("sequential", "threshold"):
        assert (
            rows[name, "none", 1]["nfe"]
            == rows[name, "none", 2]["nfe"]
            == rows[f"plain loop, {name}", "none", 1]["nfe"]
        )
        full, block = rows[name, "none", 1], rows[name, "dual", 1]
        assert block["positions_per_row"] < full["positions_per_row"], "a cached step computes fewer positions"
    for row in rows.values():
        assert row["n"] == 3 and 0 < row["outside_backbone"] < 1 and row["tokens_per_second"] > 0


def test_methods_are_listed():
    text = succeed("infer/methods.py", cwd=ROOT)
    for file in (ROOT / "conf" / "method").rglob("*.yaml"):
        assert file.stem in text, file
    assert "Fast-dLLM" in text and "2609.16450" in text


def test_generation(finished, shared):
    cwd, _ = finished
    routers = ("router.lbs=lbs/export", "router.lps=lps/export")
    text = succeed("infer/generate.py", *shared[:2], *shared[2:], *routers, "prompt=How many?", cwd=cwd)
    assert "NFE" in text and "tokens per forward" in text
    text = succeed("infer/generate.py", *shared, *routers, "prompt=How many?", "watch=true", "watch_delay=0", cwd=cwd)
    assert "committed" in text
    done = subprocess.run(
        [sys.executable, str(ROOT / "infer/generate.py"), *shared, "method=threshold", "prompt=-"],
        cwd=cwd, input="Ann's aunt (who has 3, or 4) = what?", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "NFE" in done.stdout
    (cwd / "prompts.jsonl").write_text('{"id": "a", "prompt": "One?"}\n{"prompt": "Two and two are how many?"}\n')
    succeed("infer/generate.py", *shared, "method=threshold", "prompts=prompts.jsonl", "out=new/done.jsonl", cwd=cwd)
    lines = [json.loads(line) for line in (cwd / "new/done.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", "2"]


@pytest.mark.parametrize(
    ("script", "overrides", "message"),
    [
        ("infer/generate.py", ("method=nonsense", "prompt=a"), "sequential"),
        ("eval/compare.py", ("methods=[nonsense]",), "sequential"),
        ("eval/compare.py", ("task=nonsense",), "gsm_symbolic"),
        ("eval/compare.py", ("methods=sequential",), "methods=sequential: give a list"),
        ("infer/generate.py", ("method=threshold", "method.commit.tau=1.5", "prompt=a"), "tau=1.5"),
        ("infer/generate.py", ("method=threshold", "method.commit.tau=abc", "prompt=a"), "method.commit.tau='abc'"),
        ("eval/compare.py", ("methods=['sequential:commit.k=1.5']",), "method.commit.k=1.5: need int"),
        ("infer/generate.py", ("method=threshold", "decode.block_length=64", "prompt=a"), "block_length=64: longer"),
        ("infer/generate.py", ("method=threshold", "prompt=''"), "prompt is empty"),
        ("infer/generate.py", ("method=lsp", "method/block=lbs", "prompt=a"), "have holes"),
        ("infer/generate.py", ("method=dus", "method.cache=paged", "prompt=a"), "cache='paged'"),
        ("infer/generate.py", ("method=dus", "method/filters=[luck]", "prompt=a"), "method/filters/luck"),
        ("infer/generate.py", ("prompt=a", "method=sequential", "decode.gen_length=0"), "gen_length=0"),
        ("infer/generate.py", ("prompt=a", "method=lbs", "router.lbs=lbs/export", "decode.gen_length=41"), "not 41"),
        ("infer/generate.py", ("prompt=a", "method=lbs", "router.lbs=nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_named(finished, shared, script, overrides, message):
    cwd, _ = finished
    done = run(script, *shared, *overrides, cwd=cwd)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_notebook_runs_on_these_traces(finished, monkeypatch):
    """Its code cells, in order, in one namespace."""
    cwd, _ = finished
    monkeypatch.setenv("TRACES", str(cwd / "runs/traces/random/lbs_sequential-replay"))
    notebook = json.loads((ROOT / "notebooks/look_at_traces.ipynb").read_text())
    namespace: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "committed with outputs"
            exec("".join(cell["source"]), namespace)
    assert namespace["lead"].size and (namespace["lead"] >= 0).all()
    assert 0 < namespace["share"][-1] <= 1


def test_the_whole_job_on_a_dream(tmp_path, tokenizer):
    """Another architecture, whose logits are shifted: traces, both routers, comparison."""
    folder, _ = save_dream(tmp_path / "checkpoint", tokenizer)
    backbone = load_dream(str(folder), name="dream")
    shared = (
        "backbone=dream_7b_base", f"backbone.path={folder}", "backbone.name=dream", "backbone.dtype=float32",
        "decode.gen_length=24", "decode.block_length=8", "decode.stop=full_length",
    )  # fmt: skip
    small = ("trace.limit=6", "trace.shard_size=3", "trainer.max_epochs=1", "trainer.enable_progress_bar=false")
    succeed("train/lbs.py", *shared, *small, "out=lbs", cwd=tmp_path)
    succeed("train/lps.py", *shared, *small, "router.lbs=lbs/export", "fpr_budget=1", "out=lps", cwd=tmp_path)
    for kind, cls in (("lbs", LBS), ("lps", LPS)):
        assert cls.from_pretrained(tmp_path / kind / "export").config.origin.fingerprint == backbone.fingerprint

    check_masked_traces(TraceStore.open(tmp_path / "runs/traces/dream/threshold-masked"), backbone)
    replay = TraceStore.open(tmp_path / "runs/traces/dream/lbs_sequential-replay")
    assert replay.counts == [3, 3] and all(row["confidence"] for row in replay.rows())

    methods = "methods=[sequential,'threshold:cache=dual',lps,'eb_decode:cache=prefix',oracle]"
    routers = ("router.lbs=lbs/export", "router.lps=lps/export")
    succeed("eval/compare.py", *shared, *routers, methods, "limit=3", "batch_size=2", "out=table", cwd=tmp_path)
    rows = {row["method"]: row for row in json.loads((tmp_path / "table/results.json").read_text())}
    assert len(rows) == 5 and all(row["n"] == 3 for row in rows.values())
    assert rows["sequential"]["nfe"] == 24 and rows["sequential"]["agreement"] == 1
    assert rows["oracle"]["share_of_oracle"] == 1 and rows["oracle"]["nfe"] < 24
    assert rows["eb_decode:cache=prefix"]["router_share"] > 0


def check_masked_traces(store: TraceStore, backbone) -> None:
    """What was recorded where everything is masked is what `backbone` says of the prompt and masks alone."""
    prompts = {t["trajectory"]: t["prompt"] for t in store.trajectories()}
    length = store.spec["decode"]["gen_length"]
    whole = [row for row in store.rows() if row["ratio"] == 1]
    assert len(whole) == len(prompts) == 6
    for row in whole:
        tokens = torch.tensor([[*prompts[row["trajectory"]], *[backbone.mask_id] * length]])
        asked = torch.ones(1, length, dtype=torch.bool)
        asked_BT = torch.nn.functional.pad(asked, (tokens.shape[1] - length, 0))
        logits = backbone.logits(tokens, torch.tensor([0]), asked_BT)
        seen = observe(logits, asked, frozenset({"entropy"}), backbone.forbidden_ids)
        assert seen.top1_BL[0].tolist() == list(row["top1"])
        torch.testing.assert_close(seen.entropy_BL[0], torch.tensor(row["entropy"]), atol=1e-4, rtol=1e-4)
