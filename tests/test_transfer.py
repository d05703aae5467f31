"""A router on another model and at another length, through the comparison as a user runs it."""

import json
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from backbones.llada import new_model, save_checkpoint
from backbones.llada_format import llada_config
from eval.compare import main
from train.tokenizer_bpe import train_tokenizer

LENGTH = 24  # another than the routers' own


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, task):
    """A LLaDA of another width and vocabulary than the one that the routers of `conftest` belong to."""
    problems = islice(task.problems("train"), 60)
    tokenizer = train_tokenizer((t for p in problems for t in (p.prompt, p.solution)), 400)
    torch.manual_seed(6)
    config = llada_config(
        d_model=48, n_layers=1, n_heads=4, mlp_hidden_size=64, vocab_size=len(tokenizer), max_sequence_length=512,
        mask_token_id=tokenizer.mask_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, rope_theta=10000.0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("elsewhere")
    save_checkpoint(folder, new_model(config), config, tokenizer, torch.float32)
    return folder


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys, router_folders):
    """Runs eval/compare.py in this process; what it wrote, or what it said when it failed."""
    lbs, lps = router_folders

    def run(*overrides):
        given = (f"router.lbs={lbs}", f"router.lps={lps}", "backbone.device=cpu", "limit=3", "batch_size=2", "out=t")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["compare.py", *given, *overrides])
        try:
            main()
        except SystemExit:
            return capsys.readouterr().err
        return json.loads((tmp_path / "t/results.json").read_text())

    return run


def test_lps_goes_to_another_model_and_length(compare, elsewhere):
    methods = 'methods=[sequential,lps,"lps:commit.tau_psi=1.0,commit.tau=1.0"]'
    there = (
        f"backbone.path={elsewhere}", "backbone.name=elsewhere", f"decode.gen_length={LENGTH}",
        "decode.block_length=8", methods,
    )  # fmt: skip
    sequential, lps, never = compare(*there, "decode.stop=full_length", "router.allow_transfer=true")
    assert sequential["nfe"] == LENGTH == never["nfe"]
    assert lps["n"] == 3 and lps["nfe"] < LENGTH and lps["router_share"] > 0, "the router decides there"
    refused = compare(*there)
    assert "router.lps was trained for backbone random/" in refused and "not elsewhere/" in refused
    assert f"gen_length 40, not {LENGTH}" in refused and "router.allow_transfer=true lets it go there" in refused


def test_lbs_goes_to_other_weights_alone(compare, elsewhere, backbone_folder):
    allowed = ("methods=[lbs]", "router.allow_transfer=true")
    refused = compare(*allowed, f"backbone.path={elsewhere}", "decode.gen_length=40")
    assert "router.lbs was trained for" in refused and "LBS does not transfer to another vocabulary" in refused
    refused = compare(*allowed, f"backbone.path={backbone_folder}", f"decode.gen_length={LENGTH}")
    assert f"gen_length 40, not {LENGTH}: LBS does not transfer" in refused


@pytest.mark.parametrize("config", ["compare", "generate", "trace_gen", "speed"])
def test_the_setting_reaches_both_rules(config):
    with initialize_config_dir(str(Path(__file__).resolve().parents[1] / "conf"), version_base="1.3"):
        for allowed in (False, True):
            cfg = compose(config, overrides=["method=eb_decode", f"router.allow_transfer={str(allowed).lower()}"])
            assert cfg.method.block.allow_transfer is allowed and cfg.method.commit.allow_transfer is allowed
