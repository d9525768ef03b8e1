"""mlx-lm's own greedy generation, token for token, and how a difference is judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from tests.integration.generation_rig import TinyLoaded, load_tiny

# A batch adds floats in another order: greedy text may flip where two tokens are this close.
NEAR_TIE = 1e-3
# Of a test's prompts so many must be the same throughout, or the tolerance would hide a fault.
IDENTICAL_SHARE = 0.95


@dataclass(frozen=True)
class OracleRun:
    """Greedy tokens, and the gap between the two best log probabilities at each."""

    tokens: list[int]
    gaps: list[float]


def run_oracle(model: Any, prompt: Sequence[int], count: int) -> OracleRun:
    """What mlx_lm.generate.generate_step says to a prompt, alone. On the model's own thread."""
    tokens: list[int] = []
    gaps: list[float] = []
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=count):
        pair: Any = mx.topk(logprobs, 2).tolist()
        best = sorted(pair)
        tokens.append(int(token))
        gaps.append(best[1] - best[0])
    return OracleRun(tokens, gaps)


def load_with_oracle(prompts: Sequence[Sequence[int]], count: int, runs: list[OracleRun]) -> Any:
    """A loader that also fills `runs` with the oracle's answers, on the generation thread."""

    def load(folder: Path) -> TinyLoaded:
        loaded = load_tiny(folder)
        runs.extend(run_oracle(loaded.model, prompt, count) for prompt in prompts)
        return loaded

    return load


def check_answers(answers: Sequence[Sequence[int]], runs: Sequence[OracleRun]) -> None:
    """Every answer is the oracle's, but for flips at near ties, which are few."""
    identical = 0
    for answer, run in zip(answers, runs, strict=True):
        expected = run.tokens[: len(answer)]
        if list(answer) == expected:
            identical += 1
            continue
        flip = next(i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b)
        assert run.gaps[flip] < NEAR_TIE, f"token {flip}: {answer[flip]}, not {expected[flip]}"
    assert identical >= IDENTICAL_SHARE * len(runs), f"{identical} of {len(runs)} identical"
