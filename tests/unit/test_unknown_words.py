"""What the command line says to a word that it does not know."""

import pytest

from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.exit_codes import USAGE


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (["srve"], "there is no command 'srve', did you mean serve; see mlx-isolate --help"),
        (["start"], "there is no command 'start', did you mean serve; see mlx-isolate --help"),
        (["run", "demo"], "there is no command 'run', did you mean serve; see mlx-isolate --help"),
        (["--port", "90"], "give a command before --port, such as serve; see mlx-isolate --help"),
        (["ps", "--jsn"], "unknown argument --jsn, did you mean --json; see mlx-isolate ps --help"),
        (
            ["config", "chek", "f"],
            "there is no verb 'chek', did you mean check; see mlx-isolate config --help",
        ),
        (
            ["config"],
            "give VERB: check, show, import, schema; see mlx-isolate config --help",
        ),
    ],
)
def test_it_names_the_nearest_one(
    typed: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(typed)
    assert exit.value.code == USAGE
    assert capsys.readouterr().err == f"mlx-isolate: {sentence}\n"


@pytest.mark.parametrize("word", ["earthquake", "foo"])
def test_a_word_near_to_none_gets_them_all(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drill", word])
    assert f"there is no drill {word!r}; choose from kill, " in capsys.readouterr().err


def test_the_help_of_a_flag_tells_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "0 lets the system choose (default 8080; MLX_ISOLATE_PORT)" in said
    assert "--adapter-path FOLDER LoRA adapter of the model (MLX_ISOLATE_ADAPTER_PATH)" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("config", "check"), "say whether a file can be served, or what is wrong"),
        (("service", "logs"), "what the service wrote"),
    ],
)
def test_the_help_of_a_verb_says_what_it_does(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("logs", "-n", "-5"),
        ("logs", "-n", "five"),
        ("service", "logs", "-n", "1e3"),
        ("top", "--interval", "-1"),
        ("top", "--interval", "nan"),
    ],
    ids=" ".join,
)
def test_a_number_that_makes_no_sense_is_a_usage_error(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert words[-1] in told.err and len(told.err.splitlines()) == 1
