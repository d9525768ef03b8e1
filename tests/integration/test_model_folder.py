"""Broken model folders: each is refused before anything heavy, naming the file at fault."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.folder import check_folder
from tests.material.models import ModelSpec, build_model

SHARDED = ModelSpec(kind="full", shards=3)
SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_model(tmp_path / "model", SHARDED)


def test_whole_folder_is_described(folder: Path) -> None:
    files = check_folder(folder)
    assert files.config["model_type"] == "llama"
    assert len(files.weights) == 3
    assert files.weights_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def torn_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


def binary_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def deep_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)


def listed_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def typeless_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 64}')


def numbered_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": 7}')


def missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def index_names_more(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.weight"] = "model-00004-of-00004.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def index_leaves_the_folder(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text("{}")


def torn_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {')


def cut_weights(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1)


def cut_header(folder: Path) -> None:
    os.truncate(folder / SECOND, 20)


def empty_weights(folder: Path) -> None:
    os.truncate(folder / SECOND, 0)


def longer_weights(folder: Path) -> None:
    with (folder / SECOND).open("ab") as file:
        file.write(b"more")


def lying_header_length(folder: Path) -> None:
    content = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes((1 << 62).to_bytes(8, "little") + content[8:])


def header_of_text(folder: Path) -> None:
    (folder / SECOND).write_bytes((4).to_bytes(8, "little") + b"[{}]")


def pointer_file(folder: Path) -> None:
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def no_weights(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()


def weights_of_pytorch(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def pipe_for_weights(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)


def pipe_for_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def more_layers_than_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 10**9
    (folder / "config.json").write_text(json.dumps(config))


def more_layers_in_a_part(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = {"num_hidden_layers": 10**9}
    (folder / "config.json").write_text(json.dumps(config))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (no_config, "no config.json"),
    (torn_config, "config.json is not valid JSON"),
    (binary_config, "config.json is not valid JSON"),
    (deep_config, "config.json is not valid JSON"),
    (listed_config, "config.json does not hold a JSON object"),
    (typeless_config, "model_type"),
    (numbered_type, "model_type"),
    (missing_shard, SECOND),
    (index_names_more, "model-00004-of-00004"),
    (index_leaves_the_folder, "lacks 1 of the weight files"),
    (empty_index, "weight_map"),
    (torn_index, INDEX),
    (cut_weights, f"{SECOND} is cut off"),
    (cut_header, SECOND),
    (empty_weights, SECOND),
    (longer_weights, SECOND),
    (lying_header_length, SECOND),
    (header_of_text, SECOND),
    (pointer_file, f"{SECOND} is a pointer of Git LFS"),
    (no_weights, "no model*.safetensors file."),
    (weights_of_pytorch, "PyTorch's .bin files are not read"),
    (no_tokenizer, "holds no tokenizer"),
    (pipe_for_weights, f"{SECOND} is neither a file nor a folder"),
    (pipe_for_a_tokenizer, "tokenizer.json is neither a file nor a folder"),
    (more_layers_than_weights, "more layers than there are weights"),
    (more_layers_in_a_part, "more layers than there are weights"),
]


@pytest.mark.parametrize(
    ("damage", "named"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES]
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], named: str) -> None:
    damage(folder)
    with pytest.raises(ModelError) as caught:
        check_folder(folder)
    assert caught.value.code == "model_broken"
    assert caught.value.is_permanent
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist") as caught:
        check_folder(tmp_path / "nowhere")
    assert caught.value.code == "model_missing"


def test_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="name the folder"):
        check_folder(folder / "config.json")


def test_gguf_folder_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="GGUF file alone cannot be served"):
        check_folder(tmp_path)


def test_link_that_leads_nowhere_is_missing(folder: Path) -> None:
    # As in a hub cache whose blob was removed.
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / "blob")
    with pytest.raises(ModelError) as caught:
        check_folder(folder)
    assert SECOND in caught.value.message or "blob" in caught.value.message


@pytest.mark.skipif(os.getuid() == 0, reason="root reads every file")
def test_unreadable_file_is_named(folder: Path) -> None:
    (folder / SECOND).chmod(0)
    with pytest.raises(ModelError, match="Permission denied") as caught:
        check_folder(folder)
    assert SECOND in caught.value.message
