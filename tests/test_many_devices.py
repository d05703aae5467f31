"""Trainings on two devices, here two processes on the CPU: the same data, shared out; one export."""

import pytest

from routers.lbs import LBS
from routers.lps import LPS
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH
from tests.test_pipeline import run, succeed


@pytest.mark.slow
def test_two_processes_train_each_router(tmp_path, backbone_folder):
    shared = (
        f"backbone.path={backbone_folder}", "backbone.name=random", f"decode.gen_length={GEN_LENGTH}",
        f"decode.block_length={BLOCK_LENGTH}", "trace.limit=20", "trace.shard_size=8", "trainer.max_epochs=2",
        "trainer.enable_progress_bar=false", "trainer.accelerator=cpu",
    )  # fmt: skip
    two = ("trainer.devices=2", "+trainer.strategy=ddp")
    succeed("train/lbs.py", *shared, "out=one", cwd=tmp_path)
    succeed("train/lbs.py", *shared, *two, "out=lbs", cwd=tmp_path)
    lbs = LBS.from_pretrained(tmp_path / "lbs/export")
    assert lbs.config.origin == LBS.from_pretrained(tmp_path / "one/export").config.origin
    assert 0 <= lbs.config.metrics["test/auroc"] <= 1
    succeed("train/lps.py", *shared, *two, "router.lbs=lbs/export", "out=lps", "fpr_budget=1", cwd=tmp_path)
    lps = LPS.from_pretrained(tmp_path / "lps/export")
    assert 0.8 <= lps.config.threshold <= 0.9999 and "val/recall_at_threshold" in lps.config.metrics
    assert len((tmp_path / "lps/thresholds.csv").read_text().splitlines()) == 251
    printed = succeed(
        "eval/compare.py", *shared[:4], "methods=[sequential,eb_decode]", "limit=3", "router.lbs=lbs/export",
        "router.lps=lps/export", "out=cmp", cwd=tmp_path,
    )  # fmt: skip
    assert "eb_decode" in printed
    assert run("train/lbs.py", *shared, *two, "out=lbs", "reuse=true", cwd=tmp_path).returncode == 0
