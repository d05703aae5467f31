"""Small stand-ins: a random LLaDA saved in the published format, and routers that fit it."""

import os

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from functools import partial
from itertools import islice

import pytest
import torch

from backbones.denoiser import load_llada
from backbones.llada import new_model, save_checkpoint
from backbones.llada_format import llada_config
from infer.canvas import Request
from routers.config import LBSConfig, LPSConfig, Origin
from routers.lbs import LBS
from routers.lps import LPS
from tasks.gsm_symbolic import GsmSymbolic
from tests.decoding import BLOCK_LENGTH, GEN_LENGTH, make
from train.tokenizer_bpe import train_tokenizer

torch.set_num_threads(1)  # the models are so small that threads only wait for each other


@pytest.fixture(scope="session")
def task():
    return GsmSymbolic()


@pytest.fixture(scope="session")
def tokenizer(task):
    problems = islice(task.problems("train"), 200)
    return train_tokenizer((t for p in problems for t in (p.prompt, p.solution)), 512)


@pytest.fixture(scope="session")
def backbone_folder(tmp_path_factory, tokenizer):
    """A random model whose logits are peaked enough for thresholds to matter. Saved in LLaDA's format."""
    torch.manual_seed(0)
    config = llada_config(
        d_model=32,
        n_layers=2,
        n_heads=4,
        mlp_hidden_size=64,
        vocab_size=len(tokenizer),
        max_sequence_length=512,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_theta=10000.0,
    )
    model = new_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.5 if "lm_head" in name else 0.6)
    folder = tmp_path_factory.mktemp("backbone")
    save_checkpoint(folder, model, config, tokenizer, torch.float32)
    return folder


@pytest.fixture(scope="session")
def backbone(backbone_folder):
    return load_llada(str(backbone_folder), name="random", device="cpu")


@pytest.fixture(scope="session")
def origin(backbone):
    return Origin(
        backbone=backbone.name,
        fingerprint=backbone.fingerprint,
        vocab_size=backbone.vocab_size,
        mask_id=backbone.mask_id,
        gen_length=GEN_LENGTH,
        block_length=BLOCK_LENGTH,
        vocabulary=backbone.vocabulary,
    )


def spread(router):
    with torch.no_grad():
        for parameter in router.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.7)
        router.head.bias.zero_()
    return router


@pytest.fixture(scope="session")
def lbs(origin, backbone):
    """A random router with logits of both signs, so that blocks have holes."""
    torch.manual_seed(1)
    router = LBS(LBSConfig(origin, embedding_size=backbone.embedding.shape[1], width=16, mlp_width=32)).eval()
    return spread(router)


@pytest.fixture(scope="session")
def lps(origin):
    """A random router with scores on both sides of its threshold."""
    torch.manual_seed(2)
    return spread(LPS(LPSConfig(origin, threshold=0.55)).eval())


@pytest.fixture(scope="session")
def router_folders(tmp_path_factory, lbs, lps):
    root = tmp_path_factory.mktemp("routers")
    return lbs.save_pretrained(root / "lbs"), lps.save_pretrained(root / "lps")


@pytest.fixture
def make_method(lbs, lps):
    """A method by its name in `tests.decoding.METHODS`."""
    return partial(make, lbs, lps)


@pytest.fixture(scope="session")
def requests(backbone):
    """Prompts of unequal length, with references for the oracle."""
    generator = torch.Generator().manual_seed(3)
    allowed = [i for i in range(backbone.vocab_size) if i not in backbone.forbidden_ids.tolist()]
    made = []
    for i, length in enumerate((3, 17, 60, 1, 29, 8, 44, 5, 5, 90, 12, 33)):
        draw = torch.randint(len(allowed), (length + GEN_LENGTH,), generator=generator).tolist()
        ids = [allowed[d] for d in draw]
        made.append(Request(f"r{i}", tuple(ids[:length]), tuple(ids[length:])))
    return made


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Nothing is at hand: all code takes the way that it takes where tensors are on another device."""
    monkeypatch.setattr("backbones.host.at_hand", lambda tensor: False)
