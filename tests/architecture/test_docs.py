"""The docs say what the code does: generated pages, the docs map, promises that name their tests."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from mlx_isolate_supervisor.relay.target import WORK_PATHS
from tests.architecture import cases, generated
from tests.architecture.generated import ROOT

NODE_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def test_generated_pages_are_up_to_date() -> None:
    for path, text in generated.pages().items():
        assert path.read_text() == text, (
            f"{path.relative_to(ROOT)}: run python -m tests.architecture.generated"
        )


def test_every_page_is_on_the_docs_map() -> None:
    index = (ROOT / "docs/architecture.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "architecture.md":
            assert str(page.relative_to(ROOT / "docs")) in index, page


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")))
def test_named_tests_exist(page: Path) -> None:
    for file, name in NODE_ID.findall(page.read_text()):
        path = ROOT / file
        assert path.exists(), f"{page.name} names {file}"
        names = {
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in names, f"{page.name} names {file}::{name}"


def test_each_promise_names_its_test() -> None:
    rows = [
        line
        for line in (ROOT / "docs/behaviour.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| promise", "|---", "| ---"))
    ]
    assert rows
    for row in rows:
        assert NODE_ID.search(row), f"no test named in: {row}"


def test_each_code_of_an_error_is_explained() -> None:
    sources = [
        path for side in ("shared", "engine", "supervisor") for path in ROOT.glob(f"{side}/**/*.py")
    ]
    raised = {code for path in sources for code in re.findall(r'code="(\w+)"', path.read_text())}
    table = page_text("operations.md").partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    told = {code for row in rows for code in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert raised <= told
    assert told - raised == {"circuit_open", "model_failed", "not_found", "method_not_allowed"}


def test_each_endpoint_is_told() -> None:
    pages = page_text("operations.md") + page_text("observability.md")
    sources = (ROOT / "supervisor/mlx_isolate_supervisor/pages").glob("*.py")
    route = re.compile(r'\b(?:add_)?(?:get|post|delete)\(\s*"(/[^"{]*)')
    endpoints = {path for one in sources for path in route.findall(one.read_text())} | WORK_PATHS
    assert [path for path in sorted(endpoints) if f"`{path}" not in pages] == []


def test_each_reported_case_has_a_test_and_no_test_an_unknown_case() -> None:
    assert set(cases.held()) == set(cases.SYMPTOMS)


def test_the_list_of_dependencies_is_that_of_the_project_at_its_pinned_versions() -> None:
    table = dict(
        re.findall(r"^\| ([a-z0-9-]+) \| (\S+) \|", page_text("dependencies.md"), re.MULTILINE)
    )
    pinned = {
        normalized(name): version
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
        )
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert normalized(name[0]) in table, requirement
    for name, version in table.items():
        assert pinned.get(name, version) == version, name


def page_text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def normalized(name: str) -> str:
    """A package's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
