"""How many prompt tokens one generation step may run, so that running streams do not stand still.

Pure: fed with measured step times, it answers with an allowance in tokens, and with the width of
the next piece. Widths that cut a prompt are the step size halved some times: a GPU prepares each
new shape once, so few shapes are used again and again.
"""

from collections import deque

# Share of max_step_s that a step aims at: measured rates wobble, and the promise to a running
# stream is the whole of it.
TARGET_SHARE = 0.6
# While nobody streams a step may take so many times max_step_s: only those who arrive wait for it.
QUIET_STEPS = 2.0
# Before anything has been measured a step runs so many tokens; more could be a long first step.
FIRST_ALLOWANCE = 128
# Below this a step's fixed cost outweighs its tokens, and prefill would crawl.
SMALLEST_ALLOWANCE = 16
# A measured step is taken as a promise for steps at most so many times larger.
GROW_MOST = 4
# One measurement lowers the rate at most by this factor: a single odd step (a page fault) must not
# stop prefill.
SHRINK_MOST = 0.25
# Whole pieces of prompts that run side by side in a step. A fast machine is full with two; with
# more, the first prompts of a crowd wait for the last ones.
PIECES_MAX = 2
# They are fewer beside a running stream, which waits for all of them: one of more than half so many
# tokens (H200, 8B, two prompts of 1,320 tokens beside six streams: a gap of 165 ms with two pieces,
# about 60 with one). Small ones cost a pass each, and a stream gains nothing if they run alone.
BESIDE_TOKENS = 2048
# The best of so many last measurements counts: what disturbs a step makes it slower, never faster.
RATES_KEPT = 3
# Below this share of the known rate the machine has become slower, and older measurements are void.
SLOWER_SHARE = 0.5
# Shapes remembered as seen; without a limit odd prompt lengths would add up for ever.
SHAPES_KEPT = 4096


class PrefillPace:
    """Keeps the measured rate, in prompt tokens a second including padding.

    Args:
        max_step_s: the longest a running stream should wait for its next token.
        step_size: tokens of one prompt that one step runs at most.
    """

    def __init__(self, max_step_s: float, step_size: int) -> None:
        assert max_step_s > 0 and step_size > 0
        self._max_step_s = max_step_s
        self._target_s = max_step_s * TARGET_SHARE
        self._step_size = step_size
        self._rates: deque[float] = deque(maxlen=RATES_KEPT)
        self._proven = FIRST_ALLOWANCE // GROW_MOST
        self._shapes: set[tuple[int, int]] = set()

    @property
    def step_size(self) -> int:
        """Tokens of one prompt that one step runs at most."""
        return self._step_size

    @property
    def is_measured(self) -> bool:
        """Whether the rate is known."""
        return bool(self._rates)

    def allowance(self, *, is_quiet: bool = False) -> int:
        """Prompt tokens that the next step may run.

        Args:
            is_quiet: nobody waits for the next token of a running stream.
        """
        largest = self._step_size * PIECES_MAX
        if not is_quiet:
            largest = max(self._step_size, min(largest, BESIDE_TOKENS))
        if not self._rates:
            return min(FIRST_ALLOWANCE, largest)
        seconds = self._max_step_s * QUIET_STEPS if is_quiet else self._target_s
        tokens = min(max(self._rates) * seconds, self._proven * GROW_MOST)
        return min(max(int(tokens), SMALLEST_ALLOWANCE), largest)

    def width(self, longest: int, rows: int, *, is_quiet: bool = False) -> int:
        """Tokens of each of `rows` prompts in the next step, of which the longest has `longest`.

        The rest of a prompt runs in one piece; a piece that is no rest is the step size, halved
        until `rows` of it fit.
        """
        share = self.allowance(is_quiet=is_quiet) // max(1, rows)
        if longest <= min(share, self._step_size):
            return max(1, longest)
        width = self._step_size
        while width > max(1, share):
            width //= 2
        return max(1, width)

    def seconds(self, tokens: int) -> float:
        """How long so many tokens should take; max_step_s as long as nothing has been measured."""
        return tokens / max(self._rates) if self._rates else self._max_step_s

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Learn from a step that ran `rows` pieces of `width`, decoding included."""
        tokens = rows * width
        if tokens <= 0:
            return
        is_first = not self._shapes
        is_new = self._is_new(rows, width)
        if is_first:
            return  # The first step of a process compiles.
        if seconds < self._target_s and tokens < self.allowance() / 2:
            return  # A small step says nothing about how a full one would do.
        rate = tokens / max(seconds, 1e-6)
        known = max(self._rates, default=0.0)
        if is_new and rate < known:
            return  # The first step of a shape may compile; it is seen again if it matters.
        if rate < known * SLOWER_SHARE:
            self._rates.clear()
        self._rates.append(max(rate, known * SHRINK_MOST))
        self._proven = max(self._proven, tokens)

    def _is_new(self, rows: int, width: int) -> bool:
        shape = (rows, width)
        if shape in self._shapes:
            return False
        if len(self._shapes) >= SHAPES_KEPT:
            self._shapes.clear()
        self._shapes.add(shape)
        return True
