"""Each snippet of the README does what the README says, on a tiny model under the demo's name."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import READY_DEADLINE_S
from tests.running_daemon import REAL, ROOT, RunningDaemon, environment

README = (ROOT / "README.md").read_text()


def snippet(heading: str, language: str, index: int = 0) -> str:
    """A code block of a language below a heading."""
    part = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    assert len(found) > index, f"no {language} block {index} below {heading!r}"
    return found[index]


@pytest.fixture(scope="module")
def serving(
    slow_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningDaemon, dict[str, str]]]:
    """A daemon whose one model is called demo, and an environment in which commands find it."""
    home = tmp_path_factory.mktemp("readme")
    programs = home / "bin"
    programs.mkdir()
    command = programs / "mlx-isolate"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mlx_isolate_supervisor.cli "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    (programs / "python3").symlink_to(sys.executable)
    arguments = (str(slow_model), "--served-model-name", "demo")
    with RunningDaemon(home / "home", *arguments, program=REAL, standby=None) as daemon:
        daemon.wait_state("ready", deadline_s=READY_DEADLINE_S)
        variables = environment(home / "home") | {
            "MLX_ISOLATE_URL": daemon.url,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        yield daemon, variables


def run(program: list[str], variables: dict[str, str]) -> str:
    """Run to a good end and give its output."""
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_snippet_answers(serving: tuple[RunningDaemon, dict[str, str]]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    daemon, variables = serving
    command = snippet("Talk to it", "sh").replace("http://127.0.0.1:8080", daemon.url)
    answer = json.loads(run(["bash", "-c", command], variables))
    assert answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 40


def test_openai_snippet_streams(serving: tuple[RunningDaemon, dict[str, str]]) -> None:
    daemon, variables = serving
    script = snippet("Talk to it", "python").replace("http://127.0.0.1:8080", daemon.url)
    assert len(run([sys.executable, "-c", script], variables)) >= 60


def test_kill_drill_ends_the_stream_honestly_and_serves_again(
    serving: tuple[RunningDaemon, dict[str, str]],
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    daemon, variables = serving
    before = daemon.wait_state("ready")
    asked = snippet("Kill it", "sh").replace("http://127.0.0.1:8080", daemon.url)
    with subprocess.Popen(
        ["bash", "-c", f"exec {asked}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data:")
        run(["bash", "-c", snippet("Kill it", "sh", 1)], variables)
        rest = client.stdout.read()
    assert b'"code":"engine_died"' in rest
    assert b"[DONE]" not in rest
    assert daemon.chat(max_tokens=3).status == 200
    after = daemon.wait_state("ready")
    assert after["pid"] != before["pid"]
    assert "SIGKILL" in run(["mlx-isolate", "status"], variables)


def test_commands_name_extras_that_exist() -> None:
    """The two install lines; that they work is shown by running them in a fresh clone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for heading in ("Run it", "Run the tests"):
        line = snippet(heading, "sh")
        assert line.count("\n") == 1
        named = re.search(r"'\.\[([a-z0-9,]+)\]'", line)
        assert named
        assert set(named[1].split(",")) <= set(extras)
    # The back ends' packages write the same files, so nothing else may bring one along.
    assert not [one for one in [*extras["demo"], *extras["mkl"]] if "mlx" in one]
