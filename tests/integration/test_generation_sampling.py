"""Seeds, randomness and filters: each request runs with exactly its own settings."""

import asyncio
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import sample_utils

from mlx_isolate_engine.completion.request import SamplingRequest
from mlx_isolate_engine.generation import sampling
from mlx_isolate_engine.generation.plan import SamplingPlan
from tests.integration.generation_rig import Rig, rig, run_async, text_request


def sampled(seed: int | None, **fields: float) -> SamplingRequest:
    return SamplingRequest(temperature=1.0, seed=seed, **fields)  # type: ignore[arg-type]


async def text_of(subject: Rig, request: SamplingRequest) -> str:
    return (await subject.run(text_request("hello", max_tokens=40, sampling=request))).text


@pytest.mark.case("42")
def test_a_seed_gives_the_same_text_alone_and_beside_neighbours(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            alone = await text_of(subject, sampled(1, xtc_probability=0.5, top_p=0.9))
            for neighbours in range(7):
                others = [sampled(None) for _ in range(neighbours)]
                texts = await asyncio.gather(
                    *(text_of(subject, other) for other in others),
                    text_of(subject, sampled(1, xtc_probability=0.5, top_p=0.9)),
                )
                assert texts[-1] == alone

    run_async(test())


@pytest.mark.case("42")
def test_a_seed_gives_the_same_text_after_a_restart(full_model: Path) -> None:
    async def run() -> str:
        async with rig(full_model) as subject:
            return await text_of(subject, sampled(1))

    assert run_async(run()) == run_async(run())


@pytest.mark.case("42")
def test_seeds_differ_and_no_seed_is_random_also_after_a_restart(full_model: Path) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with rig(full_model) as subject:
            seeded = [await text_of(subject, sampled(seed)) for seed in range(1, 6)]
            unseeded = await asyncio.gather(*(text_of(subject, sampled(None)) for _ in range(5)))
            return seeded, unseeded

    seeded, first = run_async(run())
    again, second = run_async(run())
    assert seeded == again
    assert len(set(seeded)) == 5
    assert len({*first, *second}) == 10


@pytest.mark.case("42")
def test_greedy_is_stable(full_model: Path) -> None:
    async def test() -> None:
        async with rig(full_model) as subject:
            greedy = SamplingRequest(temperature=0.0)
            texts = {await text_of(subject, greedy) for _ in range(3)}
            texts.add(await text_of(subject, sampled(None, top_k=1)))
            texts.add(await text_of(subject, sampled(None, top_p=0.0)))
            assert len(texts) == 1

    run_async(test())


def test_requests_in_one_batch_keep_their_own_settings(full_model: Path) -> None:
    requests = [
        SamplingRequest(temperature=0.0),
        sampled(3),
        sampled(3, top_k=2),
        sampled(4, min_p=0.2),
        SamplingRequest(temperature=0.0, logit_bias={65: 100.0}),
        SamplingRequest(temperature=0.0, repetition_penalty=1.5),
    ]

    async def test() -> None:
        async with rig(full_model) as subject:
            alone = [await text_of(subject, request) for request in requests]
            together = await asyncio.gather(*(text_of(subject, each) for each in requests))
            assert together == alone
            assert alone[4] == "A" * 40
            assert len(set(alone)) == len(requests)

    run_async(test())


LOGPROBS = [
    mx.log(mx.softmax(mx.random.normal((1, 300), key=mx.random.key(i)) * 3)) for i in range(5)
]


@pytest.mark.parametrize("case", range(5))
def test_filters_keep_what_mlx_lms_filters_keep(case: int) -> None:
    values = LOGPROBS[case]
    pairs = [
        (sampling.keep_top_p(values, 0.8), sample_utils.apply_top_p(values, 0.8)),
        (sampling.keep_min_p(values, 0.05), sample_utils.apply_min_p(values, 0.05)),
        (sampling.keep_top_k(values, 7), sample_utils.apply_top_k(values, 7)),
    ]
    for ours, theirs in pairs:
        assert (mx.isinf(ours) == mx.isinf(theirs)).all().item()
        assert 0 < int(mx.isinf(ours).sum()) < 300


def test_xtc_removes_all_likely_tokens_but_the_least_likely_of_them() -> None:
    probabilities = mx.array([[0.4, 0.3, 0.2, 0.06, 0.04]])
    plan = SamplingPlan(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.1, seed=1)
    sampler = sampling.RandomSampler(plan, [], 5)
    drawn = {int(sampler(mx.log(probabilities)).item()) for _ in range(200)}
    assert drawn == {2, 3, 4}
    spared = sampling.RandomSampler(plan, [0], 5)
    assert {int(spared(mx.log(probabilities)).item()) for _ in range(200)} == {0, 2, 3, 4}


def test_draws_follow_the_probabilities() -> None:
    plan = SamplingPlan(temperature=1.0, seed=5)
    sampler = sampling.RandomSampler(plan, [], 3)
    drawn = sampler(mx.log(mx.broadcast_to(mx.array([[0.5, 0.3, 0.2]]), (4000, 3)))).tolist()
    shares = [drawn.count(token) / 4000 for token in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.04)


def test_rows_share_a_sampler_only_where_they_may() -> None:
    maker = sampling.SamplerMaker(300, [])
    greedy = SamplingPlan()
    assert maker.make(greedy) is maker.make(SamplingPlan(seed=4, presence_penalty=1.0))
    warm = SamplingPlan(temperature=0.7, top_p=0.9)
    assert maker.make(warm) is maker.make(SamplingPlan(temperature=0.7, top_p=0.9))
    assert maker.make(warm) is not maker.make(SamplingPlan(temperature=0.8, top_p=0.9))
    seeded = SamplingPlan(temperature=0.7, seed=1)
    assert maker.make(seeded) is not maker.make(seeded)
