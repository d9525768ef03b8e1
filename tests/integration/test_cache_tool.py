"""The cache commands on real directories: list, verify, prune, and import from mlx-lm's tool."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import cache_prompt
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_isolate_engine.cache.build import identify
from mlx_isolate_engine.cache.namespace import namespace_of
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_engine.cache.token_index import token_key
from mlx_isolate_engine.cache.tool import EXIT_DAMAGED, EXIT_OK, EXIT_USAGE, main
from mlx_isolate_shared.config import EngineSettings
from tests.integration.test_ssd_store import filled, many, open_store, put
from tests.running_daemon import run_command

ROOT = Path(__file__).resolve().parents[2]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main([*words, "--json"])
    text = capsys.readouterr().out
    return status, json.loads(text) if text else None


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_help_is_reached_through_the_command_line(tmp_path: Path) -> None:
    done = run_command(tmp_path, "cache", "--help")
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout


def test_ls_shows_entries_most_recent_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = many(open_store(tmp_path), 3)
    status, listed = run(capsys, "ls", "--dir", str(tmp_path))
    assert status == EXIT_OK
    assert [row["file"] for row in listed["entries"]] == [str(p) for p in reversed(paths)]
    assert {row["tokens"] for row in listed["entries"]} == {10}
    assert main(["ls", "--dir", str(tmp_path)]) == EXIT_OK
    assert "3 entries" in capsys.readouterr().out


def test_verify_finds_a_flipped_byte_of_data_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = many(open_store(tmp_path), 2)
    assert run(capsys, "verify", "--dir", str(tmp_path))[0] == EXIT_OK
    damage(bad, bad.stat().st_size - 5000)
    assert main(["verify", "--dir", str(tmp_path)]) == EXIT_DAMAGED
    assert "every byte was checked: 1 whole, 1 damaged" in capsys.readouterr().out
    status, found = run(capsys, "verify", "--dir", str(tmp_path))
    assert status == EXIT_DAMAGED
    assert {row["file"]: bool(row["damage"]) for row in found["entries"]} == {
        str(good): False,
        str(bad): True,
    }
    assert bad.exists()


def test_prune_removes_damage_orphans_the_old_and_what_is_above_the_cap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = many(open_store(tmp_path), 6)
    size = paths[0].stat().st_size
    damage(paths[5], 300)
    old = time.time() - 3 * 86400
    os.utime(paths[4], (old, old))
    orphan = paths[0].parent / f"{'0' * 32}.999999999-1.tmp"
    orphan.write_bytes(b"x")
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    words = ["--max-gb", str(2.5 * size / 1e9), "--older-than", "1"]
    status, report = run(capsys, "prune", "--dir", str(tmp_path), *words)
    assert status == EXIT_OK
    assert report["orphans"] == 1
    assert [p.exists() for p in paths] == [False, False, True, True, False, False]
    assert report["bytes_left"] == 2 * size
    assert foreign.exists()


# The second may not be looked at: too long rather than forbidden, which nothing is to root.
@pytest.mark.parametrize("name", ["no", "x" * 300], ids=["missing", "too long"])
def test_a_missing_directory_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["ls", "--dir", str(tmp_path / name)]) == EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_listing_needs_no_model_library(tmp_path: Path) -> None:
    put(open_store(tmp_path), filled("kv", 5), [1, 2, 3, 4, 5])
    code = (
        "import sys; from mlx_isolate_engine.cache.tool import main; "
        f"status = main(['verify', '--dir', {str(tmp_path)!r}]); "
        "assert not {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules), 'heavy'; sys.exit(status)"
    )
    path = os.pathsep.join(str(ROOT / side) for side in ("engine", "shared"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_folder_is_the_one_that_serve_would_use(tmp_path: Path) -> None:
    (path,) = many(open_store(tmp_path / "ours"), 1)
    file = tmp_path / "c.yaml"
    file.write_text(f"ssd_cache_dir: {tmp_path / 'ours'}")
    done = run_command(tmp_path, "cache", "ls", "--json", "--config", str(file))
    assert done.returncode == EXIT_OK, done.stderr
    assert [row["file"] for row in json.loads(done.stdout)["entries"]] == [str(path)]


NAMESPACE = namespace_of(EngineSettings(), draft=False)
PROMPT = "Tell me what a cache holds."


@pytest.fixture
def made(full_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file made by mlx-lm's own tool from PROMPT."""
    file = tmp_path / "theirs.safetensors"
    words = ["--model", str(full_model), "--prompt", PROMPT, "--prompt-cache-file", str(file)]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.cache_prompt", *words])
    cache_prompt.main()
    return file


def import_words(made: Path, tmp_path: Path, prompt: str = PROMPT) -> list[str]:
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text(prompt)
    words = [str(made), "--prompt-file", str(prompt_file), "--dir", str(tmp_path / "cache")]
    return ["import", *words]


def test_a_file_of_mlx_lms_tool_serves_its_prompt(
    made: Path, full_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    # A directory above the default cap of an engine: how large it may be is not the tool's to say.
    large = tmp_path / "cache" / ("0" * 32) / ("0" * 32) / f"{'0' * 32}.safetensors"
    large.parent.mkdir(parents=True)
    large.touch()
    os.truncate(large, 33_000_000_000)
    status, report = run(capsys, *import_words(made, tmp_path))
    assert status == EXIT_OK
    assert large.exists()
    (row,) = report["entries"]
    identity = identify(EngineSettings(), full_model)
    assert row["fingerprint"] == identity.value
    assert row["namespace"] == NAMESPACE
    store = SsdStore(
        tmp_path / "cache",
        StoreIdentity(
            model="m", model_id="m", fingerprint=identity.value, tokenizer=identity.tokenizer
        ),
        bytes_max=1 << 30,
        verify=True,
    )
    store.open()
    from mlx_lm.utils import load_tokenizer

    tokenizer: Any = load_tokenizer(full_model)
    message = [{"role": "user", "content": PROMPT}]
    tokens = tokenizer.apply_chat_template(
        message, add_generation_prompt=False, continue_final_message=True
    )
    prompt = [*tokens, 65, 66]
    found = store.find(NAMESPACE, token_key(prompt), length_max=len(prompt) - 1)
    assert found is not None and found.length == len(tokens)
    steps = store.restore(found, room_for=len(prompt))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            restored = end.value
            break
    model, _ = load_model(full_model)
    cold = make_prompt_cache(model)
    model(mx.array([tokens]), cache=cold)
    rest = mx.array([prompt[len(tokens) :]])
    assert mx.allclose(model(rest, cache=restored), model(rest, cache=cold), atol=1e-4).item()


@pytest.mark.parametrize("change", ["prompt", "model", "file"])
def test_what_does_not_belong_together_is_refused(
    change: str, made: Path, tmp_path: Path, sliding_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = import_words(made, tmp_path, PROMPT if change != "prompt" else "Something else")
    if change == "model":
        words += ["--model", str(sliding_model)]
    if change == "file":
        made.write_bytes(b"no safetensors")
    capsys.readouterr()
    assert main(words) == EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
