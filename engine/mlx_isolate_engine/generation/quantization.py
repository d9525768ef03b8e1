"""Where a prompt's KV state becomes quantized under `--kv-bits`, and what may be reused then; pure.

mlx-lm quantizes a cache after the first step that ends at or beyond `quantized_kv_start`: what ran
before saw full precision, what runs after sees quantized state. So a state of n tokens is the state
of another prompt's n tokens only if both began to be quantized at the same token, and at or before
the n-th. Anything else would make a warm answer differ from a cold one.
"""


def begins_at(prompt_tokens: int, *, start: int, step: int) -> int:
    """Tokens in the cache when a prompt run from its beginning becomes quantized.

    Args:
        prompt_tokens: length of the prompt; its last token runs by itself, as the first step.
        start: `quantized_kv_start`.
        step: prompt tokens of one prefill step; steps end at multiples of it.
    """
    start = max(1, start)
    last = prompt_tokens - 1
    if start > last:
        return start  # while it answers: there every token is a step
    return min(-(-start // step) * step, last)


def piece(done: int, *, step: int) -> int:
    """Tokens of the next prefill step after `done`, so that steps end where a cold run's do."""
    return step - done % step


def namespace_at(namespace: str, begin: int) -> str:
    """Where quantized state lies that became so after `begin` tokens."""
    return f"{namespace} quantized at {begin}"
