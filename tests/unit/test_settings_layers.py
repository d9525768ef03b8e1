"""Precedence of flag, environment, file and default, and errors that name the place."""

from collections.abc import Mapping, Sequence

import pytest

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.config import ModelSpec, ServeSettings
from mlx_isolate_supervisor.settings.flags import FLAGS, TOPICS
from mlx_isolate_supervisor.settings.layers import (
    FileLayer,
    Layers,
    Machine,
    Resolved,
    resolve,
)

MACHINE = Machine(memory_bytes=100_000_000_000, disk_bytes=lambda folder: 1_000_000_000_000)


def settle(
    flags: Mapping[str, str | Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    file: FileLayer | None = None,
    models: tuple[tuple[str, str], ...] = (("demo", "demo"),),
) -> Resolved:
    layers = Layers(flags=flags or {}, environment=environment or {}, file=file, models=models)
    return resolve(layers, MACHINE)


def test_without_any_layer_the_defaults_hold() -> None:
    resolved = settle()
    engine = EngineSettings(prompt_cache_bytes=8_000_000_000)
    model = ModelSpec(id="demo", model="demo", preload=True, engine=engine)
    assert resolved.settings == ServeSettings(models=(model,))
    assert resolved.origins == {}


def test_flag_beats_environment_beats_file_beats_default() -> None:
    file = FileLayer(path="c.yaml", values={"--queue-timeout": "10", "--ttl": "1m"})
    environment = {"MLX_ISOLATE_QUEUE_TIMEOUT": "20s", "MLX_ISOLATE_TTL": "2m"}
    resolved = settle({"--queue-timeout": "30"}, environment, file)
    assert resolved.settings.queue_timeout_s == 30.0
    assert resolved.settings.ttl_s == 120.0
    assert resolved.settings.drain_timeout_s == 600.0
    assert resolved.origins == {"queue_timeout_s": "--queue-timeout", "ttl_s": "MLX_ISOLATE_TTL"}
    assert settle(file=file).origins == {"queue_timeout_s": "c.yaml", "ttl_s": "c.yaml"}


def test_engine_settings_reach_every_model_of_the_command_line() -> None:
    resolved = settle(
        {
            "--temp": "0.7",
            "--ssd-cache-max-gb": "8",
            "--chat-template-args": '{"a": false}',
        },
        models=(("a", "/a"), ("b", "/b")),
    )
    for model in resolved.settings.models:
        assert model.engine.temp == 0.7
        assert model.engine.ssd_cache_bytes_max == 8_000_000_000
        assert model.engine.chat_template_args == {"a": False}


def test_adapters_are_given_by_name() -> None:
    resolved = settle({"--adapters": '{"polite": "/lora/polite"}'}, models=(("a", "/a"),))
    assert resolved.settings.models[0].engine.adapters == {"polite": "/lora/polite"}
    with pytest.raises(ConfigError, match="names and folders"):
        settle({"--adapters": '{"polite": 1}'}, models=(("a", "/a"),))


def test_limits_of_the_daemon_are_copied_to_its_engines() -> None:
    resolved = settle({"--sse-ping-interval": "3", "--max-body-bytes": "1MiB"})
    engine = resolved.settings.models[0].engine
    assert (engine.sse_ping_interval_s, engine.body_bytes_max) == (3.0, 1 << 20)


def test_a_share_is_taken_of_memory_or_of_the_disk() -> None:
    resolved = settle({"--memory-budget-gb": "20%", "--ssd-cache-max-gb": "20%"})
    assert resolved.settings.memory_budget_bytes == 20_000_000_000
    assert resolved.settings.models[0].engine.ssd_cache_bytes_max == 200_000_000_000


def test_lists_come_repeated_as_flags_and_with_commas_in_the_environment() -> None:
    assert settle({"--api-key": ["k1", "k2"]}).settings.api_keys == ("k1", "k2")
    assert settle(environment={"MLX_ISOLATE_API_KEY": "k1, k2"}).settings.api_keys == ("k1", "k2")


def test_a_bad_value_names_its_flag_and_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"^--queue-timeout: 'soon' is not a time; write it as"):
        settle({"--queue-timeout": "soon"})


def test_a_bad_value_in_the_environment_names_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^MLX_ISOLATE_PORT: '70000' is not a port"):
        settle(environment={"MLX_ISOLATE_PORT": "70000"})


