"""In which pieces prompts run on devices of any speed, by the lane itself on a simulated clock."""

from pathlib import Path
from typing import Any

import pytest

from mlx_isolate_engine.generation import layerwise
from mlx_isolate_engine.generation.admission import AGED_AFTER_S, Room
from mlx_isolate_engine.generation.entrance import COALESCE_S
from mlx_isolate_engine.generation.rehearsal import RESPAWN_S, lives, widths, widths_between
from tests.fakes.simulated_device import FAST_GPU, SMALL_CPU, SimulatedLane, Speed

MAX_STEP_S = 0.5
# A device on which only launches and tokens cost time.
GPU = Speed(tokens_per_s=100_000, pass_s=0.005)


@pytest.fixture
def gpu(tmp_path: Path) -> SimulatedLane:
    return SimulatedLane(tmp_path, FAST_GPU, rehearsed=True)


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (200, [(1, 199)]),
        (2000, [(1, 1999)]),
        (30_000, [*[(1, 2048)] * 14, (1, 30_000 - 1 - 14 * 2048)]),
    ],
)
def test_a_fast_device_runs_a_prompt_in_whole_steps(
    gpu: SimulatedLane, tokens: int, pieces: list[tuple[int, int]]
) -> None:
    gpu.finish(gpu.ask(tokens))
    assert gpu.prefills == pieces


def test_a_fast_device_runs_whole_steps_beside_a_stream_too(gpu: SimulatedLane) -> None:
    stream = gpu.ask(8, 100_000)
    gpu.finish(gpu.ask(2))
    gpu.model.passes.clear()
    gpu.finish(gpu.ask(10_000))
    assert gpu.prefills == [*[(1, 2048)] * 4, (1, 9999 - 4 * 2048)]
    assert stream.largest_gap_s < MAX_STEP_S


def test_long_prompts_run_one_after_the_other_beside_a_stream(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    stream = lane.ask(8, 100_000)
    lane.finish(lane.ask(2))
    lane.model.passes.clear()
    lane.finish(lane.ask(1300), lane.ask(1400))
    assert lane.prefills == [(1, 1299), (1, 1399)]
    assert stream.largest_gap_s < 0.025


def test_small_pieces_run_side_by_side_beside_a_stream_too(tmp_path: Path) -> None:
    """One at a time, thirty prompts beside a stream took twice as long, and it gained nothing."""
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True, prefill_step_size=512)
    stream = lane.ask(8, 100_000)
    lane.finish(lane.ask(2))
    lane.model.passes.clear()
    lane.finish(lane.ask(1300), lane.ask(1300))
    assert lane.prefills == [(2, 512), (2, 512), (2, 1299 - 2 * 512)]
    assert stream.largest_gap_s < 0.025


def test_a_cold_fast_device_is_at_full_width_in_a_few_steps(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, FAST_GPU)
    lane.finish(lane.ask(20_000))
    assert [width for _, width in lane.prefills[:5]] == [128, 128, 512, 512, 2048]


def test_who_leaves_before_any_of_its_prompt_has_run_takes_nobody_along(tmp_path: Path) -> None:
    """mlx-lm hands out no row of a batch in which nothing has run: that ended the engine."""
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True, cached=True)
    opening = lane.ask(300, 50)
    while not lane.prefills:
        lane.step()
    lane.step()  # its first token is on its way, and a long prompt waits for that
    held = lane.ask(5000, namespace="of its own")
    lane.step()
    lane.lane.drop(held.ticket)
    lane.finish(opening)
    assert lane.counters.active == 0


def test_a_crowd_of_short_prompts_joins_in_one_pass(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    asked = [lane.ask(14) for _ in range(4)]
    lane.finish(*asked)
    assert lane.prefills == [(4, 13)]
    assert max(each.first_token_s for each in asked) < 0.02


def test_long_prompts_of_which_all_but_the_end_is_cached_join_as_the_short_ones_they_are(
    tmp_path: Path,
) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True, cached=True)
    lane.finish(lane.ask(5000))
    lane.model.passes.clear()
    asked = [lane.ask(5000, end=f"{number} is mine") for number in range(6)]
    lane.finish(*asked)
    assert lane.prefills == [(6, 8)]
    assert max(each.first_token_s for each in asked) < 0.02


