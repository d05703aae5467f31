"""The import law, names that shadow nothing, and every config composes."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("tasks", "backbones", "routers", "infer", "trace_gen", "train", "eval")
MAY_IMPORT = {
    "tasks": set(),
    "backbones": set(),
    "routers": set(),
    "infer": {"backbones", "routers"},
    "trace_gen": {"infer", "backbones", "tasks"},
    "train": {"trace_gen", "routers", "backbones", "tasks"},
    "eval": {"infer", "backbones", "tasks"},
}


def modules(room):
    return sorted((ROOT / room).rglob("*.py"))


def imports(file):
    """Dotted names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
    for file in modules(room):
        for name in imports(file):
            top = name.split(".")[0]
            assert top not in ROOMS or top == room or top in MAY_IMPORT[room], f"{file} imports {name}"


def test_no_cycles():
    graph = {}
    for room in ROOMS:
        for file in modules(room):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            graph[name] = {n for n in imports(file) if n.split(".")[0] in ROOMS}
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name in done or name not in graph:
            return
        for other in graph[name]:
            visit(other, [*path, name])
        done.add(name)

    for name in graph:
        visit(name, [])


def test_routers_need_only_torch_and_safetensors():
    allowed = {"torch", "safetensors", "routers"} | set(sys.stdlib_module_names)
    for file in modules("routers"):
        assert {n.split(".")[0] for n in imports(file)} <= allowed, file


def test_names_shadow_nothing():
    """A script's own folder is sys.path[0]: a module there must not be named as one of somebody else's."""
    taken = set(sys.stdlib_module_names) | set(packages_distributions())
    for room in ROOMS:
        for entry in (ROOT / room).iterdir():
            if entry.suffix == ".py" or (entry / "__init__.py").exists():
                assert entry.stem not in taken or entry.stem == "__init__", entry


def test_no_pickle_and_no_remote_code():
    """One adapter may run a checkpoint's code, and its config does not, as it stands."""
    remote = ROOT / "backbones" / "hf_remote.py"
    for room in (*ROOMS, "conf"):
        for file in modules(room):
            text = file.read_text()
            assert "pickle" not in {n.split(".")[0] for n in imports(file)}, file
            assert "trust_remote_code" not in text or file == remote, file
    configs = {f: f.read_text() for f in (ROOT / "conf").rglob("*.yaml")}
    assert [f.stem for f, text in configs.items() if "trust_remote_code" in text] == ["hf_remote"]
    assert "trust_remote_code: false" in configs[ROOT / "conf" / "backbone" / "hf_remote.yaml"]


CONFIGS = sorted(p.stem for p in (ROOT / "conf").glob("*.yaml"))
GROUPS = sorted(
    (folder.name, file.stem)
    for folder in (ROOT / "conf").iterdir()
    if folder.is_dir()
    for file in folder.glob("*.yaml")
)


@pytest.mark.parametrize("config", CONFIGS)
def test_configs_compose(config):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose(config)


@pytest.mark.parametrize(("group", "option"), GROUPS)
def test_every_option_composes(group, option):
    config = {"trainer": "train_lps", "logger": "train_lps", "trace": "train_lps"}.get(group, "compare")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(config, overrides=[f"{group}={option}"])
    if group == "method":
        assert cfg.method.name == option
        head = (ROOT / "conf" / "method" / f"{option}.yaml").read_text().splitlines()
        assert any(line.startswith("# Source:") for line in head), "a method names its source"


def test_long_files_and_catch_alls():
    for room in ROOMS:
        for file in modules(room):
            assert file.name != "utils.py"
            assert len(file.read_text().splitlines()) <= 320, file
