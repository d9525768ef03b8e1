"""The demo's conversion under kills, a full disk, company and damage, on a tiny source."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_isolate_engine.model import demo_convert, demo_weights
from mlx_isolate_engine.model.demo import demo_folder, ensure_demo
from mlx_isolate_engine.model.demo_files import damaged_files, is_complete
from mlx_isolate_engine.model.demo_source import DemoSource
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_shared.wire import Loading
from tests.material.gguf_model import SHAPE, quiet, tensors

pytest.importorskip("gguf", reason="the demo extra is not installed (pip install -e '.[demo]')")


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def run_child(program: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=170,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def test_converted_weights_are_the_sources(tmp_path: Path, source: DemoSource) -> None:
    import mlx.core as mx

    folder = ensure_demo(tmp_path, "float32", quiet, source)
    weights: dict[str, Any] = {}
    for path in folder.glob("model*.safetensors"):
        loaded: Any = mx.load(str(path))
        weights |= loaded
    values = tensors()
    norm = np.array(weights["model.layers.3.input_layernorm.weight"])
    assert np.array_equal(norm, values["blk.3.attn_norm.weight"] - np.float32(1))
    # Q8_0 keeps a value within half a step, a 254th of the largest in its block of 32.
    embedding = np.array(weights["model.embed_tokens.weight"])
    assert np.abs(embedding - values["token_embd.weight"]).max() < 0.003
    assert len(weights) == 2 + 13 * SHAPE.layers


def test_bfloat16_is_the_nearest_to_float32(tmp_path: Path, source: DemoSource) -> None:
    import mlx.core as mx

    name = "model-00001-of-00004.safetensors"
    loaded: list[Any] = [
        mx.load(str(ensure_demo(tmp_path, dtype, quiet, source) / name))
        for dtype in ("float32", "bfloat16")
    ]
    wide, narrow = (weights["model.embed_tokens.weight"] for weights in loaded)
    assert mx.array_equal(wide.astype(mx.bfloat16), narrow)


def test_progress_rises_to_one(tmp_path: Path, source: DemoSource) -> None:
    lines: list[Loading] = []
    ensure_demo(tmp_path, "float32", lines.append, source)
    fractions = [line.fraction for line in lines if line.fraction is not None]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert {line.stage for line in lines} == {"convert"}


def test_finished_folder_is_used_as_it_is(tmp_path: Path, source: DemoSource) -> None:
    folder = ensure_demo(tmp_path, "float32", quiet, source)
    lines: list[Loading] = []
    assert ensure_demo(tmp_path, "float32", lines.append, source) == folder
    assert lines == []


def test_nothing_is_left_beside_the_finished_folder(tmp_path: Path, source: DemoSource) -> None:
    folder = ensure_demo(tmp_path, "float32", quiet, source)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["convert.lock", folder.name]
    listed = {*manifest(folder)["files"], "manifest.json"}
    assert {path.name for path in folder.iterdir()} == listed


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_weights(folder: Path) -> None:
    cut(folder / "model-00002-of-00004.safetensors")


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def change_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def change_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def tear_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    "damage", [cut_weights, remove_tokenizer, change_config, change_manifest, tear_manifest]
)
def test_damaged_folder_is_converted_anew(
    tmp_path: Path, source: DemoSource, damage: Callable[[Path], object]
) -> None:
    folder = ensure_demo(tmp_path, "float32", quiet, source)
    before = manifest(folder)
    damage(folder)
    assert not is_complete(folder, source.sha256)
    ensure_demo(tmp_path, "float32", quiet, source)
    assert manifest(folder) == before
    assert damaged_files(folder, source.sha256) == []


KILLER = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import numpy, gguf, gguf.quants
from mlx_isolate_engine.model import demo
from mlx_isolate_engine.model.demo import demo_folder, ensure_demo
from mlx_isolate_engine.model.demo_files import damaged_files
from tests.material.gguf_model import tiny_source

demo.check_installed = lambda: None
source = tiny_source(Path(sys.argv[1]))
home = Path(sys.argv[2])
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}

def convert(into, fatal):
    '''Convert in a child that is killed at its file operation number `fatal`; its end.'''
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0
    def hook(event, arguments):
        nonlocal count
        if event in FILE_EVENTS and str(arguments[0]).startswith(str(into)):
            count += 1
            if count == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    ensure_demo(into, "float32", lambda _: None, source)
    os._exit(0)

whole = home / "whole"
assert convert(whole, 0) == 0
wanted = (demo_folder(whole, "float32", source) / "manifest.json").read_text()
step = int(sys.argv[3])
point, kills = 1 - step, 0
while True:
    point += step
    into = home / f"killed-{point}"
    if convert(into, point) == 0:
        break
    kills += 1
    # Killed a second time, later, in the resumed conversion; then left alone.
    convert(into, point // 2 + 3)
    assert convert(into, 0) == 0, point
    folder = demo_folder(into, "float32", source)
    assert (folder / "manifest.json").read_text() == wanted, point
    assert damaged_files(folder, source.sha256) == [], point
    names = sorted(path.name for path in folder.parent.iterdir())
    assert names == ["convert.lock", folder.name], (point, names)
print(json.dumps({"kills": kills}))
"""


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_at_every_file_operation_resumes_to_the_same_bytes(
    tmp_path: Path, source_file: Path, step: int
) -> None:
    done = run_child(KILLER, source_file, tmp_path, step)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] > 60 // step


