"""Every kind of mlx-lm cache through the RAM tier: exact, or a miss."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_isolate_engine.cache import kinds
from mlx_isolate_engine.cache.kinds import can_cut
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from tests.fakes.toy_caches import CUTTABLE_WHEN_LONG, KINDS, TOKENS, assert_same, feed


def _cache() -> PromptCache:
    return PromptCache(entries_max=20, bytes_max=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7], ids=["token by token", "in chunks"])
def test_a_stored_prefix_continues_like_one_never_stored(kind: str, chunk: int) -> None:
    cache = _cache()
    live = KINDS[kind]()
    feed(live, TOKENS[:12], 0, chunk)
    cache.put(TOKENS[:12], live, "n", "prompt")
    feed(live, [7, 7, 7, 7], 12)  # the run goes on and writes to its own objects
    taken, reused = cache.take(TOKENS, "n")
    assert taken is not None and reused == 12
    never = KINDS[kind]()
    feed(never, TOKENS[:12], 0, chunk)
    assert_same(taken, never)
    feed(taken, TOKENS[12:], 12)
    feed(never, TOKENS[12:], 12)
    assert_same(taken, never)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_does_not_change_the_stored_entry(kind: str) -> None:
    cache = _cache()
    live = KINDS[kind]()
    feed(live, TOKENS[:12], 0)
    cache.put(TOKENS[:12], live, "n", "prompt")
    for _ in range(2):
        taken, _ = cache.take([*TOKENS[:12], 99], "n")
        assert taken is not None
        feed(taken, [77] * 9, 12, 3)
    never = KINDS[kind]()
    feed(never, TOKENS[:12], 0)
    taken, _ = cache.take([*TOKENS[:12], 99], "n")
    assert taken is not None
    assert_same(taken, never)


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_entry_serves_a_shorter_prompt_only_where_it_can_be_cut(kind: str) -> None:
    cache = _cache()
    live = KINDS[kind]()
    feed(live, TOKENS, 0)
    cache.put(TOKENS, live, "n", "assistant")
    prompt = [*TOKENS[:10], 99, 98]
    taken, reused = cache.take(prompt, "n")
    if kind not in CUTTABLE_WHEN_LONG:
        assert taken is None and reused == 0
        assert cache.figures().miss_reasons == {"not_cuttable": 1}
        return
    assert taken is not None and reused == 10
    feed(taken, prompt[10:], 10)
    never = KINDS[kind]()
    feed(never, prompt, 0)
    assert_same(taken, never)


@pytest.mark.parametrize("chunk", [1, 5])
def test_a_window_that_has_not_wrapped_is_cut(chunk: int) -> None:
    cache = _cache()
    live: list[Any] = [RotatingKVCache(max_size=16), KVCache()]
    feed(live, TOKENS[:13], 0, chunk)
    cache.put(TOKENS[:13], live, "n", "prompt")
    for prompt in ([*TOKENS[:6], 50, 51], [*TOKENS[:13], 50]):
        taken, reused = cache.take(prompt, "n")
        assert taken is not None and reused == (6 if prompt[6] == 50 else 13)
        never: list[Any] = [RotatingKVCache(max_size=16), KVCache()]
        feed(never, prompt[:reused], 0)
        for more in ([1] * 3, [2] * 9, [3] * 20):
            feed(taken, more, reused)
            feed(never, more, reused)
            reused += len(more)
            assert_same(taken, never)


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_of_the_prompt_is_always_left_to_run(kind: str) -> None:
    cache = _cache()
    live = KINDS[kind]()
    feed(live, TOKENS[:5], 0)
    cache.put(TOKENS[:5], live, "n", "prompt")
    cuttable = can_cut(live)
    taken, reused = cache.take(TOKENS[:5], "n")
    assert reused == (4 if cuttable else 0)
    assert (taken is not None) == cuttable


def test_a_token_the_model_has_not_seen_is_left_off() -> None:
    cache = _cache()
    live: list[Any] = [KVCache()]
    feed(live, TOKENS[:5], 0)
    cache.put(TOKENS[:6], live, "n", "assistant")
    assert cache.take(TOKENS, "n")[1] == 5


def test_leaves_that_ran_ahead_are_cut_back() -> None:
    """After speculative decoding the two models' caches may end at different tokens."""
    cache = _cache()
    model, draft = KVCache(), KVCache()
    feed([model], TOKENS[:9], 0)
    feed([draft], TOKENS[:7], 0)
    cache.put(TOKENS[:10], [model, draft], "n", "assistant")
    taken, reused = cache.take(TOKENS, "n")
    assert taken is not None and reused == 7
    assert [part.offset for part in taken] == [7, 7]


