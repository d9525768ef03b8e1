"""Loading: what is reported, what is refused, and that a folder's own code never runs."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_engine.model.load import LoadedModel, load_model, warm_up
from mlx_isolate_engine.model.tokenizer import load_tokenizer
from mlx_isolate_engine.probe import look_at
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.wire import Loading
from tests.material.models import FULL, ModelSpec, build_model

DEFAULTS = EngineSettings()
PLAIN_TURN = [{"role": "user", "content": "hi"}]


def quiet(_: Loading) -> None:
    pass


def load(folder: Path, settings: EngineSettings = DEFAULTS) -> LoadedModel:
    loaded = load_model(folder, settings, quiet)
    warm_up(loaded, quiet)
    return loaded


def refused(folder: Path, settings: EngineSettings = DEFAULTS) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(folder, settings)
    assert "\n" not in caught.value.message
    return caught.value


def rendered(loaded: LoadedModel) -> str:
    text: str = loaded.tokenizer.apply_chat_template(
        PLAIN_TURN, tokenize=False, add_generation_prompt=True
    )
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_model(tmp_path / "model", FULL)


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    "kind", ["full", "sliding", "recurrent", "hybrid", "cache_list", "shared_kv", "parrot"]
)
def test_every_kind_loads_and_computes(
    model_folder: Callable[[ModelSpec], Path], kind: Any
) -> None:
    facts = load(model_folder(ModelSpec(kind=kind))).facts
    assert (facts.dtype, facts.vocab_size, facts.context_length) == ("float32", 512, 2048)
    assert facts.weights_bytes == 4 * facts.parameters


def test_quantized_weights_count_one_by_one(tmp_path: Path) -> None:
    from mlx import nn
    from mlx_lm.utils import load_model as load_plain
    from mlx_lm.utils import save_config, save_model

    folder = build_model(tmp_path / "m", FULL)
    plain = load(folder).facts
    model, config = load_plain(folder)
    nn.quantize(model, group_size=32, bits=4)
    (folder / "model.safetensors").unlink()
    save_model(folder, model)
    quantization = {"group_size": 32, "bits": 4}
    save_config(config | {"quantization": quantization}, folder / "config.json")
    facts = load(folder).facts
    assert (facts.parameters, facts.dtype) == (plain.parameters, "4-bit")
    assert facts.weights_bytes < plain.weights_bytes / 4
    is_warned = any("slow on the CPU" in warning for warning in facts.warnings)
    assert is_warned == (facts.backend == "cpu")


def test_stages_are_reported_in_order(folder: Path) -> None:
    lines: list[Loading] = []
    warm_up(load_model(folder, DEFAULTS, lines.append), lines.append)
    stages = list(dict.fromkeys(line.stage for line in lines))
    assert stages == ["weights", "tokenizer", "warmup"]
    assert [line.fraction for line in lines if line.stage == "weights"][-1] == 1.0


def test_weights_are_reported_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_isolate_engine.model.load.WEIGHTS_GROUP_BYTES", 100_000)
    lines: list[Loading] = []
    load_model(build_model(tmp_path / "m", FULL), DEFAULTS, lines.append)
    fractions = [line.fraction or 0.0 for line in lines if line.stage == "weights"]
    assert len(fractions) > 4
    assert fractions == sorted(fractions)


def test_a_tokenizer_loaded_ahead_is_used(folder: Path) -> None:
    ahead = load_tokenizer(folder, DEFAULTS)
    assert load_model(folder, DEFAULTS, quiet, ahead).tokenizer is ahead


def wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=96)


def missing_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")


def extra_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"surprise": np.zeros(3)}, folder / "model.safetensors")


def negative_heads(folder: Path) -> None:
    change_config(folder, num_attention_heads=0)


def words_for_numbers(folder: Path) -> None:
    change_config(folder, hidden_size="many")


def missing_key(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))


def unknown_quantization(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "compressed-tensors"})


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def torn_tokenizer(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])


def empty_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def torn_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")


@pytest.mark.parametrize(
    "damage",
    [
        wrong_shape,
        missing_tensor,
        extra_tensor,
        negative_heads,
        words_for_numbers,
        missing_key,
        unknown_quantization,
        no_tokenizer,
        torn_tokenizer,
        empty_tokenizer,
        torn_tokenizer_config,
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    error = refused(folder)
    assert (error.code, error.is_permanent) == ("model_broken", True)
    assert str(folder) in error.message


@pytest.mark.parametrize("name", ["no_such_model", "../../evil", "llama.os", "", "cache.x"])
def test_unknown_architecture_is_named(folder: Path, name: str) -> None:
    change_config(folder, model_type=name)
    told = refused(folder)
    assert told.code == "model_unsupported"
    assert f"mlx-lm {version('mlx-lm')} has no model type {name!r}" in told.message
    assert look_at(str(folder)).error == told.message


def test_architecture_by_another_name_is_known(folder: Path) -> None:
    change_config(folder, model_type="mistral")
    load(folder)
    assert look_at(str(folder)).error is None


EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
class Model: pass
class ModelArgs: pass
class Evil: pass
"""


