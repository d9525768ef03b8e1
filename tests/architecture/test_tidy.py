"""The tree lints itself: sizes, names, what may be tracked, and what the prose may mention."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.generated import ROOT, first_sentence

ROOT_ALLOWED = {
    ".ci",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "bench",
    "constraints.txt",
    "docs",
    "engine",
    "pyproject.toml",
    "shared",
    "supervisor",
    "tests",
}
FILE_LINES_MAX = 650
FUNCTION_LINES_MAX = 70
TRACKED_BYTES_MAX = 1_000_000
BANNED_MODULE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc", "mixins"}
# Machine-local or dated facts that have no place in a repository.
BANNED_TEXT = re.compile(
    r"/wor[k]/|/roo[t]/|/hom[e]/[a-z]+/|\bdesign\.m[d]\b|public-report[s]|files\.pythonhoste[d]"
    r"|pypi\.or[g]/simple"
)


def tracked() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=30,
    ).stdout.decode()
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


PYTHON = [path for path in tracked() if path.suffix == ".py"]


def test_root_holds_only_what_is_on_the_list() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= ROOT_ALLOWED


def test_nothing_tracked_is_binary_or_large() -> None:
    for path in tracked():
        data = path.read_bytes()
        assert len(data) <= TRACKED_BYTES_MAX, path
        assert b"\0" not in data, f"{path} is binary"


def test_nothing_tracked_names_a_machine() -> None:
    for path in tracked():
        found = BANNED_TEXT.search(path.read_text(errors="replace"))
        assert not found, f"{path}: {found.group() if found else ''}"


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_file_is_habitable(path: Path) -> None:
    text = path.read_text()
    assert path.stem not in BANNED_MODULE_NAMES
    assert len(text.splitlines()) <= FILE_LINES_MAX
    sentence = first_sentence(path)
    assert sentence, "a file says its purpose in its docstring"
    assert sentence[-1] in ".:", sentence
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"


def test_init_files_hold_one_docstring() -> None:
    for path in PYTHON:
        if path.name == "__init__.py":
            assert len(ast.parse(path.read_text()).body) == 1, path


@pytest.mark.parametrize(
    "path", [path for path in PYTHON if path.parent.name == "bench"], ids=lambda path: path.name
)
def test_each_flag_of_a_bench_says_what_it_is(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            assert "help" in {word.arg for word in node.keywords}, ast.unparse(node)
