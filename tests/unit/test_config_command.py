"""config show and import: values with their origins, secrets hidden, llama-swap carried over."""

import argparse
import json
from pathlib import Path

import pytest
import yaml

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor import exit_codes
from mlx_isolate_supervisor.commands.cache import folder_of
from mlx_isolate_supervisor.commands.config import HIDDEN, run, show_lines, shown_settings
from mlx_isolate_supervisor.settings.file import parse_file
from mlx_isolate_supervisor.settings.layers import Layers, Machine, Resolved, resolve
from mlx_isolate_supervisor.settings.llama_swap import import_llama_swap
from mlx_isolate_supervisor.settings.mistakes import find_mistakes
from mlx_isolate_supervisor.settings.page import document, schema
from mlx_isolate_supervisor.settings.yaml_text import parse_yaml

MACHINE = Machine(memory_bytes=10**11, disk_bytes=lambda folder: 10**12)
FILE = """
apiKeys: [s3cret]
queue_timeout: 5m
models:
  m: {path: o/m, env: ["HF_TOKEN=s3cret"], ttl: 60, aliases: [n, o], max_tokens: 64}
"""


def resolved() -> Resolved:
    file = parse_file(parse_yaml(FILE, "c.yaml"), Path("c.yaml"), {})
    layers = Layers(
        flags={"--drain-timeout": "90"}, environment={"MLX_ISOLATE_TEMP": "0.5"}, file=file
    )
    return resolve(layers, MACHINE)


def rows() -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in show_lines(resolved()) if line}


def test_show_names_the_origin_of_each_value() -> None:
    shown = rows()
    assert shown["--drain-timeout"] == ["90s", "--drain-timeout"]
    assert shown["--temp"] == ["0.5", "MLX_ISOLATE_TEMP"]
    assert shown["--queue-timeout"] == ["300s", "c.yaml"]
    assert shown["--port"] == ["8080", "default"]


def test_show_tells_of_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_ISOLATE_PROT", "9")
    args = argparse.Namespace(verb="show", json=True, models=["o/m"], more_models=[])
    args.served_names = []
    assert run(args) == exit_codes.OK
    assert "mlx-isolate: MLX_ISOLATE_PROT in the environment is no" in capsys.readouterr().err


def test_show_names_what_a_model_has_of_its_own() -> None:
    lines = show_lines(resolved())
    assert lines[lines.index("model m") + 1 :] == [
        "  path o/m",
        "  aliases n, o",
        "  ttl 60s",
        "  env HF_TOKEN=(hidden)",
        "  --max-tokens 64",
    ]


def test_secrets_are_never_shown() -> None:
    assert "s3cret" not in "\n".join(show_lines(resolved()))
    assert rows()["--api-key"] == [HIDDEN, "c.yaml"]
    assert "s3cret" not in json.dumps(shown_settings(resolved()))


LLAMA_SWAP = """
healthCheckTimeout: 120
startPort: 10001
logLevel: info
macros:
  server: "python -m mlx_lm.server --host 127.0.0.1 --port ${PORT}"
models:
  qwen:
    cmd: |
      ${server}
      --model mlx-community/Qwen3-4B-4bit --max-tokens 2048 --temp=0.6
      --trust-remote-code --pipeline
    proxy: http://127.0.0.1:${PORT}
    aliases: [q]
    ttl: 300
    env: ["HF_HUB_OFFLINE=1"]
    filters: {stripParams: "temperature"}
    metadata: {a: 1}
  other:
    cmd: llama-server --port ${PORT} -m x.gguf
groups:
  both: {swap: true, members: [qwen, other]}
  gone: {members: [other]}
hooks:
  on_startup: {preload: [q, other]}
"""


