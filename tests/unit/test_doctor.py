"""Findings of the doctor, each from the state that causes it."""

import fcntl
import json
import resource
import socket
import sys
import time
from pathlib import Path

import pytest

from mlx_isolate_shared.probe import FolderFinding, ProbeAnswer
from mlx_isolate_supervisor.cli import main
from mlx_isolate_supervisor.commands.client import Daemon
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.doctor.engine_check import ask_probe, judge_backend, judge_folder
from mlx_isolate_supervisor.doctor.findings import Finding, doubt, fault, lines, ok
from mlx_isolate_supervisor.doctor.machine_checks import (
    Memory,
    check_disk,
    check_open_files,
    judge_memory,
)
from mlx_isolate_supervisor.doctor.place_checks import (
    check_hub_model,
    check_log_folder,
    check_port,
    check_run_directory,
    check_service,
)
from mlx_isolate_supervisor.service.definition import Definition
from mlx_isolate_supervisor.service.files import write
from mlx_isolate_supervisor.service.managers import Command, Done, Launchd, Manager, Systemd

GB = 1_000_000_000
MEMORY = Memory(available=8 * GB, physical=16 * GB, budget=12 * GB, ceiling=16 * GB)
CPU = ProbeAnswer(backend="cpu", blas="OpenBLAS", gflops=80.0, versions={"mlx": "1", "mlx-lm": "2"})


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_every_finding_that_is_not_ok_has_a_remedy() -> None:
    assert ok("a", "b").remedy is None
    assert doubt("a", "b", "c").remedy == "c"
    shown = list(lines([ok("port", "free."), doubt("blas", "slow.", "faster")]))
    assert shown[-1] == "nothing would stop it from serving; 1 doubt"
    assert "remedy: faster" in shown[2]
    shown = list(lines([fault("port", "taken.", "another")]))
    assert shown[-1] == "1 fault would stop it, or a model, from serving; no doubts"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], ["ok"]),
        ([9], ["ok", "doubt"]),
        ([17], ["ok", "fault"]),
        ([14], ["ok", "fault"]),  # with a fifth more for what it works with, 17
        ([6, 6], ["ok", "doubt"]),
    ],
)
def test_weights_are_judged_by_what_may_be_used(sizes: list[int], expected: list[str]) -> None:
    weights = [(f"m{number}", size * GB) for number, size in enumerate(sizes)]
    assert levels(judge_memory(MEMORY, weights)) == expected


def test_a_slow_blas_is_doubted_and_a_gpu_needs_none() -> None:
    assert levels(list(judge_backend(CPU))) == ["ok", "ok"]
    slow = ProbeAnswer(backend="cpu", blas="reference BLAS", gflops=1.3, versions={})
    assert levels(list(judge_backend(slow))) == ["ok", "doubt"]
    gpu = ProbeAnswer(backend="cuda", blas=None, gflops=1.3, versions={})
    assert levels(list(judge_backend(gpu))) == ["ok"]


def test_a_broken_folder_is_a_fault_and_a_slow_type_a_doubt() -> None:
    broken = FolderFinding(folder="/m", error="/m has no config.json.")
    assert judge_folder(CPU, broken).level == "fault"
    half = FolderFinding(folder="/m", weights_bytes=1, dtype="bfloat16")
    assert judge_folder(CPU, half).level == "doubt"
    whole = FolderFinding(folder="/m", weights_bytes=1, dtype="float32")
    assert judge_folder(CPU, whole).level == "ok"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise ImportError('no mlx here')", "no mlx here"),
        ("print('nonsense')", "did not answer"),
        ("import time; time.sleep(60)", "within 0.5 s"),
    ],
)
def test_a_probe_that_fails_in_any_way_is_a_fault(script: str, said: str) -> None:
    deadline_s = 0.5 if "sleep" in script else 30.0
    found = ask_probe([], "off", program=(sys.executable, "-c", script), deadline_s=deadline_s)
    assert isinstance(found, Finding)
    assert found.level == "fault"
    assert said in found.text


def test_the_probe_is_told_whose_code_may_run() -> None:
    script = (
        "import sys\nfrom mlx_isolate_engine import probe\n"
        "probe.backend_name = lambda: 'metal'\nprobe.matrix_gflops = lambda: 1.0\n"
        "probe.look_at = lambda folder, is_trusted: probe.FolderFinding("
        "folder=folder, dtype='trusted' if is_trusted else None)\n"
        "sys.exit(probe.main(sys.argv[1:]))"
    )
    folders, program = ["/a", "/b b"], (sys.executable, "-c", script)
    answer = ask_probe(folders, "off", trusted=["/b b"], program=program)
    assert isinstance(answer, ProbeAnswer), answer
    assert [(one.folder, one.dtype) for one in answer.folders] == [
        ("/a", None),
        ("/b b", "trusted"),
    ]


