"""The soak's plan is a function of its seed, and its judgement finds what is wrong."""

import pytest
from bench.soak_clients import Ending, Outcome
from bench.soak_plan import KINDS, Plan, make_plan, prompt_texts
from bench.soak_record import Done, Record, Sample, faults


def plan(seed: int, duration_s: float = 3600.0) -> Plan:
    return make_plan(seed, duration_s, request_every_s=1, kill_every_s=20, reload_every_s=60)


def test_a_seed_gives_the_same_plan_and_prompts_again() -> None:
    assert plan(1) == plan(1)
    assert plan(1).digest != plan(2).digest
    assert prompt_texts(1, "full") == prompt_texts(1, "full")


def test_an_hour_holds_every_kind_of_request_death_and_reload() -> None:
    hour = plan(3)
    assert {request.kind for request in hour.requests} == set(KINDS)
    assert len({act.how for act in hour.acts}) == 6
    assert len({reload.change for reload in hour.reloads}) == 5
    assert 130 <= len(hour.acts) <= 230


def sample(at_s: float, **sizes: int) -> Sample:
    flat = {
        "memory_bytes": 30 << 20,
        "descriptors": 60,
        "sockets": 8,
        "cache_bytes": 1,
        "state_bytes": 1,
        "log_bytes": 1,
    }
    return Sample(at_s=at_s, livez_s=0.001, **(flat | sizes))


def record(
    endings: tuple[Ending, ...], done: tuple[Done, ...] = (), samples: tuple[Sample, ...] = ()
) -> Record:
    hour = plan(1)
    requests = hour.requests[: len(endings)]
    outcomes = tuple(
        Outcome(request=request, ending=ending, began_s=100.0, ended_s=101.0)
        for request, ending in zip(requests, endings, strict=True)
    )
    hour = Plan(seed=1, duration_s=3600.0, requests=requests, acts=(), reloads=())
    return Record(
        plan=hour,
        outcomes=outcomes,
        done=done,
        samples=samples or tuple(sample(float(at)) for at in range(9)),
        restarts={},
        endings=(),
    )


def test_what_went_well_is_no_fault() -> None:
    assert faults(record(("right", "left", "refused"))) == []


@pytest.mark.parametrize("ending", ["wrong", "none", "torn", "told"])
def test_a_bad_outcome_is_found(ending: Ending) -> None:
    assert len(faults(record((ending,)))) == 1


def test_an_error_is_explained_by_what_was_done_to_its_model() -> None:
    model = plan(1).requests[0].model
    act = Done(at_s=100.5, what="SIGKILL", target=model, pid=7)
    assert faults(record(("told",), (act,))) == []
    assert len(faults(record(("told",), (Done(at_s=100.5, what="x", target="?", pid=7),)))) == 1
    assert len(faults(record(("told",), (Done(at_s=101.5, what="x", target=model, pid=7),)))) == 1


@pytest.mark.parametrize(("name", "by"), [("memory_bytes", 7 << 20), ("descriptors", 5)])
def test_what_grows_is_found(name: str, by: int) -> None:
    level = getattr(sample(0.0), name)
    growing = tuple(sample(float(at), **{name: level + at // 30 * by}) for at in range(90))
    assert len(faults(record(("right",), samples=growing))) == 1


def test_a_sample_while_all_are_dead_says_nothing_of_growth() -> None:
    samples = tuple(sample(float(at), descriptors=47 if at == 40 else 62) for at in range(90))
    assert faults(record(("right",), samples=samples)) == []
