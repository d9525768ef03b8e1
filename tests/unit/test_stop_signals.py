"""Which signals mean to cut, and which are the first one over again."""

import signal

import pytest

from mlx_isolate_supervisor.stop_signals import REPEAT_S, StopSignals

TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


@pytest.mark.parametrize(
    ("heard", "meant"),
    [
        ([(TERM, 0.0)], ["stop"]),
        ([(INT, 0.0), (INT, 0.01)], ["stop", "repeat"]),
        ([(INT, 0.0), (INT, 0.01), (INT, 0.02)], ["stop", "repeat", "repeat"]),
        ([(INT, 0.0), (INT, 2 * REPEAT_S)], ["stop", "cut"]),
        ([(INT, 0.0), (INT, 0.01), (INT, 1.0)], ["stop", "repeat", "cut"]),
        # As `stop --now` sends them.
        ([(TERM, 0.0), (INT, 0.0)], ["stop", "cut"]),
    ],
)
def test_only_another_wish_cuts(heard: list[tuple[int, float]], meant: list[str]) -> None:
    times = iter([at for _, at in heard])
    signals = StopSignals(lambda: next(times))
    assert [signals.hear(number) for number, _ in heard] == meant
    assert signals.cut_by == (heard[-1][0] if "cut" in meant else None)
