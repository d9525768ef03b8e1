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


# What a start waits for: modules of libraries, and lines of our own; at most a tenth above what it
# is. A library that creeps in stands out, whatever machine this runs on, and so does code of ours
# that others need; into how many files ours is parted does not count.
STARTS = {
    "mlx_isolate_supervisor.cli": (3, 105),
    "mlx_isolate_supervisor.subcommands": (17, 540),
    "mlx_isolate_supervisor.commands.status": (16, 2_400),
    "mlx_isolate_supervisor.app": (128, 17_600),
    "mlx_isolate_engine.start": (3, 260),
    "mlx_isolate_engine.app": (133, 5_800),
}
# Each of these is loaded by those who use it, when they do.
LATE = {"huggingface_hub", "prometheus_client", "psutil", "rich", "yaml", "mlx", "numpy"}
OURS = {Path(folder).name for folder in SIDES.values()}


@pytest.mark.parametrize("entry", sorted(STARTS))
def test_a_start_loads_no_more_than_it_needs(entry: str) -> None:
    script = (
        f"import json, sys\nimport {entry}\n"
        "files = {name: getattr(one, '__file__', None) for name, one in sys.modules.items()}\n"
        "print(json.dumps(files))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    files: dict[str, str | None] = json.loads(done.stdout)
    packages = {name: name.partition(".")[0] for name in files}
    libraries = [n for n, top in packages.items() if top not in sys.stdlib_module_names | OURS]
    ours = [Path(file) for n, file in files.items() if file and packages[n] in OURS]
    modules_max, lines_max = STARTS[entry]
    assert not LATE & {packages[name] for name in libraries}
    assert len(libraries) <= modules_max, sorted(libraries)
    assert sum(len(path.read_text().splitlines()) for path in ours) <= lines_max, sorted(ours)


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
