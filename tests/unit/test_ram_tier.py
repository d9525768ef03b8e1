"""What stays in the RAM tier, what leaves, and in which order."""

import pytest

from mlx_isolate_engine.cache.ram_tier import Entry, RamTier
from mlx_isolate_engine.cache.token_index import token_key


def entry(*tokens: int, size: int = 10, cuttable: bool = False, namespace: str = "n") -> Entry:
    return Entry(
        namespace=namespace,
        key=token_key(tokens),
        cache=[],
        bytes=size,
        cuttable=cuttable,
        storable=True,
        kind="assistant",
    )


@pytest.mark.case("26")
def test_the_byte_cap_holds_after_every_put() -> None:
    tier = RamTier(entries_max=100, bytes_max=35)
    gone = [e for n in range(9) for e in tier.put(entry(n, n)).evicted]
    assert tier.bytes == 30
    assert [e.key for e in gone] == [token_key([n, n]) for n in range(6)]


def test_the_entry_cap_holds() -> None:
    tier = RamTier(entries_max=2, bytes_max=None)
    first, second, third = entry(1, 1), entry(2, 2), entry(3, 3)
    assert tier.put(first).evicted == ()
    assert tier.put(second).evicted == ()
    tier.use(first)
    assert tier.put(third).evicted == (second,)


def test_an_entry_above_the_cap_leaves_alone() -> None:
    tier = RamTier(entries_max=9, bytes_max=35)
    small, large = entry(1, 1), entry(2, 2, size=36)
    tier.put(small)
    assert tier.put(large).evicted == (large,)
    assert tier.has(small)


def test_a_cuttable_entry_absorbs_its_prefixes() -> None:
    tier = RamTier(entries_max=9, bytes_max=None)
    prefix = entry(1, 2, cuttable=True)
    tier.put(prefix)
    assert tier.put(entry(1, 2, 3, cuttable=True)).absorbed == (prefix,)
    assert len(tier) == 1
    assert tier.bytes == 10


def test_a_fixed_entry_keeps_its_prefixes() -> None:
    tier = RamTier(entries_max=9, bytes_max=None)
    tier.put(entry(1, 2))
    tier.put(entry(1, 2, 3))
    assert len(tier) == 2


def test_using_a_conversation_keeps_its_system_prompt() -> None:
    tier = RamTier(entries_max=3, bytes_max=None)
    system, turn, other = entry(1, 2), entry(1, 2, 3), entry(9, 9)
    for each in (system, turn, other):
        tier.put(each)
    tier.use(turn)
    assert tier.put(entry(8, 8)).evicted == (other,)
    assert tier.put(entry(7, 7)).evicted == (turn,)
    assert tier.has(system)


def test_namespaces_share_nothing() -> None:
    tier = RamTier(entries_max=9, bytes_max=None)
    tier.put(entry(1, 2, namespace="adapter"))
    assert tier.find("plain", token_key([1, 2, 3]), length_max=2) is None


def test_trim_gives_bytes_back() -> None:
    tier = RamTier(entries_max=9, bytes_max=None)
    for n in range(4):
        tier.put(entry(n, n))
    assert len(tier.trim(20)) == 2
    assert tier.bytes == 20
