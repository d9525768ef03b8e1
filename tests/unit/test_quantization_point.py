"""Where KV quantization begins, against a plain walk over the offsets that a cold run visits."""

import pytest

from mlx_isolate_engine.generation.quantization import begins_at, piece


def walk(prompt_tokens: int, start: int, step: int) -> int:
    """Run a prompt as the serial lane does and tell at which offset mlx-lm would quantize."""
    offset = 0
    while offset < prompt_tokens - 1:
        offset += min(piece(offset, step=step), prompt_tokens - 1 - offset)
        if offset >= start:
            return offset
    while True:
        offset += 1
        if offset >= start:
            return offset


@pytest.mark.parametrize("step", [1, 4, 16])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 16, 17, 40])
def test_the_point_is_where_a_cold_run_meets_it(start: int, step: int) -> None:
    for prompt_tokens in range(1, 60):
        assert begins_at(prompt_tokens, start=start, step=step) == walk(prompt_tokens, start, step)


@pytest.mark.parametrize("reused", range(20))
def test_steps_after_a_hit_end_where_a_cold_runs_do(reused: int) -> None:
    done, ends = reused, set[int]()
    while done < 64:
        done += piece(done, step=16)
        ends.add(done)
    assert ends <= {16, 32, 48, 64}