def test_bytes_that_are_no_text_are_refused_before_an_engine_is_told_them() -> None:
    with pytest.raises(ConfigError, match=r"--ssd-cache-dir: '/c\\udcff' is not UTF-8"):
        settle({"--ssd-cache-dir": "/c\udcff"})
    with pytest.raises(ConfigError, match="MLX_ISOLATE_RUN_DIR: .* is not UTF-8"):
        settle({}, {"MLX_ISOLATE_RUN_DIR": "/r\udcff"})
    with pytest.raises(ConfigError, match=r"the path of m: '/m\\udcff' is not UTF-8"):
        settle(models=(("m", "/m\udcff"),))


def test_a_bad_value_in_the_file_names_flag_and_file() -> None:
    with pytest.raises(ConfigError, match=r"^--ttl in c\.yaml: 'x' is not a time"):
        settle(file=FileLayer(path="c.yaml", values={"--ttl": "x"}))


def test_a_key_is_never_shown_in_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        settle({"--api-key": ["s3cret", ""]})
    assert "s3cret" not in str(caught.value)


def test_a_misspelt_variable_is_pointed_out() -> None:
    resolved = settle(environment={"MLX_ISOLATE_QUEUE_TIMOUT": "5"})
    (warning,) = resolved.warnings
    assert warning.startswith("MLX_ISOLATE_QUEUE_TIMOUT in the environment is no setting of ")
    assert warning.endswith("; did you mean MLX_ISOLATE_QUEUE_TIMEOUT?")


def test_text_in_the_log_is_warned_of_and_off_by_default() -> None:
    assert not settle().settings.models[0].engine.log_text
    (warning,) = settle({"--log-text": "true"}).warnings
    assert warning.startswith("--log-text is on for demo: prompts and answers go into the log")


def test_an_adapter_cannot_be_given_for_two_models_at_once() -> None:
    with pytest.raises(ConfigError, match="--adapter-path goes with one model and 2 were given"):
        settle({"--adapter-path": "/lora"}, models=(("a", "/a"), ("b", "/b")))


def test_an_ssd_tier_without_a_ram_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prompt-cache-size 0"):
        settle({"--prompt-cache-size": "0", "--ssd-cache-dir": "/cache"})


@pytest.mark.parametrize(("flag", "highest"), [("--temp", 2), ("--top-p", 1), ("--min-p", 1)])
def test_a_default_is_held_to_what_a_request_may_ask_for(flag: str, highest: int) -> None:
    settle({flag: str(highest)})
    with pytest.raises(ConfigError, match=f"^{flag}: '9' must lie between 0 and {highest}"):
        settle({flag: "9"})


def test_a_models_own_engine_settings_beat_the_daemons() -> None:
    spec = ModelSpec(id="m", model="/m")
    file = FileLayer(
        path="c.yaml",
        values={"--temp": "0.5", "--top-k": "7"},
        models=(spec,),
        engine={"m": {"--temp": "0.9"}},
    )
    engine = settle(file=file, models=()).settings.models[0].engine
    assert (engine.temp, engine.top_k) == (0.9, 7)


def test_every_flag_has_a_field_and_a_variable_of_its_own() -> None:
    daemon = set(ServeSettings.__struct_fields__) | {"api_key_file"}
    engine = set(ModelSpec(id="m", model="m").engine.__struct_fields__)
    for flag in FLAGS:
        assert flag.field in (daemon if flag.scope == "daemon" else engine), flag.name
    assert len({flag.variable for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({}, 4_000_000_000),
        ({"--prompt-cache-bytes": "1GB"}, 500_000_000),
        ({"--memory-budget-gb": "8"}, 1_000_000_000),
        ({"--prompt-cache-bytes": "1GB", "--models-max": "1"}, 1_000_000_000),
    ],
)
def test_the_ram_tier_is_shared_out_to_the_engines(flags: dict[str, str], part: int) -> None:
    models = settle(flags, models=(("a", "/a"), ("b", "/b"))).settings.models
    assert [model.engine.prompt_cache_bytes for model in models] == [part, part]


def test_filters_of_a_model_reach_its_engine() -> None:
    spec = ModelSpec(id="a", model="/m/a", strip_params=("seed",), set_params={"top_k": 5})
    file = FileLayer(path="f.yaml", values={}, models=(spec,), engine={}, groups=())
    (model,) = settle(file=file, models=()).settings.models
    assert (model.engine.strip_params, model.engine.set_params) == (("seed",), {"top_k": 5})


def test_the_help_has_each_flag_under_one_heading() -> None:
    named = [name for names in TOPICS.values() for name in names]
    assert sorted(named) == sorted(flag.name for flag in FLAGS)