def test_a_llama_swap_file_is_carried_over_and_the_rest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(LLAMA_SWAP)
    imported = import_llama_swap(path, {})
    assert yaml.safe_load(imported.text) == {
        "healthCheckTimeout": 120,
        "logLevel": "info",
        "hooks": {"on_startup": {"preload": ["q"]}},
        "models": {
            "qwen": {
                "path": "mlx-community/Qwen3-4B-4bit",
                "max_tokens": 2048,
                "temp": 0.6,
                "trust_remote_code": True,
                "aliases": ["q"],
                "ttl": 300,
                "env": ["HF_HUB_OFFLINE=1"],
                "filters": {"stripParams": "temperature"},
            }
        },
        "groups": {"both": {"swap": True, "members": ["qwen"]}},
    }
    assert imported.remarks == (
        "startPort has no counterpart and was left out",
        "models.qwen: the flag --pipeline has no counterpart and was left out",
        "models.qwen.metadata has no counterpart and was left out",
        "models.other does not run mlx_lm.server and was left out",
        "groups.gone has no member left and was left out",
        "hooks.on_startup.preload lost the models that were left out",
    )


def test_a_file_without_a_model_for_us_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("models: {a: {path: /m}}\nhooks: {on_startup: {preload: [a]}}\n")
    with pytest.raises(ConfigError, match="no model of it runs mlx_lm.server"):
        import_llama_swap(path, {})


def test_what_was_imported_can_be_served(tmp_path: Path) -> None:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(LLAMA_SWAP)
    text = import_llama_swap(path, {}).text
    (model,) = parse_file(parse_yaml(text, "x"), Path("/x"), {}).models
    assert (model.id, model.model, model.preload) == ("qwen", "mlx-community/Qwen3-4B-4bit", True)


RICH_LLAMA_SWAP = """
globalTTL: ${idle}
macros: {idle: 60, heat: 0.1}
apiKeys: ["${env.THE_KEY}"]
models:
  qwen:
    macros: {heat: 0.7, folder: /models}
    cmd: mlx_lm.server --model ${folder}/${MODEL_ID} --temp ${heat}
    aliases: [{id: q, name: Q}, r]
    env: ["HF_TOKEN=${env.THE_TOKEN}"]
    filters: {strip_params: "temperature, top_p", setParamsByID: {q: {top_k: 1}}}
  other:
    cmd: mlx_lm.server --model x --temp ${heat}
"""


def test_an_import_reads_a_models_own_macros_named_aliases_and_old_filters(tmp_path: Path) -> None:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(RICH_LLAMA_SWAP)
    imported = import_llama_swap(path, {})
    models = yaml.safe_load(imported.text)["models"]
    qwen, other = models["qwen"], models["other"]
    assert (qwen["path"], qwen["temp"], other["temp"]) == ("/models/qwen", 0.7, 0.1)
    assert qwen["aliases"] == ["q", "r"]
    assert qwen["filters"] == {"stripParams": "temperature, top_p"}
    assert imported.remarks == (
        "models.qwen.aliases: name of q has no counterpart and was left out",
        "models.qwen.filters.setParamsByID has no counterpart and was left out",
    )


def test_an_import_prints_no_variable_of_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "llama-swap.yaml"
    path.write_text(RICH_LLAMA_SWAP)
    imported = import_llama_swap(path, {"THE_TOKEN": "hf_s3cret", "THE_KEY": "s3cret"})
    content = yaml.safe_load(imported.text)
    assert "s3cret" not in imported.text
    assert content["models"]["qwen"]["env"] == ["HF_TOKEN=${env.THE_TOKEN}"]
    assert (content["apiKeys"], content["globalTTL"]) == (["${env.THE_KEY}"], "60")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        import_llama_swap(tmp_path / "none.yaml", {})


def test_the_page_and_the_schema_know_every_key() -> None:
    page = document()
    for name in ("--queue-timeout", "--ssd-cache-max-gb GB", "MLX_ISOLATE_KV_BITS"):
        assert name in page
    properties = schema()["properties"]
    model = properties["models"]["additionalProperties"]["properties"]
    assert {"queue_timeout", "healthCheckTimeout", "groups", "temp"} <= set(properties)
    assert {"path", "ttl", "kv_bits", "concurrencyLimit"} <= set(model)


