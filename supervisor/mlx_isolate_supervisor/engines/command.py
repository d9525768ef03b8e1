"""How an engine process is started."""

import sys

import msgspec


class EngineCommand(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is started; tests put a fake engine here.

    Attributes:
        argv: what comes before `--id MODEL_ID --incarnation N --spec-fd …`.
        env: environment for every engine, over the supervisor's own (LD_PRELOAD of a BLAS).
        nice: how much lower the CPU priority of an engine's work is, so that the supervisor's
            pages answer while every core is busy; a custom engine takes it as `--nice N`.
        cache_home: the user's cache folder for converted models, absolute.
        log_level: the engine's log level.
    """

    argv: tuple[str, ...] = (sys.executable, "-P", "-m", "mlx_isolate_engine")
    env: dict[str, str] = {}
    nice: int = 5
    cache_home: str = ""
    log_level: str = "INFO"
