"""Whose turn it is where completions of several adapters wait."""

from mlx_isolate_engine.generation.turns import TURN_S, Turns


def test_who_waits_alone_is_let_in_for_ever() -> None:
    turns = Turns(0.0)
    for now in range(100):
        assert turns.decide({None: 0.0}, float(now), is_running=True) == ("go", None)


def test_an_empty_batch_takes_who_waits() -> None:
    turns = Turns(0.0)
    assert turns.decide({"a": 5.0}, 5.0, is_running=False) == ("switch", "a")
    assert turns.mounted == "a"
    assert turns.decide({"a": 5.0}, 5.1, is_running=False) == ("go", "a")


def test_who_came_first_goes_first_into_an_empty_batch() -> None:
    turns = Turns(0.0)
    assert turns.decide({"a": 2.0, "b": 1.0, None: 3.0}, 3.0, is_running=False) == ("switch", "b")
    assert turns.decide({"a": 2.0, None: 1.0}, 3.0, is_running=False) == ("switch", None)


def test_a_turn_ends_when_another_has_waited_for_its_length() -> None:
    turns = Turns(0.0)
    waiting: dict[str | None, float] = {None: 99.0, "a": 100.0}
    assert turns.decide(waiting, 100.0 + TURN_S / 2, is_running=True) == ("go", None)
    assert turns.decide(waiting, 100.0 + TURN_S, is_running=True) == ("drain", None)
    assert turns.decide(waiting, 100.0 + TURN_S, is_running=False) == ("switch", "a")


def test_a_turn_is_never_shorter_because_somebody_has_waited_long() -> None:
    turns = Turns(0.0)
    turns.decide({"a": 0.0, "b": 0.0}, 50.0, is_running=False)
    waiting: dict[str | None, float] = {"b": 0.0}
    assert turns.decide(waiting, 50.0 + TURN_S / 2, is_running=True)[0] == "go"
    assert turns.decide(waiting, 50.0 + TURN_S, is_running=True)[0] == "drain"


def test_everybody_has_a_turn() -> None:
    turns = Turns(0.0)
    since: dict[str | None, float] = dict.fromkeys([None, "a", "b", "c"], 0.0)
    now, order = 0.0, list[str | None]()
    for _ in range(8):
        now += TURN_S
        since[turns.mounted] = now
        decision, adapter = turns.decide(since, now, is_running=False)
        assert decision == "switch"
        order.append(adapter)
    assert order == ["a", "b", "c", None] * 2