def test_the_example_of_the_page_is_a_right_configuration() -> None:
    example = document().split("```yaml\n")[1].split("```")[0]
    layer = parse_file(parse_yaml(example, "page"), Path("/page"), {"MY_KEY": "k"})
    assert [model.id for model in layer.models] == ["small", "big"]
    assert layer.values["--api-key"] == ["k"]


MISTAKEN = """
queue_timeout: soon
prot: 8081
macros: {size: big}
models:
  a: {path: o/a, temp: hot, tll: 5}
  b: {path: o/b, max_tokens: "${size}", aliases: [a]}
  c: 7
groups:
  g: {members: [a, nobody], swop: true}
hooks: {on_startup: {preload: [ghost]}}
"""


def test_check_tells_all_mistakes_at_once_and_each_one_once() -> None:
    content = parse_yaml(MISTAKEN, "c.yaml")
    found = find_mistakes(content, Path("c.yaml"), {}, MACHINE)
    told = "\n".join(found)
    for part in (
        "'soon'",
        "'prot'; did you mean 'port'?",
        "'hot'",
        "'tll'",
        "'big'",
        "'a'",
        "models.c must be a mapping",
        "'nobody'",
        "'swop'",
        "'ghost'",
    ):
        assert part in told, (part, found)
    assert len(found) == len(set(found)) == 10


def test_check_has_nothing_to_say_of_a_file_that_can_be_served() -> None:
    assert find_mistakes(parse_yaml(FILE, "c.yaml"), Path("c.yaml"), {}, MACHINE) == []


def test_check_says_that_a_file_names_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_isolate_supervisor.commands.serve.check_demo", lambda: None)
    (tmp_path / "c.yaml").write_text("")
    args = argparse.Namespace(verb="check", file=str(tmp_path / "c.yaml"))
    assert run(args) == 0
    assert capsys.readouterr().out.endswith("can be served; models: demo (the file names none)\n")


def test_check_says_each_mistake_on_a_line_and_exits_with_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MISTAKEN)
    assert run(argparse.Namespace(verb="check", file=str(path))) == exit_codes.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 10
    for line in told.err.splitlines():
        assert line.startswith("mlx-isolate: ") and str(path) in line


def test_an_import_writes_numbers_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "swap.yaml"
    path.write_text(
        "models: {m: {cmd: 'mlx_lm.server --model o/m --max-tokens 2048 --temp 0.60 --top-p 0.9'}}"
    )
    text = import_llama_swap(path, {}).text
    assert "max_tokens: 2048\n" in text
    assert "top_p: 0.9\n" in text
    assert "temp: '0.60'" in text


@pytest.mark.parametrize(
    ("variables", "content", "folder"),
    [
        ({}, "", None),
        ({"MLX_ISOLATE_SSD_CACHE_DIR": "/v"}, "", "/v"),
        ({}, "ssd_cache_dir: /f", "/f"),
        ({"MLX_ISOLATE_SSD_CACHE_DIR": "/v"}, "ssd_cache_dir: /f", "/v"),
        ({}, "models: {m: {path: o/m, ssd_cache_dir: /m}, n: {path: o/n}}", "/m"),
    ],
)
def test_the_cache_commands_find_the_folder_of_serve(
    variables: dict[str, str],
    content: str,
    folder: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MLX_ISOLATE_SSD_CACHE_DIR", "MLX_ISOLATE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert folder_of(str(file) if content else None) == folder
    if content:
        monkeypatch.setenv("MLX_ISOLATE_CONFIG", str(file))
        assert folder_of(None) == folder


def test_of_several_cache_folders_none_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_ISOLATE_SSD_CACHE_DIR", raising=False)
    file = tmp_path / "c.yaml"
    file.write_text("ssd_cache_dir: /a\nmodels: {m: {path: o/m, ssd_cache_dir: /b}}")
    with pytest.raises(ConfigError, match="give one of them as --dir: /a, /b"):
        folder_of(str(file))
