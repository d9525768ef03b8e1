"""The log file: appended to, renamed when it is full, made anew when it has gone."""

import shutil
import stat
from pathlib import Path

from mlx_isolate_supervisor.telemetry.log_file import LogFile


def test_lines_are_appended_to_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"old\n")
    file = LogFile(path)
    file.write(b"new\n")
    assert path.read_bytes() == b"old\nnew\n"
    file.close()


def test_no_other_user_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = LogFile(path, bytes_max=4, kept=1)
    for line in (b"1\n", b"2\n", b"3\n"):
        file.write(line)
    file.close()
    assert [stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()] == [0o600, 0o600]


def test_a_full_file_becomes_the_first_older_one_and_the_oldest_goes(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "x.log", bytes_max=4, kept=2)
    for line in (b"1\n", b"2\n", b"3\n", b"4\n", b"5\n", b"6\n", b"7\n"):
        file.write(line)
    file.close()
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"x.log": b"7\n", "x.log.1": b"5\n6\n", "x.log.2": b"3\n4\n"}


def test_a_block_larger_than_a_file_is_kept_whole(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "x.log", bytes_max=4, kept=1)
    file.write(b"a long line\n")
    assert (tmp_path / "x.log").read_bytes() == b"a long line\n"
    assert not (tmp_path / "x.log.1").exists()
    file.close()


def test_a_file_that_was_moved_or_removed_with_its_folder_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "x.log"
    path.parent.mkdir()
    file = LogFile(path)
    file.write(b"1\n")
    path.rename(tmp_path / "kept")
    file.write(b"2\n")
    assert (tmp_path / "kept").read_bytes() == b"1\n"
    assert path.read_bytes() == b"2\n"
    shutil.rmtree(path.parent)
    file.write(b"3\n")
    assert path.read_bytes() == b"3\n"
    file.close()
