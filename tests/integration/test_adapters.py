"""Adapters by name: each answer is what mlx-lm gives with that adapter, whoever runs beside it."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.completion.events import ContentDelta, Event
from mlx_isolate_engine.generation import turns
from mlx_isolate_engine.model.adapters import AdapterRack
from mlx_isolate_engine.model.errors import ModelError
from mlx_isolate_shared.errors import RequestError
from tests.integration.generation_rig import Rig, load_tiny, rig, run_async, text_request
from tests.material.models import FULL, ModelSpec

Folder = Callable[[ModelSpec], Path]

KEYS = {"self_attn.q_proj": (64, 64), "self_attn.o_proj": (64, 64)}
LAYERS = FULL.layers
RANK = 4
PROMPT = "hello world and the code"
TOKENS = 40


def write_adapter(folder: Path, seed: int, kind: str = "lora") -> Path:
    """An adapter of random weights, strong enough to change what is said."""
    folder.mkdir()
    settings = {"rank": RANK, "scale": 8.0, "dropout": 0.0, "keys": list(KEYS)}
    config = {"fine_tune_type": kind, "num_layers": LAYERS, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    dice = np.random.default_rng(seed)
    weights: dict[str, Any] = {}
    for layer in range(LAYERS):
        for key, (inputs, outputs) in KEYS.items():
            prefix = f"model.layers.{layer}.{key}"
            shapes = {"lora_a": (inputs, RANK), "lora_b": (RANK, outputs)}
            if kind == "full":
                shapes = {"weight": (outputs, inputs)}
            for name, shape in shapes.items():
                values = dice.normal(size=shape, scale=0.3).astype(np.float32)
                weights[f"{prefix}.{name}"] = values
            if kind == "dora":
                weights[f"{prefix}.m"] = np.full(outputs, 2.0, dtype=np.float32)
    save_file(weights, folder / "adapters.safetensors")
    return folder


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    return {
        "polite": str(write_adapter(tmp_path / "one", 1)),
        "terse": str(write_adapter(tmp_path / "two", 2, "dora")),
    }


def oracle(folder: Path, adapter: str | None, prompt: str = PROMPT, tokens: int = TOKENS) -> str:
    """What mlx-lm's own generation says."""
    model, tokenizer = mlx_lm.load(str(folder), adapter_path=adapter)[:2]
    return str(mlx_lm.generate(model, tokenizer, prompt, max_tokens=tokens))


async def said(subject: Rig, adapter: str | None, **fields: Any) -> str:
    request = text_request(PROMPT, adapter=adapter, **{"max_tokens": TOKENS, **fields})
    return (await subject.run(request)).text


@pytest.mark.parametrize("concurrency", [8, 1], ids=["continuous", "serial"])
def test_each_adapter_says_what_mlx_lm_says_with_it(
    model_folder: Folder, adapters: dict[str, str], concurrency: int
) -> None:
    folder = model_folder(FULL)
    expected = {name: oracle(folder, adapters.get(name or "")) for name in (None, *adapters)}
    assert len(set(expected.values())) == 3

    async def test() -> None:
        async with rig(folder, adapters=adapters, decode_concurrency=concurrency) as subject:
            for name in ("polite", None, "terse", "polite", "terse", None):
                assert await said(subject, name) == expected[name]

    run_async(test())


@pytest.mark.parametrize("turn_s", [0.0, 2.0], ids=["shortest turns", "turns"])
@pytest.mark.parametrize("concurrency", [8, 1], ids=["continuous", "serial"])
def test_mixed_completions_of_all_adapters_say_what_each_says_alone(
    model_folder: Folder,
    adapters: dict[str, str],
    concurrency: int,
    turn_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_S", turn_s)
    folder = model_folder(FULL)
    expected = {name: oracle(folder, adapters.get(name or "")) for name in (None, *adapters)}

    async def test() -> None:
        async with rig(folder, adapters=adapters, decode_concurrency=concurrency) as subject:
            names = [None, "polite", "terse"] * 4
            texts = await asyncio.gather(*(said(subject, name) for name in names))
            assert texts == [expected[name] for name in names]
            await subject.wait_idle()

    run_async(test())


def test_an_endless_stream_of_one_adapter_does_not_starve_another_one(
    model_folder: Folder, adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.2)
    folder = model_folder(replace(FULL, context=1 << 15))
    expected = oracle(folder, adapters["terse"])
    begun, more = asyncio.Event(), asyncio.Event()

    async def watch(event: Event) -> None:
        if isinstance(event, ContentDelta):
            begun.set()
            more.set()

    async def test() -> None:
        async with rig(folder, adapters=adapters) as subject:
            endless = text_request("hello", adapter="polite", max_tokens=30_000)
            stream = asyncio.create_task(subject.run(endless, watch))
            await begun.wait()
            for _ in range(2):
                assert await said(subject, "terse") == expected
                more.clear()
                await more.wait()  # it has its turn again
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            await subject.wait_idle()

    run_async(test())


def test_prefixes_are_not_shared_between_adapters(
    model_folder: Folder, adapters: dict[str, str]
) -> None:
    folder = model_folder(FULL)
    expected = {name: oracle(folder, adapters.get(name or "")) for name in (None, *adapters)}

    def make_prompt_cache(_: Any) -> PromptCache:
        return PromptCache(entries_max=10, bytes_max=None)

    async def test() -> None:
        async with rig(folder, adapters=adapters, make_prompt_cache=make_prompt_cache) as subject:
            for is_warm in (False, True):
                for name in (None, "polite", "terse"):
                    request = text_request(PROMPT, adapter=name, max_tokens=TOKENS)
                    answer = await subject.run(request)
                    assert answer.text == expected[name]
                    assert (answer.end.cached_tokens > 0) == is_warm

    run_async(test())


@pytest.mark.case("49")
@pytest.mark.parametrize("name", ["other", "", "{path}"])
def test_only_configured_names_are_taken_never_a_path(
    model_folder: Folder, adapters: dict[str, str], name: str
) -> None:
    async def test() -> None:
        async with rig(model_folder(FULL), adapters=adapters) as subject:
            with pytest.raises(RequestError, match="there are: polite, terse") as caught:
                await said(subject, name.format(path=adapters["polite"]))
            assert (caught.value.status, caught.value.code) == (400, "adapter_not_found")
            assert subject.service.places_taken == 0

    run_async(test())


def test_a_full_fine_tune_is_no_adapter_to_choose(model_folder: Folder, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "full", 3, "full")
    with pytest.raises(ModelError, match="serve it as a model of its own"):
        AdapterRack(load_tiny(model_folder(FULL)).model, {"full": str(folder)})


def test_a_broken_adapter_is_refused_at_start(model_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no adapter_config.json"):
        AdapterRack(load_tiny(model_folder(FULL)).model, {"gone": str(tmp_path / "gone")})


def test_an_adapter_whose_file_has_changed_has_another_digest(
    model_folder: Folder, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "one", 1)
    other = write_adapter(tmp_path / "two", 2)
    model = load_tiny(model_folder(FULL)).model
    rack = AdapterRack(model, {"a": str(folder), "b": str(other), "c": str(folder)})
    assert rack.digests["a"] == rack.digests["c"] != rack.digests["b"]