def test_who_comes_waits_a_moment_for_those_who_are_being_prepared(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    lane.counters.coming = 2
    first = lane.ask(14)
    assert lane.lane.wait_s() == pytest.approx(COALESCE_S)
    lane.step()
    lane.counters.coming = 0
    asked = [first, lane.ask(14), lane.ask(14)]
    assert lane.lane.wait_s() == 0
    lane.finish(*asked)
    assert lane.prefills == [(3, 13)]


def test_nobody_waits_longer_than_a_moment_for_who_never_comes(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    lane.counters.coming = 1
    asked = lane.ask(14)
    lane.clock.now += COALESCE_S
    assert lane.lane.wait_s() == 0
    lane.finish(asked)
    assert lane.prefills == [(1, 13)]


def test_streams_go_on_while_others_wait_for_company(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    stream = lane.ask(8, 1000)
    lane.finish(lane.ask(2))
    lane.counters.coming = 1
    lane.ask(14)
    assert lane.lane.wait_s() == 0
    said = len(stream.texts)
    lane.step()
    assert len(stream.texts) == said + 1


def test_the_second_half_of_a_crowd_does_not_wait_for_the_first_ones_tokens(
    tmp_path: Path,
) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    asked = [lane.ask(14) for _ in range(16)]
    lane.finish(*asked)
    assert lane.prefills == [(8, 13), (8, 13)]
    assert max(each.first_token_s for each in asked) < 0.04


@pytest.mark.parametrize("is_large", [True, False])
def test_nobody_joins_large_rows_that_leave_and_would_be_copied_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    beside: list[int] = []
    extend = layerwise._Prompts.extend  # pyright: ignore[reportPrivateUsage]

    def note(self: Any, batch: Any) -> None:
        beside.append(len(self))
        extend(self, batch)

    monkeypatch.setattr(layerwise._Prompts, "extend", note)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(layerwise, "TOGETHER", 0 if is_large else 1 << 30)
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True, prompt_concurrency=4)
    beside.clear()
    asked = [lane.ask(14) for _ in range(12)]
    lane.finish(*asked)
    assert beside == ([0, 0, 0] if is_large else [0, 4, 4])
    assert lane.prefills == [(4, 13)] * 3
    # Each group comes one step later at most.
    last = max(each.first_token_s for each in asked)
    assert last < (0.06 if is_large else 0.05)


def test_prompts_that_fill_a_step_together_run_side_by_side_and_the_rest_after_them(
    tmp_path: Path,
) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    asked = [lane.ask(1000) for _ in range(8)]
    lane.finish(*asked)
    assert lane.prefills == [(4, 999), (4, 512), (4, 487)]
    # The first four have their token before the others' prompts run.
    assert max(each.first_token_s for each in asked[:4]) < 0.06


def test_first_tokens_do_not_wait_for_ever_longer_prompts_nor_these_for_ever(
    tmp_path: Path,
) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True)
    long = lane.ask(20_000)
    chats = [lane.ask(2, 1)]
    while not long.texts:
        chats.append(lane.ask(2, 1))
        lane.step()
    assert long.first_token_s < 1.5
    assert max(each.first_token_s for each in chats if each.texts) < 0.1


def test_a_prompt_that_needs_the_room_of_others_does_not_wait_for_ever(tmp_path: Path) -> None:
    slow = Speed(tokens_per_s=100_000, pass_s=0.1)
    lane = SimulatedLane(tmp_path, slow, rehearsed=True, room=Room(tokens=4096))
    chats, long = [lane.ask(2, 50), lane.ask(2, 100)], lane.ask(3000)
    for _ in range(8):
        lane.finish(chats[-2])
        if long.texts:
            break
        chats.append(lane.ask(2, 100))
    assert long.first_token_s < AGED_AFTER_S + 11


def test_rows_whose_readers_come_back_wait_for_room_before_anybody_new(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True, room=Room(tokens=4096))
    first = [lane.ask(1500) for _ in range(2)]
    while not all(one.texts for one in first):
        lane.step()
    for one in first:
        one.ticket.outbox.written = 1 << 30
    lane.step()
    assert all(one.ticket.is_parked for one in first)
    second = [lane.ask(1500, 50), lane.ask(1500, 20)]
    while not all(one.texts for one in second):
        lane.step()
    for one in first:
        one.ticket.outbox.written = 0
        lane.lane.resume(one.ticket)
    last = lane.ask(1500)
    lane.finish(*first)
    assert max(each.rows for each in lane.model.passes) == 2
    assert not last.texts
    lane.finish(*second, last)


def test_rows_that_end_together_are_told_before_any_is_kept(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True, cached=True, seconds_to_keep=0.05)
    rows = [lane.ask(60 + 10 * row, max_tokens=8) for row in range(8)]
    lane.finish(*rows)
    assert len({row.texts[-1] for row in rows}) == 1


@pytest.mark.case("29")
def test_a_slow_device_keeps_a_stream_running_and_cuts_in_few_shapes(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, SMALL_CPU)
    stream = lane.ask(8, 100_000)
    lane.finish(lane.ask(2))
    lane.finish(*[lane.ask(6000) for _ in range(8)])
    assert stream.largest_gap_s < MAX_STEP_S
    cut = {width for _, width in lane.prefills if width & (width - 1) == 0}
    assert len(cut) <= 4
    assert max(width for _, width in lane.prefills) <= 512


def test_a_slow_device_runs_larger_pieces_while_nobody_streams(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, SMALL_CPU)
    lane.finish(lane.ask(10_000))
    assert lane.prefills[:4] == [(1, 128), (1, 128), (1, 512), (1, 1024)]
    assert len(lane.prefills) < 15


def test_a_rehearsal_runs_every_shape_and_leaves_nothing(gpu: SimulatedLane) -> None:
    shapes = {(each.rows, each.width) for each in gpu.rehearsal}
    assert {(1, width) for width in (2048, 1024, 512, 256, 128, 64, 32, 16)} <= shapes
    assert {(rows, 1) for rows in (16, 8, 4, 2, 1)} <= shapes
    # A prompt that goes on sees more than its piece, with a wide one and with a short one.
    places = [each.width for each in gpu.rehearsal]
    assert (2048, 2048, 80, 1) in zip(places, places[1:], places[2:], places[3:], strict=False)
    assert not gpu.lane.has_work()


def test_where_shapes_are_few_a_rehearsal_runs_each_width_of_a_prompt(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, GPU, rehearsed=True, few_shapes=True)
    rehearsed = {each.width for each in lane.rehearsal}
    asked = [lane.ask(length) for length in (17, 100, 611, 800, 1300, 2000)]
    lane.finish(*asked)
    lane.finish(*(lane.ask(length) for length in range(20, 2048, 150)))
    assert {width for _, width in lane.prefills} <= rehearsed
    assert len(rehearsed) <= 30
    hurried = SimulatedLane(tmp_path / "hurried", FAST_GPU, rehearsed=RESPAWN_S, few_shapes=True)
    assert all(each.width & (each.width - 1) == 0 for each in hurried.rehearsal)


def test_a_rehearsal_leaves_out_what_would_take_long(tmp_path: Path) -> None:
    lane = SimulatedLane(tmp_path, Speed(tokens_per_s=300, pass_s=0.01), rehearsed=True)
    assert max(each.width for each in lane.rehearsal) == 256


def test_a_rehearsal_ends_where_kernels_take_for_ever(tmp_path: Path) -> None:
    slow = Speed(tokens_per_s=100_000, pass_s=0.01, new_shape_s=10.0)
    lane = SimulatedLane(tmp_path, slow, rehearsed=True)
    took = lane.rehearsal[-1].at - lane.rehearsal[0].at
    assert took < 90


def test_an_engine_that_follows_a_dead_one_is_ready_soon(tmp_path: Path) -> None:
    slow = Speed(tokens_per_s=100_000, pass_s=0.01, new_shape_s=0.5)
    lane = SimulatedLane(tmp_path, slow, rehearsed=RESPAWN_S)
    assert lane.rehearsal[-1].at - lane.rehearsal[0].at < RESPAWN_S + 2.0
    assert (1, 1) in {(each.rows, each.width) for each in lane.rehearsal}


def test_rehearsed_widths_stay_below_the_context() -> None:
    assert widths(2048, 600) == [16, 32, 64, 128, 256, 512]
    assert widths(8, 600) == []
    assert widths_between(256, 150) == [48, 80, 96, 112]
    assert widths_between(8, 600) == []


def test_a_rehearsed_batch_halves_down_to_one_row() -> None:
    tokens = lives(16)
    sizes = [sum(1 for each in tokens if each > step) for step in range(max(tokens))]
    assert sorted(set(sizes), reverse=True) == [16, 8, 4, 2, 1]
    assert lives(1) == [4]
