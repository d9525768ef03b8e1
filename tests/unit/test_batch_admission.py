"""Who joins the batch next."""

from mlx_isolate_engine.generation.admission import (
    AGED_AFTER_S,
    Batch,
    Room,
    Waiter,
    choose,
    fits,
)


def waiter(
    tokens: int, since: float = 0.0, length: int | None = None, max_tokens: int = 100
) -> Waiter:
    whole = tokens if length is None else length
    return Waiter(tokens=tokens, length=whole, since=since, max_tokens=max_tokens)


def batch(
    prefilling: tuple[int, ...] = (),
    decoding: int = 0,
    allowance: int = 400,
    longest: int = 0,
    room: Room | None = None,
    rows_max: int = 32,
    step_size: int = 2048,
    tokens_left: int = 0,
) -> Batch:
    return Batch(
        prefilling=prefilling,
        decoding=decoding,
        longest=longest,
        rows_max=rows_max,
        prompts_max=8,
        allowance=allowance,
        step_size=step_size,
        tokens_left=tokens_left,
        room=room,
    )


def test_a_short_prompt_joins_beside_long_ones_at_once() -> None:
    long = [waiter(6000) for _ in range(7)]
    assert choose([*long, waiter(12)], batch(prefilling=(5000,)), now=0.0) == [7]


def test_long_prompts_run_one_by_one_on_a_slow_machine() -> None:
    assert choose([waiter(6000), waiter(6000)], batch(allowance=300), now=0.0) == [0]


def test_long_prompts_run_side_by_side_on_a_fast_machine() -> None:
    waiting = [waiter(6000) for _ in range(10)]
    assert len(choose(waiting, batch(allowance=100_000), now=0.0)) == 8


def test_long_prompts_run_side_by_side_as_far_as_one_step_runs_a_piece_of_each() -> None:
    waiting = [waiter(tokens) for tokens in (6000, 1000, 1000, 1000, 1000, 1000)]
    assert choose(waiting, batch(allowance=4096), now=0.0) == [1, 2, 3, 4]
    assert choose(waiting[:1], batch(allowance=4096, prefilling=(1500,)), now=0.0) == [0]
    assert choose(waiting[:1], batch(allowance=4096, prefilling=(1500, 300)), now=0.0) == []


def test_the_shorter_of_two_long_prompts_goes_first() -> None:
    assert choose([waiter(9000), waiter(2000)], batch(), now=0.0) == [1]


def test_a_prompt_that_has_waited_long_goes_before_all_others() -> None:
    waiting = [waiter(12, since=20.0), waiter(9000, since=0.0), waiter(500, since=19.0)]
    assert choose(waiting, batch(), now=AGED_AFTER_S)[0] == 1


def test_cached_tokens_do_not_make_a_prompt_long() -> None:
    waiting = [waiter(10, length=9000)]
    assert choose(waiting, batch(prefilling=(5000,)), now=0.0) == [0]


def test_rows_are_limited() -> None:
    waiting = [waiter(5) for _ in range(10)]
    assert len(choose(waiting, batch(decoding=30), now=0.0)) == 2
    assert choose(waiting, batch(decoding=32), now=0.0) == []


def test_short_prompts_at_once_are_limited() -> None:
    assert len(choose([waiter(5) for _ in range(20)], batch(), now=0.0)) == 8


def test_padded_memory_is_limited() -> None:
    full = batch(decoding=3, longest=10_000, room=Room(tokens=35_000))
    assert choose([waiter(10)], full, now=0.0) == []
    room = batch(decoding=2, longest=10_000, room=Room(tokens=35_000))
    assert choose([waiter(10)], room, now=0.0) == [0]


def test_what_a_row_takes_however_long_it_is_counts_for_the_rows_that_are_there() -> None:
    windows = Room(tokens=35_000, row_tokens=1_500.0)
    assert choose([waiter(10)], batch(decoding=1, longest=10_000, room=windows), now=0.0) == [0]
    assert choose([waiter(10)], batch(decoding=2, longest=10_000, room=windows), now=0.0) == []


def test_prompts_in_few_shapes_need_room_for_round_numbers() -> None:
    plain, rounded = Room(tokens=30_000), Room(tokens=30_000, few_shapes=True)
    assert fits(3, 9_900, plain) and not fits(3, 9_900, rounded)
    assert fits(3, 9_216, rounded)
    assert fits(20, 1_500, Room(tokens=30_720, few_shapes=True))  # 1,536 of each


def test_a_prompt_larger_than_the_memory_runs_alone() -> None:
    assert choose([waiter(50_000)], batch(room=Room(tokens=100)), now=0.0) == [0]
    assert choose([waiter(50_000)], batch(decoding=1, room=Room(tokens=100)), now=0.0) == []


def test_nobody_who_may_outlast_the_batch_goes_before_a_prompt_that_waits_for_its_room() -> None:
    full = batch(decoding=3, longest=500, room=Room(tokens=12_000), tokens_left=200)
    waiting = [waiter(9_000), waiter(5, since=9.0), waiter(5, since=9.0, max_tokens=101)]
    assert choose(waiting, full, now=AGED_AFTER_S - 1) == [1, 2]
    assert choose(waiting, full, now=AGED_AFTER_S) == [1]
