"""The last layer runs where its outputs are read, and nothing else changes by it."""

import pytest
import torch

from backbones.bidirectional import padding_inputs
from backbones.denoiser import load_dream, predicting
from tests.random_dream import save_dream

ROWS = [[5, 9, 40, 41, 17, 50, 51], [33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44], [7, 8, 9]]
ASKED = [[2, 5, 6], [0, 4, 11], [1]]  # of each row's real positions


@pytest.fixture(params=["llada", "dream"])
def any_backbone(request, backbone, tmp_path, tokenizer):
    """LLaDA as it is; Dream with shifted outputs, biases and fewer key heads than queries."""
    if request.param == "llada":
        return backbone
    return load_dream(str(save_dream(tmp_path / "d", tokenizer)[0]), name="dream")


@pytest.fixture
def batch():
    length = max(map(len, ROWS))
    pad_B = torch.tensor([length - len(row) for row in ROWS])
    tokens_BT = torch.tensor([[0] * (length - len(row)) + row for row in ROWS])
    asked_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    for row, where in enumerate(ASKED):
        asked_BT[row, [int(pad_B[row]) + i for i in where]] = True
    return tokens_BT, pad_B, asked_BT


@pytest.fixture
def widths(any_backbone):
    """How many positions of a row the last MLP was given, in each forward."""
    found = []
    mlp = any_backbone.model.model.layers[-1].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: found.append(args[0].shape[1]))
    yield found
    handle.remove()


def expected(backbone, tokens_BT, pad_B, asked_BT):
    """The whole model at every position, then what was asked for."""
    with torch.inference_mode():
        logits_BTV = backbone.model(
            input_ids=tokens_BT, **padding_inputs(pad_B, tokens_BT.shape[1], padded=True)
        ).logits
    return logits_BTV[predicting(asked_BT, pad_B, backbone.shifted)]


def test_the_last_layer_runs_where_it_is_read(any_backbone, batch, widths):
    wanted = expected(any_backbone, *batch)
    assert widths == [12]
    torch.testing.assert_close(any_backbone.logits(*batch), wanted, atol=1e-5, rtol=1e-5)
    assert widths == [12, 3]


def test_so_it_does_with_a_cache(any_backbone, batch, widths):
    tokens_BT, pad_B, asked_BT = batch
    wanted = expected(any_backbone, *batch)
    real_BT = torch.arange(12) >= pad_B[:, None]
    cache = any_backbone.new_cache(3, 12)
    every_B = torch.ones(3, dtype=torch.bool)
    found = any_backbone.cached_logits(*batch, real_BT, every_B, cache)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-5)
    # The keys and values of all positions were kept: computing the asked alone gives the same again.
    sources_BT = any_backbone.sources(asked_BT, pad_B)
    found = any_backbone.cached_logits(*batch, sources_BT, every_B, cache)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-5)
    some_B = torch.tensor([True, False, True])
    found = any_backbone.cached_logits(*batch, sources_BT, some_B, cache)
    torch.testing.assert_close(found, wanted[[0, 1, 2, 6]], atol=5e-5, rtol=1e-5)
    assert widths == [12, 3, 3, 3]
