"""Which model a spare gets ready for, and which spare a model takes."""

from typing import Any

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.standby_plan import (
    PREPARING_MAX_S,
    REBIND_MIN_S,
    Demand,
    Spare,
    assign,
    choose,
    choose_targets,
)

A, B, C = (ModelSpec(id=name, model=f"/{name}") for name in "abc")
PLAIN = {"HOME": "/h"}
# Far from zero, as on a machine that has run for long.
NOW = 1e6


def spare(spec: ModelSpec | None, **changes: Any) -> Spare:
    made = Spare(spec=spec, environment=PLAIN, is_prepared=True, told_at=NOW)
    return msgspec.structs.replace(made, **changes)


def test_a_model_takes_its_own_spare_then_nobodys_then_anothers() -> None:
    spares = [spare(B), spare(None), spare(A)]
    assert choose(spares, A, PLAIN, NOW) == 2
    assert choose(spares[:2], A, PLAIN, NOW) == 1
    assert choose(spares[:1], A, PLAIN, NOW) == 0
    assert choose([], A, PLAIN, NOW) is None


def test_a_spare_of_another_environment_is_not_taken() -> None:
    assert choose([spare(A)], A, PLAIN | {"LD_PRELOAD": "x"}, NOW) is None


def test_a_spare_that_prepares_is_taken_while_that_cannot_be_a_hang() -> None:
    busy = spare(A, is_prepared=False)
    assert choose([busy], A, PLAIN, NOW + PREPARING_MAX_S) == 0
    assert choose([busy], A, PLAIN, NOW + PREPARING_MAX_S + 1) is None
    # It would first finish the tokenizer of another model.
    assert choose([busy], B, PLAIN, NOW) is None


def test_a_spare_that_ran_the_code_of_a_model_serves_no_other() -> None:
    trusting = ModelSpec(id="t", model="/t", engine=EngineSettings(trust_remote_code=True))
    assert choose([spare(trusting)], A, PLAIN, NOW) is None
    assert choose([spare(trusting)], trusting, PLAIN, NOW) == 0


def test_the_busiest_models_are_prepared_for_and_ties_change_nothing() -> None:
    demands = [Demand(A, 0), Demand(B, 3), Demand(C, 0)]
    assert choose_targets(demands, [None], 1) == [B]
    assert choose_targets(demands, [C], 2) == [B, C]
    assert choose_targets(demands, [], 2) == [B, A]
    assert choose_targets([], [A], 1) == []


def test_as_few_spares_as_possible_change_over() -> None:
    assert assign([A, B], [B, C]) == [C, B]
    assert assign([None], [A]) == [A]
    assert assign([A], []) == [A]
    assert assign([A, None], [A]) == [A, None]


def test_a_bound_spare_changes_over_once_a_minute_at_most() -> None:
    assert spare(None).may_change_over(NOW)
    assert not spare(A).may_change_over(NOW + REBIND_MIN_S - 1)
    assert spare(A).may_change_over(NOW + REBIND_MIN_S)
    assert not spare(A, is_prepared=False).may_change_over(NOW + REBIND_MIN_S)