def test_resumed_conversion_keeps_finished_pieces(
    tmp_path: Path, source: DemoSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write_shard: Callable[..., str] = demo_weights.write_shard

    def failing(path: Path, *arguments: Any) -> str:
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt
        return write_shard(path, *arguments)

    monkeypatch.setattr(demo_weights, "write_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        ensure_demo(tmp_path, "float32", quiet, source)
    ensure_demo(tmp_path, "float32", quiet, source)
    names = [f"model-0000{number}-of-00004.safetensors.tmp" for number in (1, 2, 3, 3, 4)]
    assert written == names


def test_flipped_piece_is_not_resumed(
    tmp_path: Path, source: DemoSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ensure_demo(tmp_path / "whole", "float32", quiet, source)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_convert, "_publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ensure_demo(tmp_path, "float32", quiet, source)
    work = demo_convert.work_folder(demo_folder(tmp_path, "float32", source))
    (work / "manifest.json").unlink()
    piece = work / "model-00002-of-00004.safetensors"
    content = bytearray(piece.read_bytes())
    content[-5] ^= 1
    piece.write_bytes(content)
    folder = ensure_demo(tmp_path, "float32", quiet, source)
    assert manifest(folder) == manifest(whole)
    assert damaged_files(folder, source.sha256) == []


def test_too_little_space_is_refused_before_any_work(
    tmp_path: Path, source: DemoSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)

    def nearly_full(_: Path) -> object:
        return usage._replace(free=1_000_000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    with pytest.raises(ModelError) as refused:
        ensure_demo(tmp_path, "float32", quiet, source)
    assert refused.value.code == "disk_full"
    assert not refused.value.is_permanent
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["convert.lock"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from mlx_isolate_engine.model import demo
from mlx_isolate_engine.model.errors import ModelError
from tests.material.gguf_model import tiny_source
demo.check_installed = lambda: None
source = tiny_source(Path(sys.argv[1]))
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    demo.ensure_demo(Path(sys.argv[2]), "float32", lambda _: None, source)
except ModelError as error:
    print(error.code, error.message)
"""


@pytest.mark.parametrize("limit", [1000, 400_000], ids=["assembling", "weights"])
def test_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, source_file: Path, limit: int
) -> None:
    # The limit on a file's size stands in for the disk: both end a write with OSError.
    done = run_child(FULL_DISK, source_file, tmp_path, limit)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("disk_full the disk is full: ")
    assert done.stdout.count("\n") == 1
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["convert.lock"]


def test_what_dead_conversions_left_is_removed(tmp_path: Path, source: DemoSource) -> None:
    home = tmp_path / "demo"
    for name in ("tiny-bfloat16.work", "older-name.work", "tiny-float32.old"):
        (home / name).mkdir(parents=True)
        (home / name / "model-00001-of-00004.safetensors.tmp").write_bytes(b"torn")
    folder = ensure_demo(tmp_path, "float32", quiet, source)
    assert sorted(path.name for path in home.iterdir()) == ["convert.lock", folder.name]


COMPANY = """
import sys
from pathlib import Path
from mlx_isolate_engine.model import demo, demo_convert, demo_weights
from tests.material.gguf_model import tiny_source
demo.check_installed = lambda: None
source = tiny_source(Path(sys.argv[1]))
convert = demo.convert
def counted(*arguments):
    print("converts", flush=True)
    convert(*arguments)
demo.convert = counted
print("ready", flush=True)
sys.stdin.readline()
print(demo.ensure_demo(Path(sys.argv[2]), "float32", lambda line: None, source), flush=True)
"""


def test_engines_at_once_convert_once(tmp_path: Path, source_file: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", COMPANY, str(source_file), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=environment,
        )
        for _ in range(3)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        outputs = [child.communicate("\n", timeout=60)[0].splitlines() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert sorted(len(lines) for lines in outputs) == [1, 1, 2]
    assert {lines[-1] for lines in outputs} == {str(tmp_path / "demo" / "tiny-float32")}
