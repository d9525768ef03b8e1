"""Report lines of an engine that lies: true ones, changed at random; seeded."""

import json
import random
from typing import Any

import msgspec

from mlx_isolate_shared import wire

GOOD: tuple[wire.Report, ...] = (
    wire.Loading(stage="weights", fraction=0.5, detail="1.2 of 4.3 GB"),
    wire.Failed(code="model_missing", message="there is no such model."),
    wire.Ready(
        pid=7,
        socket_path="/run/s.sock",
        load_s=1.5,
        facts=wire.ModelFacts(
            architecture="llama",
            parameters=1000,
            weights_bytes=4000,
            dtype="float32",
            context_length=4096,
            vocab_size=256,
            backend="cpu",
            warnings=("slow",),
        ),
    ),
    wire.Progress(
        prompt_tokens=5,
        generated_tokens=7,
        active=1,
        footprint_bytes=1 << 30,
        cache=wire.CacheFigures(hits=3, restore_ms=0.5, miss_reasons={"cold": 2}),
    ),
)
# What a value is replaced by, as JSON text.
VALUES = (
    *("null", "true", "0", "-1", "1e308", "-1e308", "1e999", "NaN", "-0", "0.5", "[]", "{}", '""'),
    *("9" * 40, "9" * 5000, "-" + "9" * 30, str(2**63), str(2**64), '"\\u0000\\u001b[2J"'),
    *(
        '"\\ud800"',
        '"' + "x" * 70_000 + '"',
        "[" * 500 + "]" * 500,
        '{"a":' * 300 + "1" + "}" * 300,
    ),
    *('"/etc/passwd"', '"../../x"', '"line\\nline"', "[[1,2],{}]", '{"a":1}'),
)
_HOLE = "\ue000"


def random_line(chance: random.Random) -> bytes:
    """One line without its newline: a true report with up to three lies, or bytes."""
    tree: Any = msgspec.to_builtins(chance.choice(GOOD))
    lies: list[str] = []
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        _lie(chance, tree, lies)
    text = json.dumps(tree)
    for lie in lies:
        text = text.replace(json.dumps(_HOLE), lie, 1)
    data = bytearray(text.encode())
    if chance.random() < 0.25:
        for _ in range(chance.randrange(1, 6)):
            _damage(chance, data)
    return bytes(data).replace(b"\n", b" ")


def random_report(chance: random.Random, lines: int) -> bytes:
    """So many lines as they stand in the pipe, the last one perhaps unfinished."""
    data = b"".join(random_line(chance) + b"\n" for _ in range(lines))
    return data[: len(data) - chance.choice((0, 0, 1, 5))]


def _lie(chance: random.Random, tree: dict[str, Any], lies: list[str]) -> None:
    place: Any = tree
    name = chance.choice(list(place))
    while isinstance(place[name], dict) and place[name] and chance.random() < 0.8:
        place = place[name]
        name = chance.choice(list(place))
    if name == "type" and chance.random() < 0.9:
        return
    how = chance.randrange(10)
    if how == 0:
        del place[name]
    elif how == 1:
        place["unknown" * chance.randrange(1, 9)] = place[name]
    else:
        place[name] = _HOLE
        lies.append(chance.choice(VALUES))


def _damage(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data)) if data else 0
    how = chance.randrange(4)
    if how == 0:
        data[at : at + 1] = bytes([chance.randrange(256)])
    elif how == 1:
        del data[at : at + chance.randrange(1, 40)]
    elif how == 2:
        data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
    else:
        data[at:at] = data[: chance.randrange(0, 60)]
