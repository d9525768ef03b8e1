"""What mlx-lm itself generates, computed in a process with the same BLAS as an engine has.

`python -m tests.e2e.oracle FOLDER` reads a JSON list of requests from standard input, each with
`prompt` (token ids or text) or `messages`, and `max_tokens`; it writes a JSON list of results.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlx_isolate_supervisor.engines.blas import choose_blas

ORACLE_DEADLINE_S = 300.0


def oracle(folder: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Greedy text and tokens of mlx-lm's `stream_generate`, one request after the other.

    Returns:
        For each request: `text`, `pieces` (the text of each token), and `gaps`, the difference of
        the two best log probabilities at each step.
    """
    blas = choose_blas("auto")
    environment = os.environ | blas.environment(os.environ.get("LD_PRELOAD"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.oracle", str(folder)],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=ORACLE_DEADLINE_S,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def _generate(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm import stream_generate

    if "messages" in request:
        prompt = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)
    else:
        prompt = tokenizer.encode(request["prompt"])
    text, pieces = "", list[str]()
    held = 0  # spaces that mlx-lm gives out with the token behind them
    gaps: list[float] = []
    for step in stream_generate(model, tokenizer, prompt, max_tokens=request["max_tokens"]):
        if not step.text and tokenizer.decode([step.token]) == " ":
            pieces.append(" ")
            held += 1
        else:
            pieces.append(step.text[held:])
            held = 0 if step.text else held
        text += step.text
        best: Any = mx.topk(step.logprobs, 2).tolist()
        gaps.append(abs(best[0] - best[1]))
    assert "".join(pieces) == text
    return {"text": text, "pieces": pieces, "gaps": gaps}


def main() -> None:
    """Load the folder once and answer all requests."""
    from mlx_lm import load

    model, tokenizer = load(sys.argv[1])[:2]
    json.dump(
        [_generate(model, tokenizer, request) for request in json.load(sys.stdin)], sys.stdout
    )


if __name__ == "__main__":
    main()
