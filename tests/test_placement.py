"""Which device holds what, and a forward over several: with fake tensors, which find what is not where it must be."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from backbones import placement
from backbones.bidirectional import make_bidirectional, padding_inputs
from backbones.denoiser import load_llada
from backbones.kv_cache import IndexedCache
from backbones.last_layer import LastLayer
from backbones.llada import load_model, new_model
from backbones.llada_format import llada_config, to_llada_name
from backbones.placement import Placement, candidates, connect, free_memory, place, spread
from tests.published import save_sharded

GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]
TWO = [torch.device("cpu"), torch.device("cpu", 1)]  # to fake tensors they are two


@pytest.mark.parametrize(
    ("rest", "layers", "free", "expected"),
    [
        (0, [1] * 4, [10, 10], [0, 0, 1, 1]),
        (2, [1] * 4, [10, 10], [0, 1, 1, 1]),  # 3 bytes on each
        (0, [1] * 4, [30, 10], [0, 0, 0, 1]),
        (0, [1] * 6, [10, 10, 10], [0, 0, 1, 1, 2, 2]),
        (4, [1] * 2, [6, 1000], [1, 1]),  # the first is full with what must lie there
        (7, [1] * 2, [6, 1000], None),
        (0, [4] * 3, [6, 6], None),  # two of the layers would have to share
    ],
)
def test_layers_are_spread_in_proportion_to_what_is_free(rest, layers, free, expected):
    assert spread(rest, layers, free) == expected


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)


def test_auto_takes_one_gpu_where_one_is_enough(backbone_folder, two_gpus, monkeypatch):
    numbers = sum(p.numel() for p in load_model(backbone_folder, torch.float32).parameters())
    free = {"cuda:0": 4 * numbers, "cuda:1": 4 * numbers}
    monkeypatch.setattr(placement, "free_memory", lambda device: free[str(device)])
    assert place(backbone_folder, torch.float32, "auto") == Placement(GPUS[0])
    free["cuda:0"] -= 1
    halves = place(backbone_folder, torch.float32, "auto")
    assert halves.first == GPUS[0] and halves.layers[-1] == GPUS[1] and halves.spread
    assert not place(backbone_folder, torch.bfloat16, "auto").spread
    assert place(backbone_folder, torch.float32, "cuda:1") == Placement(GPUS[1])
    assert place(backbone_folder, torch.float32, ["cuda:1", "cuda:0"]).first == GPUS[1]
    with pytest.raises(ValueError, match="weights need .* in float32, and cuda:0 has .* free"):
        place(backbone_folder, torch.float32, "auto", whole=True)
    with pytest.raises(ValueError, match="one device"):
        place(backbone_folder, torch.float32, ["cuda:0", "cuda:1"], whole=True)
    free["cuda:0"] = free["cuda:1"] = numbers
    with pytest.raises(ValueError, match="cuda:0 has .* free, cuda:1 has .* free; try backbone.dtype=bfloat16"):
        place(backbone_folder, torch.float32, "auto")


def test_memory_that_holds_cached_files_is_free(tmp_path, monkeypatch):
    """A checkpoint just downloaded lies in the cache of files; that must not keep it from being loaded."""
    monkeypatch.setattr(placement, "MEMINFO", tmp_path / "meminfo")
    assert free_memory(torch.device("cpu")) >= 2**28
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemFree:   5 kB\nMemAvailable:   70 kB\nCached:  60 kB\n")
    assert free_memory(torch.device("cpu")) == 70 * 1024


def test_loading_takes_little_more_than_the_weights(tmp_path, tokenizer):
    """Bytes of its own that a process has at most while it loads a sharded bfloat16 checkpoint, over the weights'."""
    config = llada_config(
        d_model=1024, n_layers=8, n_heads=8, mlp_hidden_size=3072, vocab_size=len(tokenizer), max_sequence_length=512,
        mask_token_id=tokenizer.mask_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, rope_theta=10000.0,
    )  # fmt: skip
    with torch.device("meta"):
        names = [(to_llada_name(n), p.shape) for n, p in new_model(config).named_parameters()]
    save_sharded(tmp_path, {n: torch.zeros(shape) for n, shape in names}, config, torch.bfloat16)
    printed = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], cwd=Path(__file__).parents[1], capture_output=True, text=True,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    peak, weights = map(int, printed.stdout.split())
    assert weights == 2 * sum(math.prod(shape) for _, shape in names) > 2e8
    # Pages that the process had before and freed or used again move the figure by some MB either way.
    assert 0.95 * weights < peak < 1.15 * weights


