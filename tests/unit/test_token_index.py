"""The sorted token index against a plain search, over random sequences."""

import random

from mlx_isolate_engine.cache.token_index import TokenIndex, common_prefix, token_key


def test_common_prefix_counts_tokens_not_bytes() -> None:
    assert common_prefix(token_key([1, 256, 3]), token_key([1, 257, 3])) == 1
    assert common_prefix(token_key([1, 2]), token_key([1, 2, 3])) == 2
    assert common_prefix(b"", token_key([1])) == 0


def test_find_agrees_with_a_plain_search() -> None:
    seed = 20260711
    rng = random.Random(seed)
    for _ in range(300):
        index: TokenIndex[tuple[int, ...]] = TokenIndex()
        stored: dict[tuple[int, ...], bool] = {}
        for _ in range(rng.randrange(1, 14)):
            tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 9)))
            stored[tokens] = rng.random() < 0.5
            index.add(token_key(tokens), tokens, cuttable=stored[tokens])
        for _ in range(12):
            query = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 10)))
            limit = len(query) - 1
            best = 0
            for tokens, cuttable in stored.items():
                shared = common_prefix(token_key(tokens), token_key(query))
                if cuttable:
                    best = max(best, min(shared, limit))
                elif shared == len(tokens) <= limit:
                    best = max(best, shared)
            match = index.find(token_key(query), length_max=limit)
            assert (match.length if match else 0) == best, f"seed {seed}"
            prefixes = [k for k in stored if len(k) < len(query) and query[: len(k)] == k]
            expected = [token_key(k) for k in sorted(prefixes, key=len, reverse=True)]
            assert index.prefixes(token_key(query)) == expected, f"seed {seed}"


def test_replacing_a_sequence_returns_the_old_value() -> None:
    index: TokenIndex[str] = TokenIndex()
    assert index.add(token_key([1, 2]), "a", cuttable=True) is None
    assert index.add(token_key([1, 2]), "b", cuttable=False) == "a"
    assert len(index) == 1
    assert index.remove(token_key([1, 2])) == "b"
    assert index.find(token_key([1, 2, 3]), length_max=2) is None
