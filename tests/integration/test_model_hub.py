"""MODEL as a hub repo id: download with progress, the cache, and one sentence per failure.

The library reads its HF_* variables when it is imported, so each case is a process of its own.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.model.hub import FILE_PATTERNS
from tests.material.fake_hub import COMMIT, FakeHub, fake_hub
from tests.material.models import ModelSpec, build_model

RESOLVE = """
import json, sys
from pathlib import Path
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.resolve import resolve_model
for model in sys.argv[2:]:
    lines = []
    result = {"lines": lines}
    try:
        report = lambda line: lines.append([line.stage, line.fraction, line.detail])
        result["folder"] = str(resolve_model(model, Path(sys.argv[1]), report))
    except ModelError as error:
        result |= {"code": error.code, "message": error.message, "permanent": error.is_permanent}
    print(json.dumps(result))
"""


@dataclass
class Outcome:
    folder: Path | None
    code: str | None
    message: str
    permanent: bool | None
    lines: list[tuple[str, float | None, str]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    folder = build_model(tmp_path / "upstream", ModelSpec(kind="full", shards=3))
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    with fake_hub(FakeHub(repos={"someone/tiny": folder})) as running:
        yield running


def resolve(model: str, tmp_path: Path, url: str, **variables: str) -> Outcome:
    return resolve_all([model], tmp_path, url, **variables)[0]


def resolve_all(models: list[str], tmp_path: Path, url: str, **variables: str) -> list[Outcome]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    home = {"HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path), "HF_ENDPOINT": url}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, str(tmp_path / "cache"), *models],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env=kept | home | {"PYTHONPATH": paths} | variables,
    )
    assert done.returncode == 0, done.stderr
    return [_outcome(json.loads(line)) for line in done.stdout.splitlines()]


def _outcome(result: dict[str, Any]) -> Outcome:
    return Outcome(
        folder=Path(result["folder"]) if "folder" in result else None,
        code=result.get("code"),
        message=result.get("message", ""),
        permanent=result.get("permanent"),
        lines=[tuple(line) for line in result["lines"]],
    )


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_the_files_are_those_that_mlx_lm_downloads() -> None:
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    assert FILE_PATTERNS == DEFAULT_ALLOW_PATTERNS


def test_repo_is_downloaded_with_progress(tmp_path: Path, hub: FakeHub) -> None:
    outcome = resolve("someone/tiny", tmp_path, hub.url)
    assert outcome.folder is not None, outcome.message
    assert outcome.folder.name == COMMIT
    assert (outcome.folder / "model-00003-of-00003.safetensors").is_file()
    assert not (outcome.folder / "pytorch_model.bin").exists()
    fractions = [fraction for stage, fraction, _ in outcome.lines if stage == "download"]
    assert fractions[0] is None
    assert fractions[-1] == 1.0


def test_cached_repo_is_served_without_asking_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    first = resolve("someone/tiny", tmp_path, hub.url)
    hub.requests.clear()
    again = resolve("someone/tiny", tmp_path, hub.url)
    assert again.folder == first.folder
    assert hub.requests == []


def test_cached_repo_is_served_offline(tmp_path: Path, hub: FakeHub) -> None:
    first = resolve("someone/tiny", tmp_path, hub.url)
    again = resolve("someone/tiny", tmp_path, closed_port(), HF_HUB_OFFLINE="1")
    assert again.folder == first.folder


def test_incomplete_cache_is_completed(tmp_path: Path, hub: FakeHub) -> None:
    first = resolve("someone/tiny", tmp_path, hub.url)
    assert first.folder is not None
    gone = first.folder / "model-00002-of-00003.safetensors"
    gone.resolve().unlink()
    gone.unlink()
    again = resolve("someone/tiny", tmp_path, hub.url)
    assert again.folder == first.folder
    assert gone.is_file()


def test_offline_without_a_copy_says_so(tmp_path: Path, hub: FakeHub) -> None:
    outcome = resolve("someone/tiny", tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert (outcome.code, outcome.permanent) == ("model_offline", True)
    assert "HF_HUB_OFFLINE" in outcome.message
    assert hub.requests == []


def test_unreachable_hub_may_be_tried_again(tmp_path: Path) -> None:
    outcome = resolve("someone/tiny", tmp_path, closed_port())
    assert (outcome.code, outcome.permanent) == ("model_download", False)
    # What was meant may be a folder, mistyped.
    assert outcome.message.startswith("there is no folder someone/tiny, and the hub cannot be")
    assert "\n" not in outcome.message


def test_unknown_repo_is_named(tmp_path: Path, hub: FakeHub) -> None:
    outcome = resolve("someone/nothing", tmp_path, hub.url)
    assert (outcome.code, outcome.permanent) == ("model_missing", True)
    assert "someone/nothing" in outcome.message


def test_impossible_repo_ids_are_refused_without_the_network(tmp_path: Path, hub: FakeHub) -> None:
    names = ["a/b/c", "white space", "-dash/..", "x" * 200, "model.gguf"]
    outcomes = resolve_all(names, tmp_path, hub.url)
    assert [outcome.code for outcome in outcomes] == ["model_missing"] * len(names)
    assert hub.requests == []


def test_gated_repo_says_what_to_do(tmp_path: Path, hub: FakeHub) -> None:
    hub.refuse = (403, "GatedRepo")
    outcome = resolve("someone/tiny", tmp_path, hub.url)
    assert (outcome.code, outcome.permanent) == ("model_gated", True)
    assert "HF_TOKEN" in outcome.message


def test_hub_in_trouble_may_be_tried_again(tmp_path: Path, hub: FakeHub) -> None:
    hub.refuse = (503, "")
    outcome = resolve("someone/tiny", tmp_path, hub.url)
    assert (outcome.code, outcome.permanent) == ("model_download", False)


def test_repo_without_weights_is_broken(tmp_path: Path, hub: FakeHub) -> None:
    for path in hub.repos["someone/tiny"].glob("*.safetensors"):
        path.unlink()
    hub.repos["someone/GGUF"] = tmp_path / "gguf"
    hub.repos["someone/GGUF"].mkdir()
    (hub.repos["someone/GGUF"] / "m.gguf").write_bytes(b"GGUF")
    for outcome in resolve_all(["someone/tiny", "someone/GGUF"], tmp_path, hub.url):
        assert (outcome.code, outcome.permanent) == ("model_broken", True)
        assert (
            "holds no model*.safetensors, and GGUF and PyTorch's files are not" in outcome.message
        )


def test_folder_never_touches_the_network(tmp_path: Path, hub: FakeHub) -> None:
    folder = hub.repos["someone/tiny"]
    assert resolve(str(folder), tmp_path, hub.url).folder == folder
    assert hub.requests == []


def test_missing_folder_is_not_taken_for_a_repo(tmp_path: Path, hub: FakeHub) -> None:
    outcome = resolve(str(tmp_path / "nowhere"), tmp_path, hub.url)
    assert outcome.code == "model_missing"
    assert "does not exist" in outcome.message
    assert hub.requests == []
