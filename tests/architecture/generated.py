"""Writes the pages that are generated from code, so that they cannot drift from it.

`python -m tests.architecture.generated` rewrites them all; a test holds that nothing would change.
"""

import ast
import json
from pathlib import Path

from mlx_isolate_engine.protocols.openapi import openapi_document
from mlx_isolate_supervisor.settings import page
from tests.architecture import cases, conformance, lifecycle_page

ROOT = Path(__file__).resolve().parents[2]
SIDES = {
    "supervisor": "supervisor/mlx_isolate_supervisor",
    "engine": "engine/mlx_isolate_engine",
    "shared": "shared/mlx_isolate_shared",
}
BEGIN = "<!-- files: generated from the docstrings by `python -m tests.architecture.generated` -->"
END = "<!-- end of files -->"


def first_sentence(path: Path) -> str:
    """The docstring's first paragraph of a module, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def file_map() -> str:
    """One heading a side, one line a module with its docstring's first paragraph."""
    lines = [BEGIN, ""]
    for side, folder in SIDES.items():
        lines += [f"### {side}", ""]
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines.append(f"- `{path.relative_to(ROOT / folder)}`: {first_sentence(path)}")
        lines.append("")
    return "\n".join([*lines, END])


def architecture_page(current: str) -> str:
    """`docs/architecture.md` with its file list brought up to date."""
    head, _, rest = current.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + file_map() + tail


def openapi_text() -> str:
    """The OpenAPI document that the supervisor serves; it may not import the engine to make it."""
    return json.dumps(openapi_document(), indent=1, sort_keys=True) + "\n"


def pages() -> dict[Path, str]:
    """Every generated page with the text it should have."""
    architecture = ROOT / "docs/architecture.md"
    reliability = ROOT / "docs/reliability.md"
    return {
        architecture: architecture_page(architecture.read_text()),
        ROOT / "docs/lifecycle.md": lifecycle_page.page(),
        ROOT / "docs/configuration.md": page.document(),
        ROOT / "supervisor/mlx_isolate_supervisor/openapi.json": openapi_text(),
        ROOT / "docs/conformance.md": conformance.page(),
        reliability: cases.page(reliability.read_text()),
        ROOT / "docs/config.schema.json": page.schema_text(),
    }


def main() -> None:
    """Rewrite what is out of date and say so."""
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
