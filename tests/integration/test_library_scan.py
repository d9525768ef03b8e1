"""Importing transformers the quick way gives what importing it plainly gives."""

import json
import subprocess
import sys
from typing import Any

import pytest

from mlx_isolate_engine.model.library_scan import last_declaration

SCRIPT = """
import collections, json, sys
if sys.argv[1] == "quick":
    from mlx_isolate_engine.model.library_scan import speed_up_transformers
    speed_up_transformers()
reads = collections.Counter()
def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".py"):
        reads[arguments[0]] += 1
sys.addaudithook(watch)
import transformers
from transformers import AutoTokenizer, models
reads = {file: count for file, count in reads.items() if "/transformers/models/" in str(file)}
names = {
    module.__name__: sorted(map(str, module._class_to_module.items()))
    for module in (transformers, models)
}
print(json.dumps({"names": names, "reads": sum(reads.values()), "files": len(reads)}))
"""


def imported(how: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_every_name_is_found_and_hardly_any_source_is_read_twice() -> None:
    plain, quick = imported("plain"), imported("quick")
    assert quick["names"] == plain["names"] and len(quick["names"]["transformers"]) > 1000
    assert quick["files"] == plain["files"] > 1000
    # The few more are those of the package that is imported, to be run.
    assert quick["reads"] < 1.1 * quick["files"]


@pytest.mark.parametrize(
    ("source", "end"),
    [
        ("", ""),
        ("x = 1\n", "x = 1\n"),
        ('__all__ = ["a"]\n', '__all__ = ["a"]\n'),
        ('import a\n\n__all__ = [\n    "a",\n]\n', '__all__ = [\n    "a",\n]\n'),
        ('__all__ = ["a"]\nx = 1\n__all__ = ["b"]', '__all__ = ["b"]'),
        ("x = 1\n    __all__ = []\n", "x = 1\n    __all__ = []\n"),
    ],
)
def test_the_last_declaration_counts(source: str, end: str) -> None:
    assert last_declaration(source) == end
