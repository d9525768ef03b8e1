"""Imports point one way: supervisor and engine know shared, never each other."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.generated import ROOT, SIDES

FORBIDDEN = {
    "supervisor": {"mlx", "mlx_lm", "transformers", "numpy", "mlx_isolate_engine"},
    "engine": {"mlx_isolate_supervisor"},
    "shared": {"mlx_isolate_supervisor", "mlx_isolate_engine"},
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{path}: relative import")


@pytest.mark.parametrize("side", SIDES)
def test_imports_point_one_way(side: str) -> None:
    for path in (ROOT / SIDES[side]).rglob("*.py"):
        wrong = set(imported(path)) & FORBIDDEN[side]
        assert not wrong, f"{path} imports {wrong}"


def test_shared_imports_only_the_standard_library_and_msgspec() -> None:
    allowed = set(sys.stdlib_module_names) | {"msgspec", "mlx_isolate_shared"}
    for path in (ROOT / SIDES["shared"]).rglob("*.py"):
        assert set(imported(path)) <= allowed, path


# What a start waits for, in modules that are not the standard library's, a tenth above what it
# is: a library that creeps in stands out, whatever machine this runs on.
STARTS = {
    "mlx_isolate_supervisor.cli": 28,
    "mlx_isolate_supervisor.commands.status": 39,
    "mlx_isolate_supervisor.app": 242,
    "mlx_isolate_engine.start": 8,
    "mlx_isolate_engine.app": 182,
}
# Each of these is loaded by those who use it, when they do.
LATE = {"huggingface_hub", "prometheus_client", "psutil", "rich", "yaml", "mlx", "numpy"}


@pytest.mark.parametrize("entry", sorted(STARTS))
def test_a_start_loads_no_more_than_it_needs(entry: str) -> None:
    script = f"import json, sys\nimport {entry}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = [name.partition(".")[0] for name in json.loads(done.stdout)]
    others = [name for name in loaded if name not in sys.stdlib_module_names]
    assert not LATE & set(others)
    assert len(others) <= STARTS[entry], sorted(set(others))


def test_the_whole_supervisor_loads_no_model_library() -> None:
    folder = ROOT / SIDES["supervisor"]
    modules = [
        ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts))
        for path in sorted(folder.rglob("*.py"))
        if path.stem not in {"__main__", "__init__"}
    ]
    script = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
