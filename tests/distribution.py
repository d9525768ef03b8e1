"""Which worker runs which tests: a file whole, the longest first, one daemon for those who share."""

from xdist.scheduler import LoadFileScheduling

# Files of one scope run on one worker: they share a daemon with four real engines, or a browser,
# and on two workers there would be two of each; or they want the machine for themselves.
SHARED = {
    **dict.fromkeys(
        (f"tests/e2e/test_{name}.py" for name in ("abuse", "openai_client", "oracle", "together")),
        "one daemon",
    ),
    **dict.fromkeys(
        (
            f"tests/e2e/ui/test_ui{name}.py"
            for name in ("", "_changes", "_chat", "_live", "_looks", "_real_engine")
        ),
        "one browser",
    ),
    **dict.fromkeys(
        (
            "tests/faults/test_drills.py",
            "tests/faults/test_kill_matrix.py",
            "tests/integration/test_bench_respawn.py",
        ),
        "alone",
    ),
}
# What keeps a worker longest, so that none of it begins while the other workers have nothing left
# to do. It decides the order and nothing else.
LONGEST = (
    "one daemon",
    "tests/faults/test_soak.py",
    "one browser",
    "tests/integration/test_batch_memory.py",
    "tests/integration/test_generation_oracle.py",
    "tests/faults/test_command_storms.py",
    "tests/integration/test_pool_random.py",
    "tests/integration/test_demo_model.py",
    "tests/integration/test_cache_quantized.py",
    "tests/integration/test_server_oracle.py",
    "tests/faults/test_engine_misbehaves.py",
    "tests/integration/test_generation_serial.py",
    "tests/integration/test_daemon_reload.py",
    "tests/integration/test_generation_text.py",
    "tests/faults/test_own_faults.py",
    "tests/integration/test_engine_real.py",
    "tests/integration/test_stream_shape.py",
    "tests/integration/test_cache_history.py",
    "tests/integration/test_generation_life.py",
    "tests/e2e/test_cache_daemon.py",
    "tests/integration/test_cache_restart.py",
    "tests/integration/test_engine_process.py",
    "tests/faults/test_engine_deaths.py",
    "tests/faults/test_daemon_killed.py",
    "tests/faults/test_websockets.py",
    "tests/faults/test_cache_random.py",
    "tests/faults/test_standby.py",
    "tests/integration/test_cache_continuation.py",
    "tests/integration/test_daemon_stop.py",
    "tests/faults/test_watched_config.py",
)
# Nearly every test of these is marked `alone`. They come when nothing else is left: before that,
# each would have two workers wait for the test that a third one runs.
LAST = "alone"


def scope_of(nodeid: str) -> str:
    """What one worker runs on its own: a file, or several that share what is dear."""
    file = nodeid.partition("::")[0]
    return SHARED.get(file, file)


def rank(nodeid: str) -> tuple[int, str]:
    """The place of a test's scope in a run, first to last; one scope's tests stay together."""
    scope = scope_of(nodeid)
    if scope == LAST:
        return len(LONGEST) + 1, scope
    return (LONGEST.index(scope) if scope in LONGEST else len(LONGEST), scope)


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """xdist's distribution by file, but for the files that share."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
