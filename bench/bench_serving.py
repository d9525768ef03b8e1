"""Whether chats through the daemon are as fast as through a rival, on one model in one run.

Both serve one model of random weights (or a folder of yours); clients stream greedy chats of a
fixed length side by side. The rivals take turns, so that a machine that slows down slows both, and
the ratio is of both turns of a round. Cold turns send prompts that no cache has seen, of mixed
lengths; warm ones share a long system prompt. Not measured: quality of text, long contexts, other
samplers, memory.

    python -m bench.bench_serving                     # the real size
    python -m bench.bench_serving --small             # the size that the tests run
    python -m bench.bench_serving --model FOLDER      # weights that matter to you
    python -m bench.bench_serving --clients 1 8 32    # other crowds
    python -m bench.bench_serving --rival vllm-mlx=ENVIRONMENT/bin/vllm-mlx
"""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.leaving import leaving_nothing
from bench.machine import machine
from bench.paired import compare
from bench.serving_load import Turn, prompt, turn
from bench.serving_rivals import MLX_LM, RIVALS, Rival, ours, theirs


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        hidden: width of the random model.
        layers: its depth.
        tokens: tokens of each answer.
        clients: numbers of clients side by side.
        rounds: turns that each rival takes and that count.
        warm_ups: turns before those, in which a GPU meets its shapes.
        words: lengths of prompts, dealt out in turn.
    """

    hidden: int
    layers: int
    tokens: int
    clients: tuple[int, ...]
    rounds: int
    warm_ups: int
    words: tuple[int, ...]


SMALL = Size(hidden=64, layers=2, tokens=16, clients=(1, 2), rounds=2, warm_ups=1, words=(8, 24))
REAL = Size(
    hidden=768,
    layers=12,
    tokens=64,
    clients=(1, 4, 16),
    rounds=7,
    warm_ups=1,
    words=(16, 64, 128, 256),
)
HIGHER_IS_BETTER = {"tokens_per_s"}


@dataclass(frozen=True)
class Comparison:
    """One figure at one load: both medians, and how many times better ours is.

    Attributes:
        ratio: above 1 is better for us, whatever the figure.
        ratio_low: the lower end of its 95 % interval; None = too few rounds.
    """

    load: str
    clients: int
    figure: str
    ours: float
    theirs: float
    ratio: float
    ratio_low: float | None


async def measure(
    rivals: tuple[Rival, Rival], names: tuple[str, str], size: Size, *, warm: bool
) -> list[Comparison]:
    """Turns of both rivals at every number of clients."""
    compared: list[Comparison] = []
    number = 0
    for clients in size.clients:
        turns: tuple[list[Turn], list[Turn]] = ([], [])
        for round_number in range(size.warm_ups + size.rounds):
            order = (0, 1) if round_number % 2 else (1, 0)
            lengths = [size.words[place % len(size.words)] for place in range(clients)]
            if warm:
                lengths = [max(size.words)] * clients
            prompts = [
                prompt(number + place, words, warm=warm) for place, words in enumerate(lengths)
            ]
            number += clients
            for which in order:
                seen = await turn(rivals[which].url, names[which], prompts, size.tokens)
                if round_number >= size.warm_ups:
                    turns[which].append(seen)
        load = "warm" if warm else "cold"
        compared += [_compare(load, clients, figure, *turns) for figure in Turn.__annotations__]
    return compared


def _compare(
    load: str, clients: int, figure: str, mine: list[Turn], other: list[Turn]
) -> Comparison:
    a = [getattr(one, figure) for one in mine]
    b = [getattr(one, figure) for one in other]
    pair = compare(a, b, higher_is_better=figure in HIGHER_IS_BETTER)
    assert pair.ratio is not None
    return Comparison(
        load=load,
        clients=clients,
        figure=figure,
        ours=pair.ours,
        theirs=pair.theirs,
        ratio=pair.ratio,
        ratio_low=pair.ratio_low,
    )


def run(model: Path, size: Size, rival: str = MLX_LM) -> list[Comparison]:
    """Start both servers, measure, stop them."""
    with ours(model) as mine, theirs(model, rival) as other:
        names = (mine.model_name(), str(model))
        rivals = (mine, other)
        cold = asyncio.run(measure(rivals, names, size, warm=False))
        return cold + asyncio.run(measure(rivals, names, size, warm=True))


def random_model(folder: Path, size: Size) -> Path:
    """A llama of random weights that writes for ever."""
    from tests.material.models import ModelSpec, build_model

    spec = ModelSpec(kind="full", hidden=size.hidden, layers=size.layers, context=8192)
    return build_model(folder / "random", spec)


def table(results: list[Comparison], rival: str) -> str:
    """The figures as a person reads them."""
    lines = [f"load  clients  figure            ours {rival:>17}  ratio (95 % low)"]
    lines += [
        f"{one.load:5} {one.clients:7}  {one.figure:13} {one.ours:9.1f} {one.theirs:17.1f} "
        f"{one.ratio:8.2f} " + ("        –" if one.ratio_low is None else f"{one.ratio_low:9.2f}")
        for one in results
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="the size that the tests run")
    parser.add_argument("--model", type=Path, help="a model folder instead of random weights")
    parser.add_argument(
        "--hidden", type=int, help=f"width of the random model (default {REAL.hidden})"
    )
    parser.add_argument(
        "--layers", type=int, help=f"depth of the random model (default {REAL.layers})"
    )
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        help=f"numbers of clients side by side (default {REAL.clients})",
    )
    parser.add_argument(
        "--rounds", type=int, help=f"turns of each rival that count (default {REAL.rounds})"
    )
    parser.add_argument(
        "--warm-ups", type=int, help=f"turns of each rival before those (default {REAL.warm_ups})"
    )
    parser.add_argument(
        "--rival",
        default=MLX_LM,
        help=f"{', '.join(RIVALS)}, or NAME=PROGRAM where its program is not on the path",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    base = SMALL if options.small else REAL
    size = Size(
        hidden=options.hidden or base.hidden,
        layers=options.layers or base.layers,
        tokens=base.tokens,
        clients=tuple(options.clients or base.clients),
        rounds=options.rounds or base.rounds,
        warm_ups=base.warm_ups if options.warm_ups is None else options.warm_ups,
        words=base.words,
    )
    facts = machine("mlx", "mlx-lm", "mlx-isolate")
    with tempfile.TemporaryDirectory(prefix="mi") as folder:
        model = options.model.absolute() if options.model else random_model(Path(folder), size)
        results = run(model, size, options.rival)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"size: {size}\n" + table(results, options.rival.partition("=")[0]))
    if options.json is not None:
        figures = [asdict(one) for one in results]
        options.json.write_text(json.dumps({"machine": facts, "figures": figures}, indent=1))
    return 0


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main(sys.argv[1:]))
