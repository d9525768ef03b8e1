"""How the first token's time grows with the length of the prompt, ours and mlx_lm.server's.

Both serve one model of random weights on this machine and take turns; every prompt is new to both.

    python -m bench.bench_prompt_length                          # 1k to 8k tokens
    python -m bench.bench_prompt_length --small                  # the size that the tests run
    python -m bench.bench_prompt_length --model FOLDER --tokens 1024 32768
    python -m bench.bench_prompt_length --new-lengths            # no two prompts of one length
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.material.models import ModelSpec, build_model

from bench.leaving import leaving_nothing
from bench.machine import machine
from bench.paired import Pair, compare
from bench.serving_calls import Caller
from bench.serving_load import prompt
from bench.serving_rivals import ours, theirs

# (width and depth of the random model, tokens of the prompts, turns of each)
SMALL = (64, 2, (64, 256), 1)
REAL = (512, 8, (1024, 2048, 4096, 8192), 5)
CALIBRATION_WORDS = 100


def run(
    model: Path, lengths: tuple[int, ...], rounds: int, *, are_new: bool = False
) -> dict[int, Pair]:
    """Seconds to the first text by the number of prompt tokens that were counted.

    Args:
        are_new: whether each turn's prompt is a word longer than the one before.
    """
    with ours(model) as mine, theirs(model) as other:
        callers = (Caller(mine.port, mine.model_name()), Caller(other.port, str(model)))
        none, some = (
            callers[0].first_text(prompt(0, words, warm=False)).prompt_tokens
            for words in (0, CALIBRATION_WORDS)
        )
        callers[1].first_text(prompt(0, CALIBRATION_WORDS, warm=False))
        a_word = (some - none) / CALIBRATION_WORDS
        pairs: dict[int, Pair] = {}
        number = 1
        for length in lengths:
            words = round((length - none) / a_word)
            taken: tuple[list[float], list[float]] = ([], [])
            tokens = 0
            # The first turn of a length warms up.
            for turn in range(rounds + 1):
                messages = prompt(1000 + number, words + turn * are_new, warm=False)
                number += 1
                for which in (0, 1) if turn % 2 else (1, 0):
                    first = callers[which].first_text(messages)
                    tokens = first.prompt_tokens
                    if turn:
                        taken[which].append(first.ttft_s)
            pairs[tokens] = compare(*taken, higher_is_better=False)
        return pairs


def table(pairs: dict[int, Pair]) -> str:
    """The figures as a person reads them."""
    lines = ["prompt tokens  TTFT s, ours  mlx_lm.server  ratio  (95 % low)  ours, ms a token"]
    lines += [
        f"{tokens:13} {pair.ours:13.3f} {pair.theirs:14.3f} {pair.ratio or 0:6.2f} "
        f"{pair.ratio_low or 0:11.2f} {pair.ours / tokens * 1000:17.3f}"
        for tokens, pair in pairs.items()
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
        "--tokens", type=int, nargs="+", help=f"lengths of prompts (default {REAL[2]})"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"turns of each rival at a length (default {REAL[3]})"
    )
    parser.add_argument("--new-lengths", action="store_true", help="each turn is a word longer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    hidden, layers, lengths, rounds = SMALL if options.small else REAL
    lengths = tuple(options.tokens or lengths)
    facts = machine("mlx", "mlx-lm", "mlx-isolate")
    with tempfile.TemporaryDirectory(prefix="mi") as folder:
        spec = ModelSpec(
            kind="full", hidden=hidden, layers=layers, context=max(lengths) * 5 // 4 + 1024
        )
        model = options.model.absolute() if options.model else Path(folder) / "random"
        if options.model is None:
            build_model(model, spec)
        pairs = run(model, lengths, options.rounds or rounds, are_new=options.new_lengths)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"hidden {hidden}, layers {layers}\n" + table(pairs))
    if options.json is not None:
        figures = {str(tokens): asdict(pair) for tokens, pair in pairs.items()}
        options.json.write_text(json.dumps({"machine": facts, "figures": figures}, indent=1))
    return 0


if __name__ == "__main__":
    with leaving_nothing():
        sys.exit(main(sys.argv[1:]))
