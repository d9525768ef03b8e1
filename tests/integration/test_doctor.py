"""The doctor's whole examination with the real probe, and beside a running daemon."""

import json
from pathlib import Path

from tests.running_daemon import RunningDaemon, fake_model, run_command


def test_doctor_finds_a_whole_model_and_a_broken_one(full_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    flags = ("--run-dir", "/tmp/mi-doctor", "--port", "1025", "--json")
    done = run_command(tmp_path / "home", "doctor", str(full_model), *flags)
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, findings
    areas = {finding["area"] for finding in findings}
    assert {"backend", "model", "memory", "files", "disk", "port", "run dir", "service"} <= areas
    assert all(finding["remedy"] for finding in findings if finding["level"] != "ok")
    done = run_command(tmp_path / "home", "doctor", str(full_model), str(broken), *flags)
    assert done.returncode == 1
    [fault] = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "fault"]
    assert "holds no model*.safetensors file" in fault["text"]
    # Nothing was made where a daemon would have made it.
    assert not Path("/tmp/mi-doctor").exists()


def test_doctor_knows_a_daemon_of_ours(tmp_path: Path, full_model: Path) -> None:
    with RunningDaemon(tmp_path / "home", str(fake_model(tmp_path / "m"))) as daemon:
        done = run_command(
            tmp_path / "home",
            "doctor",
            str(full_model),
            *("--port", str(daemon.port), "--run-dir", str(daemon.run_dir), "--json"),
        )
    findings = {finding["area"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert "a daemon of ours answers" in findings["port"]["text"]
    assert findings["run dir"]["level"] == "ok"
    assert done.returncode == 0
