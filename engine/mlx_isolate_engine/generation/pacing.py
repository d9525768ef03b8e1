"""How many prompt tokens one generation step may run, so that running streams do not stand still.

Pure: fed with measured step times, it answers with an allowance in tokens.
"""

# Share of max_step_s that a step aims at: measured rates wobble, and the promise to a running
# stream is the whole of it.
TARGET_SHARE = 0.6
# Before anything has been measured a step runs so many tokens; more could be a long first step.
FIRST_ALLOWANCE = 128
# Below this a step's fixed cost outweighs its tokens, and prefill would crawl.
SMALLEST_ALLOWANCE = 16
# One measurement changes the allowance at most by these factors: a single odd step (a page fault,
# a compiled kernel) must neither stop prefill nor open the gate.
SHRINK_MOST = 0.25
GROW_MOST = 2.0


class PrefillPace:
    """Keeps the allowance for one step, in prompt tokens including padding.

    Args:
        max_step_s: the longest a running stream should wait for its next token.
        largest: tokens that are never exceeded, however fast the machine is.
    """

    def __init__(self, max_step_s: float, largest: int) -> None:
        assert max_step_s > 0 and largest > 0
        self._target_s = max_step_s * TARGET_SHARE
        self._largest = largest
        self._allowance = float(min(FIRST_ALLOWANCE, largest))

    @property
    def allowance(self) -> int:
        """Prompt tokens that the next step may run."""
        return int(self._allowance)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step that ran `tokens` prompt tokens in `seconds`, decoding included."""
        if tokens <= 0:
            return
        if seconds < self._target_s and tokens < self._allowance / 2:
            return  # A small step says nothing about how a full one would do.
        affordable = tokens * self._target_s / max(seconds, 1e-6)
        lowest = self._allowance * SHRINK_MOST
        highest = self._allowance * GROW_MOST
        wanted = min(max(affordable, lowest), highest)
        self._allowance = min(max(wanted, float(SMALLEST_ALLOWANCE)), float(self._largest))

    def row_share(self, rows: int) -> int:
        """Tokens for each of `rows` prompts that run together; at least one."""
        return max(1, self.allowance // max(1, rows))