def test_model_code_in_the_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    change_config(folder, model_file="evil.py")
    told = refused(folder)
    assert told.code == "model_untrusted"
    assert look_at(str(folder)).error == told.message
    assert look_at(str(folder), is_trusted=True).error is None
    assert not marker.exists()


@pytest.mark.parametrize("tokenizer_class", ["Evil", "EvilTokenizerFast"])
def test_tokenizer_code_in_the_folder_does_not_run(
    folder: Path, tmp_path: Path, tokenizer_class: str
) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {
        "tokenizer_class": tokenizer_class,
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert refused(folder).code == "model_untrusted"
    assert not marker.exists()


def test_config_code_in_the_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    change_config(folder, auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})
    load(folder)
    assert not marker.exists()


def test_given_template_replaces_the_models(folder: Path) -> None:
    settings = replace_settings(chat_template="{{ messages[0].content }}!")
    assert rendered(load(folder, settings)) == "hi!"


def test_template_may_be_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("from a file: {{ messages[0].content }}")
    settings = replace_settings(chat_template=str(tmp_path / "own.jinja"))
    assert rendered(load(folder, settings)) == "from a file: hi"


@pytest.mark.parametrize("template", ["{% for x in %}", "/nowhere/template.jinja"])
def test_broken_template_is_refused(folder: Path, template: str) -> None:
    error = refused(folder, replace_settings(chat_template=template))
    assert (error.code, error.is_permanent) == ("template_broken", True)


def test_default_template_serves_a_model_without_one(tmp_path: Path) -> None:
    folder = build_model(tmp_path / "m", replace(FULL, template="none"))
    assert not load(folder).facts.has_chat_template
    loaded = load(folder, replace_settings(use_default_chat_template=True))
    assert loaded.facts.has_chat_template
    assert rendered(loaded).endswith("hi<|im_end|>\n<|im_start|>assistant\n")


def test_default_template_leaves_a_models_own(folder: Path) -> None:
    loaded = load(folder, replace_settings(use_default_chat_template=True))
    assert rendered(loaded) == "<|bos|><|user|>hi<|end|><|assistant|>"


def replace_settings(**values: Any) -> EngineSettings:
    return EngineSettings(**values)


def write_adapter(folder: Path, rank: int = 2, hidden: int = 64) -> Path:
    folder.mkdir()
    settings = {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = "model.layers.1.self_attn.q_proj"
    weights = {
        f"{prefix}.lora_a": np.ones((hidden, rank), dtype=np.float32),
        f"{prefix}.lora_b": np.ones((rank, 64), dtype=np.float32),
    }
    save_file(weights, folder / "adapters.safetensors")
    return folder


def test_adapter_changes_what_the_model_computes(folder: Path, tmp_path: Path) -> None:
    import mlx.core as mx

    adapter = write_adapter(tmp_path / "adapter")
    tokens = mx.array([[1, 2, 3]])
    plain = load(folder).model(tokens)
    adapted = load(folder, replace_settings(adapter_path=str(adapter))).model(tokens)
    assert not mx.allclose(plain, adapted)


def no_adapter(adapter: Path) -> None:
    (adapter / "adapters.safetensors").unlink()


def torn_adapter_config(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{")


def cut_adapter(adapter: Path) -> None:
    content = (adapter / "adapters.safetensors").read_bytes()
    (adapter / "adapters.safetensors").write_bytes(content[:-4])


def adapter_without_layers(adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    "damage", [no_adapter, torn_adapter_config, cut_adapter, adapter_without_layers]
)
def test_bad_adapter_is_refused(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    damage(adapter)
    error = refused(folder, replace_settings(adapter_path=str(adapter)))
    assert (error.code, error.is_permanent) == ("adapter_broken", True)


def test_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", hidden=48)
    error = refused(folder, replace_settings(adapter_path=str(adapter)))
    assert error.code == "adapter_broken"


# The second may not be looked at: too long rather than forbidden, which nothing is to root.
@pytest.mark.parametrize("path", ["/nowhere", "/" + "x" * 300], ids=["missing", "too long"])
def test_missing_adapter_folder_is_refused(folder: Path, path: str) -> None:
    assert refused(folder, replace_settings(adapter_path=path)).code == "adapter_broken"