@pytest.mark.parametrize(
    "second", [ArraysCache(size=2), RotatingKVCache(max_size=4)], ids=["arrays", "wrapped"]
)
def test_leaves_that_disagree_and_cannot_be_cut_are_not_kept(second: Any) -> None:
    cache = _cache()
    live: list[Any] = [KVCache(), KVCache(), second]
    feed(live[:1], TOKENS[:9], 0)
    feed(live[1:], TOKENS[:7], 0)
    if isinstance(second, RotatingKVCache):
        feed([second], TOKENS[7:9], 7)
    cache.put(TOKENS[:9], live, "n", "assistant")
    assert cache.figures().ram_entries == 0


def test_a_row_with_one_head_does_not_pin_its_batch() -> None:
    """With one KV head a row out of a batch is a view of the whole batch's buffer."""
    batch = mx.zeros((32, 1, 512, 64))
    mx.eval(batch)
    cache = _cache()
    row = KVCache()
    row.keys = row.values = mx.contiguous(batch[3:4, :, :100])
    row.offset = 100
    cache.put(list(range(100)), [row], "n", "assistant")
    before = mx.get_active_memory()
    size = batch.nbytes
    del batch, row
    assert mx.get_active_memory() <= before - size
    assert cache.figures().ram_bytes == 2 * 100 * 64 * 4


class _UnknownCache:
    """A cache class of a model's own file: state, but no way back from it."""

    def __init__(self) -> None:
        self.offset = 0
        self.window: Any = None
        self.lists: list[Any] = []

    def add(self, value: int) -> None:
        self.window = mx.full((1, 4), value)
        self.lists.append(mx.full((1, 2), value))
        self.offset += 1


def test_an_unknown_kind_stays_in_ram_and_is_never_cut() -> None:
    cache = _cache()
    live = _UnknownCache()
    for token in (5, 6, 7):
        live.add(token)
    cache.put([5, 6, 7], [live], "n", "prompt")
    live.add(8)
    assert cache.take([5, 6, 9], "n") == (None, 0)
    taken, reused = cache.take([5, 6, 7, 1], "n")
    assert taken is not None and reused == 3
    taken[0].add(9)
    again, _ = cache.take([5, 6, 7, 1], "n")
    assert again is not None
    assert again[0].window.tolist() == [[7] * 4]
    assert len(again[0].lists) == 3


@pytest.mark.parametrize("attribute", [mx.float16, mx.compile(mx.abs), mx.default_stream(mx.cpu)])
def test_an_unknown_kind_that_cannot_be_copied_is_not_kept(attribute: Any) -> None:
    """What a model's own code holds is not ours to know; it must not end the engine."""
    Newer: Any = type("Newer", (KVCache,), {"held": None})
    part = Newer()
    feed([part], TOKENS[:12], 0)
    part.held = attribute
    cache = _cache()
    cache.put(TOKENS[:12], [part], "n", "prompt")
    assert cache.entries() == []
    assert cache.take(TOKENS, "n") == (None, 0)


def test_checkpoints_are_wanted_where_cutting_is_not_certain() -> None:
    cache = _cache()
    wanted = {name: cache.wants_checkpoint(make()) for name, make in KINDS.items()}
    assert {name for name, w in wanted.items() if not w} == CUTTABLE_WHEN_LONG


# What mlx-lm's module has beside caches of one row, and why it needs no row in the table.
NO_ROW = {
    "BatchKVCache": "several rows",
    "BatchRotatingKVCache": "several rows",
    "_BaseCache": "has no state of its own",
    "TokenBuffer": "holds tokens, for logits processors",
}


def test_the_table_names_every_cache_of_the_installed_mlx_lm() -> None:
    """A new class of mlx-lm must be looked at before anything is cut or stored of it."""
    base: Any = mlx_cache._BaseCache  # pyright: ignore[reportPrivateUsage]
    found = {cls for cls in vars(mlx_cache).values() if isinstance(cls, type)}
    caches = {cls for cls in found if issubclass(cls, base) or hasattr(cls, "update_and_fetch")}
    assert {cls.__name__ for cls in caches - set(kinds.TABLE)} == set(NO_ROW)
    assert all(kind.name == cls.__name__ for cls, kind in kinds.TABLE.items())


def test_a_subclass_of_a_known_kind_is_unknown() -> None:
    Newer: Any = type("Newer", (mlx_cache.KVCache,), {})
    assert kinds.kind_of(Newer()) is kinds.UNKNOWN
    assert not kinds.can_store([Newer()])
    assert not kinds.can_cut([Newer()])
    assert not kinds.allows_draft([Newer()])
    assert not kinds.allows_kv_bits([Newer()])