PEAK = """
import re, sys, threading, time
from pathlib import Path
import torch
from backbones.llada import load_model

def own():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.zeros(1 << 20).bfloat16()
before, peak, over = own(), 0, False
def watch():
    global peak
    while not over:
        peak = max(peak, own())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
model = load_model(Path(sys.argv[1]), torch.bfloat16)
over = True
thread.join()
print(peak - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def test_devices_that_are_not_there(two_gpus, monkeypatch):
    assert candidates("cuda") == GPUS[:1] and candidates("auto") == GPUS
    for wrong in ("gpu", "mps", "meta", "cpu:0", "", None, 0, [], ["cuda:0", "cuda"], ["cpu", "gpu"], [0, 1]):
        with pytest.raises(ValueError, match="allowed: auto, cpu, cuda"):
            candidates(wrong)
    with pytest.raises(ValueError, match="cuda:2 is not there, torch sees 2 GPUs"):
        candidates(["cuda:0", "cuda:2"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert candidates("auto") == [torch.device("cpu")]
    with pytest.raises(ValueError, match="torch sees 0 GPUs"):
        candidates("cuda")


def test_what_several_devices_rule_out(backbone_folder, monkeypatch):
    monkeypatch.setattr("backbones.denoiser.place", lambda *_: Placement(GPUS[0], (GPUS[0], GPUS[1])))
    with pytest.raises(ValueError, match="compile=true needs the model on one device"):
        load_llada(str(backbone_folder), name="x", device=["cuda:0", "cuda:1"], compile=True)


@pytest.fixture
def empty_model(backbone):
    with torch.device("meta"):
        return make_bidirectional(type(backbone.model)(backbone.model.config)).eval()


def forward_on_two_devices(model, cached, connected):
    """Where the logits and the cache's layers are after a forward whose second layer lies on the second device."""
    trunk = model.model
    for part in (trunk.embed_tokens, trunk.layers[0], trunk.norm, model.lm_head):
        part.to_empty(device=TWO[0])
    trunk.layers[1].to_empty(device=TWO[1])
    with TWO[0]:
        trunk.rotary_emb = type(trunk.rotary_emb)(model.config)
    if connected:
        connect(model, Placement(TWO[0], tuple(TWO)))
    tokens_BT = torch.zeros(2, 9, dtype=torch.long, device=TWO[0])
    inputs = padding_inputs(torch.tensor([0, 3], device=TWO[0]), 9, padded=True)
    cache = IndexedCache(2, 2, 9)
    where_N = torch.zeros(4, dtype=torch.long, device=TWO[0])
    cache._target = {TWO[0]: (where_N, where_N, where_N, where_N, None)}
    inputs |= {"cache": cache if cached else None, "use_cache": cached}
    read_BK = torch.zeros(2, 4, dtype=torch.long, device=TWO[0])
    hidden_BKd = LastLayer(model).run(read_BK, input_ids=tokens_BT, **inputs)
    assert hidden_BKd.shape[:2] == (2, 4)
    return model.lm_head(hidden_BKd).device, [layer.keys.device for layer in cache.layers if layer.is_initialized]


@pytest.mark.parametrize("cached", [False, True])
def test_every_tensor_is_where_it_is_needed(empty_model, cached):
    """Fake tensors know their device and refuse to be mixed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        device, cache_devices = forward_on_two_devices(empty_model, cached, connected=True)
    assert device == TWO[0] and cache_devices == (TWO if cached else [])


def test_a_cache_aims_on_every_device():
    cache = IndexedCache(1, 2, 9)
    cache.aim(torch.tensor([1]), torch.tensor([[3, 4]]), torch.tensor([[True, False]]))
    there = cache.target(torch.device("meta"))
    assert all(x.device.type == "meta" for x in there)
    assert [x.tolist() for x in cache.target(torch.device("cpu"))] == [[1], [3], [0], [0], [1]]


def test_fake_tensors_find_what_is_not(empty_model):
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match="device"):
        forward_on_two_devices(empty_model, cached=False, connected=False)


def test_a_connected_model_gives_the_same(backbone, backbone_folder):
    """Two names of the one device there is here: the hooks run, and nothing changes."""
    cpu = torch.device("cpu")
    model = load_model(backbone_folder, torch.float32)
    connect(model, Placement(cpu, (cpu, torch.device("cpu", 0))))
    row_BT, pad_B = torch.tensor([[5, 9, 40, 41, 17, 50, 51]]), torch.tensor([2])
    for tokens_BT in (row_BT, row_BT.flip(1), row_BT[:, 1:]):
        inputs = padding_inputs(pad_B, tokens_BT.shape[1], padded=True)
        with torch.inference_mode():
            expected = backbone.model(input_ids=tokens_BT, **inputs).logits
            torch.testing.assert_close(model(input_ids=tokens_BT, **inputs).logits, expected)
