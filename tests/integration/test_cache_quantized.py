"""Under `--kv-bits` a warm answer equals the cold one, wherever quantization begins."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.cache.prompt_cache import PromptCache
from tests.integration.generation_rig import chat_request, rig, run_async, tokens_request
from tests.material.models import NO_KV_BITS_ON_CUDA, ModelSpec

pytestmark = pytest.mark.not_on_cuda(NO_KV_BITS_ON_CUDA)

SPEC = ModelSpec(kind="full", hidden=128)  # groups of 32 need as wide a head
SEED = 5


def prompts() -> list[list[int]]:
    """Prompts below, around and above where quantization begins; many share a beginning."""
    source = random.Random(SEED)
    system = [source.randrange(32, 127) for _ in range(60)]
    tails = [[source.randrange(32, 127) for _ in range(size)] for size in (3, 9, 30, 55)]
    return [
        system[:9],
        system[:14],
        system[:25],
        *([*system, *tail] for tail in tails),
        [*system, *tails[3], 40, 41],
        [*system[:30], *tails[2]],
    ]


@pytest.mark.case("x3")
@pytest.mark.parametrize("start", [0, 20, 40, 1000])
def test_answers_do_not_depend_on_what_was_asked_before(
    start: int, model_folder: Callable[[ModelSpec], Path]
) -> None:
    folder = model_folder(SPEC)
    settings: dict[str, Any] = {
        "kv_bits": 4,
        "kv_group_size": 32,
        "quantized_kv_start": start,
        "prefill_step_size": 16,
        "decode_concurrency": 1,
    }
    asked = prompts()

    async def answers(order: list[int], cache: PromptCache | None) -> tuple[dict[int, str], int]:
        found: dict[int, str] = {}
        hits = 0
        async with rig(folder, make_prompt_cache=lambda _: cache, **settings) as running:
            for number in order:
                answer = await running.run(tokens_request(asked[number], max_tokens=10))
                assert found.setdefault(number, answer.text) == answer.text
                hits += answer.end.cached_tokens > 0
        return found, hits

    async def main() -> None:
        numbers = list(range(len(asked)))
        cold: dict[int, str] = {}
        for number in numbers:
            cold |= (await answers([number], None))[0]
        source = random.Random(SEED)
        for order in (numbers, numbers[::-1], source.sample(numbers, len(numbers))):
            cache = PromptCache(entries_max=50, bytes_max=None)
            warm, hits = await answers([*order, *order], cache)
            assert warm == cold
            figures = cache.figures()
            assert (figures.hits, figures.hits + figures.misses) == (hits, 2 * len(order))
            assert hits >= len(asked), "no hits, so this proves nothing"

    run_async(main())


@pytest.mark.case("x3")
def test_a_checkpoint_does_not_move_where_quantization_begins(
    model_folder: Callable[[ModelSpec], Path],
) -> None:
    """The end of a system prompt lies between `quantized_kv_start` and the end of its step."""
    folder = model_folder(SPEC)
    settings: dict[str, Any] = {
        "kv_bits": 2,
        "kv_group_size": 32,
        "quantized_kv_start": 33,
        "prefill_step_size": 128,
        "decode_concurrency": 1,
    }
    messages = (
        {"role": "system", "content": "A canary is what a miner takes along with him."},
        {"role": "user", "content": "Which colour has it, and why do they take it with them? " * 3},
    )

    async def main() -> None:
        chat = chat_request(messages=messages, max_tokens=24)
        async with rig(folder, **settings) as running:
            text: Any = running.loaded.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True
            )
            plain = tokens_request(list(text), max_tokens=24)
            expected = {"chat": (await running.run(chat)).text}
            expected["plain"] = (await running.run(plain)).text
        requests = {"chat": chat, "plain": plain}
        for order in (["chat", "plain", "chat"], ["plain", "chat", "plain"]):

            def make(_: object) -> PromptCache:
                return PromptCache(entries_max=50, bytes_max=None)

            async with rig(folder, make_prompt_cache=make, **settings) as running:
                answers = [await running.run(requests[name]) for name in order]
            assert [a.text for a in answers] == [expected[name] for name in order], order
            assert answers[-1].end.cached_tokens > 0
        assert expected["chat"] == expected["plain"], "the same tokens"

    run_async(main())
