"""How the time for clients that do not read reaches the parts of the supervisor."""

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_supervisor.app import slot_settings
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.daemon import relay_limits


def spec(id: str, stall_timeout_s: float) -> ModelSpec:
    return ModelSpec(id=id, model=id, engine=EngineSettings(stall_timeout_s=stall_timeout_s))


def test_the_watchdog_and_the_relay_wait_longer_than_the_slowest_engine() -> None:
    settings = ServeSettings(models=(spec("a", 5.0), spec("b", 300.0)))
    assert slot_settings(settings).stall_timeout_s == 300.0
    assert relay_limits(settings).client_stall_s > 300.0


def test_without_models_the_default_holds() -> None:
    assert ServeSettings(models=()).stall_timeout_s == EngineSettings().stall_timeout_s