@pytest.mark.parametrize(
    ("limits", "level"),
    [((256, 512), "doubt"), ((256, 4096), "ok"), ((-1, -1), "ok")],
)
def test_few_open_files_are_doubted_where_they_cannot_become_more(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], level: str
) -> None:
    own = [limits]

    def getrlimit(_: int) -> tuple[int, int]:
        return own[-1]

    def setrlimit(_: int, new: tuple[int, int]) -> None:
        own.append(new)

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert check_open_files().level == level


def test_a_disk_is_measured_where_the_folder_will_be_and_nothing_is_left(tmp_path: Path) -> None:
    found = check_disk("caches in", tmp_path / "not/yet/there", sample_bytes=1 << 20)
    assert "free" in found.text and "/s written" in found.text
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_a_fault(tmp_path: Path) -> None:
    assert check_disk("caches in", tmp_path, sample_bytes=1 << 60).level == "fault"


def test_a_folder_that_may_not_be_looked_at_is_judged_by_what_is_above(tmp_path: Path) -> None:
    # Too long rather than forbidden, which nothing is to root.
    path = tmp_path / ("x" * 300)
    assert check_disk("caches in", path, sample_bytes=1 << 20).level == "ok"
    assert check_log_folder(ServeSettings(log_dir=str(path))).level == "ok"


def test_a_log_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = check_log_folder(ServeSettings(log_dir=str(tmp_path / "file" / "logs")))
    assert (found.level, found.remedy) == ("fault", "choose another folder: --log-dir")
    assert check_log_folder(ServeSettings(log_dir=str(tmp_path / "new"))).level == "ok"
    assert check_log_folder(ServeSettings(log_dir="")).level == "ok"


def settings_for(port: int, run_dir: Path | None = None) -> ServeSettings:
    return ServeSettings(port=port, run_dir=str(run_dir) if run_dir else None)


def test_a_port_of_another_program_is_a_fault_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        # It accepts and closes, as no daemon of ours does.
        taken.listen(1)
        taken.settimeout(10)
        import threading

        thread = threading.Thread(target=lambda: taken.accept()[0].close())
        thread.start()
        found, is_ours = check_port(settings_for(port), Daemon(f"http://127.0.0.1:{port}", None))
        thread.join()
    assert (found.level, is_ours) == ("fault", False)
    found, is_ours = check_port(settings_for(port), Daemon(f"http://127.0.0.1:{port}", None))
    assert (found.level, is_ours) == ("ok", False)


def test_a_port_of_a_program_that_never_answers_is_told_in_a_moment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        began = time.monotonic()
        found, _ = check_port(settings_for(port), Daemon(f"http://127.0.0.1:{port}", None))
        assert time.monotonic() - began < 5.0
    assert found.level == "fault"


def test_a_run_directory_whose_sockets_would_be_cut_off_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    assert check_run_directory(settings_for(1, path), is_ours_running=False).level == "fault"


def test_a_run_directory_that_another_supervisor_holds_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mi", dir="/tmp") as name:
        folder = Path(name)
        settings = settings_for(1, folder)
        assert check_run_directory(settings, is_ours_running=False).level == "ok"
        with (folder / "supervisor.lock").open("w+") as lock:
            lock.write("4711\n")
            lock.flush()
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = check_run_directory(settings, is_ours_running=False)
            assert found.level == "fault"
            assert "4711" in found.text
            assert check_run_directory(settings, is_ours_running=True).level == "ok"


def test_a_repo_that_is_not_cached_is_doubted_and_offline_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert check_hub_model("a/b").level == "doubt"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check_hub_model("a/b").level == "fault"
    (tmp_path / "hub/models--a--b/snapshots/1").mkdir(parents=True)
    assert check_hub_model("a/b").level == "ok"


@pytest.mark.parametrize("kind", ["systemd", "launchd"])
def test_a_service_is_judged_by_its_program_and_its_state(tmp_path: Path, kind: str) -> None:
    manager: Manager = Systemd(tmp_path) if kind == "systemd" else Launchd(tmp_path, 501)
    said = ""

    def run(_: Command) -> Done:
        return Done(0, said)

    assert check_service(manager, "s", run).level == "ok"
    program = tmp_path / "my 100% python"
    service = Definition(
        name="s", argv=(str(program), "serve"), environment={}, url="", shutdown_timeout_s=1.0
    )
    write(manager.file(service))
    assert manager.program("s") == program
    assert check_service(manager, "s", run).level == "fault"
    program.symlink_to(sys.executable)
    assert check_service(manager, "s", run).level == "doubt"
    said = (
        "ActiveState=active\nMainPID=7\n" if kind == "systemd" else "\tstate = running\n\tpid = 7\n"
    )
    assert check_service(manager, "s", run).level == "ok"
    manager.path("s").write_text("nonsense")
    assert manager.program("s") is None


def test_settings_that_cannot_start_are_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "/no/such/folder"]) == 1
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert (found["area"], found["level"]) == ("settings", "fault")
    assert found["remedy"]
