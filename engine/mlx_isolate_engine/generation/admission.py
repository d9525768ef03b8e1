"""Which waiting prompts join the batch next: short ones are not stuck behind long ones.

Pure: takes the state of the batch and the clock, answers with positions in the waiting list.
"""

from collections.abc import Sequence

import msgspec

from mlx_isolate_engine.generation.few_shapes import rounded_keys

# A prompt that waited so long goes before all others, in order of arrival; without it a stream of
# short prompts starves a long one.
AGED_AFTER_S = 10.0
# A prompt of at most this share of a step counts as short, and so many tokens always do.
SHORT_SHARE = 16
SHORT_TOKENS = 64
# Room kept for what a row will generate, in tokens, when memory is projected.
GENERATION_HEADROOM = 256
# Rows have room for whole steps of so many tokens (layerwise.STEP).
CAPACITY_STEP = 256


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting prompt.

    Attributes:
        tokens: still to run.
        length: all of them.
        since: when it came, in seconds.
        max_tokens: that may be generated.
    """

    tokens: int
    length: int
    since: float
    max_tokens: int


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Memory for rows, counted in tokens of one row.

    Attributes:
        tokens: rows times what each of them takes may not exceed it.
        row_tokens: what a row takes however long it is (windows, recurrent state).
        few_shapes: whether prompts have room for round numbers of tokens (see few_shapes.py).
    """

    tokens: int
    row_tokens: float = 0.0
    few_shapes: bool = False


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What runs now.

    Attributes:
        prefilling: tokens still to run, for each prompt in the batch.
        decoding: rows that generate.
        tokens_left: that the row which may generate most may still generate.
        longest: tokens in the longest row, cached ones included.
        rows_max: rows in all.
        prompts_max: short prompts at once, and long prompts at once.
        allowance: prompt tokens that one step may run.
        step_size: tokens of one prompt that one step may run.
        room: what the rows may take, each as much as the longest; None = not limited.
    """

    prefilling: Sequence[int]
    decoding: int
    tokens_left: int
    longest: int
    rows_max: int
    prompts_max: int
    allowance: int
    step_size: int
    room: Room | None = None


def choose(waiting: Sequence[Waiter], batch: Batch, now: float) -> list[int]:
    """Positions in `waiting` that join now, in the order in which they join.

    Long prompts run side by side only if one step runs a whole piece of each: cut smaller, all of
    them would finish as late as the last one.

    Who has waited long and needs the room of rows that run gets it when these have ended. Until
    then nobody joins who may generate more than half of what they may, or the last of them would
    always have company. (All who do fit would wait for nothing behind a strict order of arrival.)
    """
    short_tokens = max(SHORT_TOKENS, batch.allowance // SHORT_SHARE)
    rows = len(batch.prefilling) + batch.decoding
    longest = batch.longest
    long_left = [tokens for tokens in batch.prefilling if tokens > short_tokens]
    longs, widest = len(long_left), min(max(long_left, default=0), batch.step_size)
    shorts = len(batch.prefilling) - longs

    chosen: list[int] = []
    is_held = False
    for position in _order(waiting, now, short_tokens):
        waiter = waiting[position]
        is_short = waiter.tokens <= short_tokens
        if rows >= batch.rows_max:
            break
        if (shorts if is_short else longs) >= batch.prompts_max:
            continue
        piece = max(widest, min(waiter.tokens, batch.step_size))
        if not is_short and longs and piece * (longs + 1) > batch.allowance:
            continue
        grown = max(longest, waiter.length + GENERATION_HEADROOM)
        if rows and not fits(rows + 1, grown, batch.room):
            is_held = is_held or now - waiter.since >= AGED_AFTER_S
            continue
        if is_held and waiter.max_tokens * 2 > batch.tokens_left:
            continue
        chosen.append(position)
        rows, longest = rows + 1, grown
        if is_short:
            shorts += 1
        else:
            longs, widest = longs + 1, piece
    return chosen


def _order(waiting: Sequence[Waiter], now: float, short_tokens: int) -> list[int]:
    """Aged ones by arrival, then short ones by arrival, then long ones by length."""

    def rank(position: int) -> tuple[int, float, int]:
        waiter = waiting[position]
        if now - waiter.since >= AGED_AFTER_S:
            return (0, waiter.since, position)
        if waiter.tokens <= short_tokens:
            return (1, waiter.since, position)
        return (2, float(waiter.tokens), position)

    return sorted(range(len(waiting)), key=rank)


def fits(rows: int, longest: int, room: Room | None) -> bool:
    """Whether there is memory for so many rows, the longest of which has so many tokens."""
    if room is None:
        return True
    capacity = -(-longest // CAPACITY_STEP) * CAPACITY_STEP
    if room.few_shapes:
        capacity = max(capacity, rounded_keys(longest))
    return rows * (capacity + room.row_tokens) <= room.tokens
