"""The configuration file: llama-swap's keys, ours, macros, and errors that name the place."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.config import GroupSpec
from mlx_isolate_supervisor.settings.file import parse_file
from mlx_isolate_supervisor.settings.layers import FileLayer
from mlx_isolate_supervisor.settings.yaml_text import parse_yaml

FILE = Path("/etc/mlx/config.yaml")


def parse(text: str, environment: Mapping[str, str] | None = None) -> FileLayer:
    return parse_file(parse_yaml(text, str(FILE)), FILE, environment or {})


def test_keys_of_llama_swap_are_understood() -> None:
    layer = parse("""
healthCheckTimeout: 90
globalTTL: 600
logLevel: debug
apiKeys: [k1, k2]
sendLoadingState: true
models:
  small:
    path: mlx-community/small
    aliases: [tiny, mini]
    ttl: 60
    env: ["A=1", "B=x=y"]
    concurrencyLimit: 4
    unlisted: true
    filters:
      stripParams: "temperature, top_p"
      setParams: {top_k: 5}
  big:
    path: /models/big
    sendLoadingState: false
groups:
  keep: {swap: false, exclusive: false, persistent: true, members: [big]}
hooks:
  on_startup:
    preload: [mini]
""")
    assert layer.values == {
        "--start-timeout": "90",
        "--ttl": "600",
        "--log-level": "debug",
        "--api-key": ["k1", "k2"],
    }
    small, big = layer.models
    assert (small.id, small.model, small.aliases) == (
        "small",
        "mlx-community/small",
        ("tiny", "mini"),
    )
    assert (small.ttl_s, small.env, small.concurrency_limit) == (60.0, {"A": "1", "B": "x=y"}, 4)
    assert (small.unlisted, small.preload, small.pinned) == (True, True, False)
    assert (small.strip_params, small.set_params) == (("temperature", "top_p"), {"top_k": 5})
    assert (small.send_loading_state, big.send_loading_state) == (True, False)
    assert (big.model, big.preload, big.pinned) == ("/models/big", False, True)
    assert layer.groups == (
        GroupSpec(id="keep", members=("big",), swap=False, exclusive=False, persistent=True),
    )


def test_flags_are_keys_with_either_dash() -> None:
    layer = parse("queue_timeout: 5m\nmemory-policy: evict_first\nmemory_budget: 20%\ntemp: 0.5\n")
    assert layer.values == {
        "--queue-timeout": "5m",
        "--memory-policy": "evict_first",
        "--memory-budget-gb": "20%",
        "--temp": "0.5",
    }


@pytest.mark.parametrize(
    ("keys", "holds"),
    [
        ("apiKeys: [hunter2]", True),
        ('apiKeys: ["${env.A}", hunter2]', True),
        ('api-key: "${mine}"\nmacros: {mine: hunter2}', True),
        ('apiKeys: ["${env.A}"]', False),
        ("apiKeys: null", False),
        ("temp: 0.5", False),
    ],
)
def test_a_file_that_takes_its_keys_from_variables_holds_none(keys: str, holds: bool) -> None:
    assert parse(keys, {"A": "x"}).holds_keys is holds


def test_the_variables_of_a_file_are_known() -> None:
    text = 'apiKeys: ["${env.B}"]\nmacros: {m: "${env.A}"}\n# ${env.C}\n'
    assert parse(text, {"A": "x", "B": "y"}).variables == ("A", "B")


def test_engine_settings_stand_beside_a_models_own_keys() -> None:
    layer = parse("models: {m: {path: o/m, kv_bits: 8, chat-template-args: {think: false}}}")
    assert layer.engine == {"m": {"--kv-bits": "8", "--chat-template-args": '{"think": false}'}}


def test_a_model_without_a_path_is_its_id() -> None:
    (model,) = parse("models: {owner/name: }").models
    assert model.model == "owner/name"


def test_a_missing_folder_is_the_engines_to_find_out() -> None:
    (model,) = parse("models: {m: {path: ../not-there}}").models
    assert model.model == "/etc/mlx/../not-there"


def test_macros_are_replaced_everywhere() -> None:
    layer = parse(
        """
macros: {root: /models, place: "${root}/new"}
models:
  m: {path: "${place}/${MODEL_ID}", env: ["TOKEN=${env.SECRET}"]}
""",
        {"SECRET": "s"},
    )
    (model,) = layer.models
    assert (model.model, model.env) == ("/models/new/m", {"TOKEN": "s"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modles: {}", "there is no key 'modles'; did you mean 'models'?"),
        ("models: {m: {ttll: 5}}", "models.m: there is no key 'ttll'; did you mean 'ttl'?"),
        ("models: {m: {kv_bit: 5}}", "models.m: there is no key 'kv_bit'; did you mean 'kv_bits'?"),
        ("models: {m: {ttl: soon}}", "models.m.ttl: 'soon' is not a time; write it as 90, 90s"),
        ("models: {m: {unlisted: 5}}", "models.m.unlisted must be true or false."),
        ("models: {m: {env: [A]}}", "models.m.env: 'A' is not of the form NAME=value."),
        ("models: {m: {env: {A=B: x}}}", "models.m.env: 'A=B' is no variable that a system takes."),
        (
            'models: {m: {env: {A: "x\\0y"}}}',
            "models.m.env: 'A' is no variable that a system takes.",
        ),
        (
            r'models: {m: {path: "a\0b"}}',
            "models.m.path: 'a\\x00b' is no path that a system takes.",
        ),
        ("models: [m]", "models must be a mapping."),
        ("models: {m: /a}", "models.m must be a mapping; write {path: /a}."),
        ("models: {a: {aliases: [b]}, b: {}}", "two models would be served as 'b'"),
        ("groups: {g: {members: [x]}}", "groups.g.members: there is no model 'x' under models."),
        ("hooks: {on_startup: {preload: [x]}}", "hooks.on_startup.preload: there is no model 'x'."),
        ("logLevel: ${nope}", "logLevel: ${nope} is not defined under macros."),
        ("logLevel: ${env.NOPE}", "logLevel: ${env.NOPE} is not set in the environment."),
        ("api_key_file: x", "there is no key 'api_key_file'"),
        (
            "startPort: 1\nmodels: {m: {cmd: 'x --port ${PORT}'}}",
            "models.m.cmd: no commands are run here; 'mlx-isolate config import' turns",
        ),
    ],
)
def test_an_error_names_the_file_the_key_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"{FILE}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2, column 1: the key 'a' appears twice."),
        ("a: &x 1\nb: *x", "line 2, column 4: aliases (*name) are not supported."),
        ("a: [1", "line 1"),
        ("- a", "must be a mapping of keys to values."),
        ("a: !!python/object:os.system {}", "could not determine a constructor"),
    ],
)
def test_text_that_is_no_configuration_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value)


def test_an_empty_file_is_an_empty_layer() -> None:
    assert parse("") == FileLayer(path=str(FILE))
