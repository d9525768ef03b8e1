"""What macOS does otherwise, through the same interfaces, with its system calls stood in for."""

import ctypes
import errno
import fcntl
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_isolate_engine import aside, process_name, unused_memory
from mlx_isolate_engine.cache import durability, owner
from mlx_isolate_engine.footprint import Footprint
from mlx_isolate_engine.model.facts import loaded_blas
from mlx_isolate_shared import footprint
from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_shared.lifeline import die_with_parent
from mlx_isolate_supervisor.drills.processes import Limit
from mlx_isolate_supervisor.drills.record import CannotRun
from mlx_isolate_supervisor.engines import child, death_watch, memory, orphans
from mlx_isolate_supervisor.engines.run_paths import SOCKET_PATH_BYTES_MAX, check_socket_path
from mlx_isolate_supervisor.relay import engine_gone
from mlx_isolate_supervisor.relay.socket_state import unread_bytes
from mlx_isolate_supervisor.service.managers import Launchd, manager_here

# Of <sys/resource.h>: a uuid of 16 bytes, then seven counters of eight before the footprint.
FOOTPRINT_OFFSET = 16 + 7 * 8


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


class FakeLibProc:
    """libproc of a system on which one process lives."""

    def __init__(self, pid: int, physical: int) -> None:
        self._pid = pid
        self._physical = physical

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any, /) -> int:
        assert flavor == 2, "rusage_info_v2: a uuid and eighteen counters"
        if pid != self._pid:
            return -1
        info = buffer._obj
        assert ctypes.sizeof(info) == 16 + 18 * 8
        place = ctypes.addressof(info) + FOOTPRINT_OFFSET
        ctypes.c_uint64.from_address(place).value = self._physical
        return 0


@pytest.mark.usefixtures("on_a_mac")
def test_both_sides_read_the_physical_footprint_from_its_place_in_the_struct(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = os.getpid()
    monkeypatch.setattr(footprint, "_libproc", lambda: FakeLibProc(own, 5 << 30))
    assert memory.footprint(own) == (5 << 30, "footprint")
    assert memory.footprint(own + 1) is None
    assert Footprint().read() == (5 << 30, "footprint")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_linux_measures_pss_of_small_processes_and_rss_of_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever the process that runs the tests has grown to.
    monkeypatch.setattr(memory, "_PSS_RSS_MAX", 1 << 60)
    small = memory.footprint(os.getpid())
    monkeypatch.setattr(memory, "_PSS_RSS_MAX", 0)
    large = memory.footprint(os.getpid())
    assert small is not None and small[1] == "pss"
    assert large is not None and large[1] == "rss"
    assert large[0] >= small[0] > 1 << 20


@pytest.mark.usefixtures("on_a_mac")
def test_free_memory_is_asked_of_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=42))
    assert memory.available_bytes() == 42


class FakeFcntl:
    """Notes each call; fails with `error` if there is one."""

    def __init__(self, error: int | None = None) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._error = error

    def __call__(self, descriptor: int, command: int, argument: int = 0) -> int:
        self.calls.append((descriptor, command, argument))
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        return 0


def test_a_file_is_made_durable_by_a_full_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    system, synced = FakeFcntl(), list[int]()
    monkeypatch.setattr(fcntl, "fcntl", system)
    monkeypatch.setattr(os, "fsync", synced.append)
    durability.sync(7, "darwin")
    assert system.calls == [(7, durability.F_FULLFSYNC, 0)]
    assert synced == []
    durability.sync(7, "linux")
    assert synced == [7]


def test_a_file_system_without_a_full_sync_gets_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced = list[int]()
    monkeypatch.setattr(fcntl, "fcntl", FakeFcntl(errno.ENOTSUP))
    monkeypatch.setattr(os, "fsync", synced.append)
    durability.sync(7, "darwin")
    assert synced == [7]


def test_pages_are_kept_out_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeFcntl()
    monkeypatch.setattr(fcntl, "fcntl", system)
    durability.forget_pages(7, 4096, 100, "darwin")
    assert system.calls == [(7, durability.F_NOCACHE, 1)]
    durability.forget_pages(7, 4096, 100, "elsewhere")
    durability.fetch_pages(7, 4096, "darwin")
    assert len(system.calls) == 1


def test_a_file_system_that_has_no_such_wish_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", FakeFcntl(errno.EINVAL))
    durability.forget_pages(7, 0, 0, "darwin")


@pytest.mark.parametrize(("platform", "limit"), [("darwin", 103), ("linux", 107), ("other", 103)])
def test_a_socket_path_is_as_long_as_the_system_takes(
    platform: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    check_socket_path(Path("/" + "x" * (limit - 1)))
    with pytest.raises(ConfigError, match=f"allows {limit}"):
        check_socket_path(Path("/" + "x" * limit))


def test_the_limit_is_this_systems_own(tmp_path: Path) -> None:
    limit = SOCKET_PATH_BYTES_MAX.get(sys.platform)
    if limit is None:
        pytest.skip("this system's limit is not known")
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(OSError, match="too long"):
        one.bind("/tmp/" + "x" * (limit + 1 - len("/tmp/")))


@pytest.mark.usefixtures("on_a_mac")
def test_a_process_is_told_from_a_later_one_with_its_pid_by_its_start() -> None:
    own = orphans.process_start(os.getpid())
    assert own is not None
    assert own == orphans.process_start(os.getpid())
    # The parent may have started within the same tick of the clock.
    assert own != orphans.process_start(1)
    mark = owner.own_mark()
    assert owner.is_alive(mark)
    assert not owner.is_alive(f"{os.getpid()}-1")


@pytest.mark.usefixtures("on_a_mac")
def test_what_only_linux_has_is_left_alone(tmp_path: Path) -> None:
    assert process_name.name_in_ps("m", 1) is False
    assert loaded_blas(tmp_path / "maps") == "Accelerate"
    assert death_watch._open_handle(os.getpid(), 0) is None  # pyright: ignore[reportPrivateUsage]
    child.forbid_core_dumps(os.getpid())
    assert unused_memory._find_trim() is None  # pyright: ignore[reportPrivateUsage]
    assert aside._other_threads() == []  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(CannotRun, match="only Linux"):
        Limit(psutil.Process(), "RLIMIT_AS", 1)


def _no_library(*_names: object) -> None:
    pytest.fail("there is no prctl")


@pytest.mark.usefixtures("on_a_mac")
def test_an_engine_asks_for_no_parent_death_signal_but_heeds_its_lifeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    ended = list[int]()
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    monkeypatch.setattr(os, "_exit", ended.append)
    die_with_parent(read)
    assert ended == []
    os.close(write)
    die_with_parent(read)
    assert ended == [75]
    os.close(read)


@pytest.mark.parametrize(("platform", "error"), [("linux", True), ("darwin", False)])
def test_a_reset_says_that_a_request_was_unread_on_linux_only(
    platform: str, error: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert engine_gone.says_unread(ConnectionResetError()) is error
    assert engine_gone.says_unread(BrokenPipeError()) is True
    assert engine_gone.says_unread(None) is False


def test_without_the_kernels_word_what_waits_in_the_process_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_descriptor: int, _request: int, _argument: object) -> None:
        raise OSError(errno.ENOTTY, "not known of sockets here")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    with socket.socket() as one:

        def info(_name: str) -> socket.socket:
            return one

        transport: Any = types.SimpleNamespace(
            get_write_buffer_size=lambda: 42, get_extra_info=info
        )
        assert unread_bytes(transport) == 42


def test_the_service_is_launchds() -> None:
    assert isinstance(manager_here("darwin"), Launchd)


def test_every_file_that_asks_for_its_platform_is_listed() -> None:
    root = Path(__file__).resolve().parents[2]
    listed = (root / "docs" / "platforms.md").read_text()
    for side in ("supervisor", "engine", "shared"):
        for file in sorted((root / side).rglob("*.py")):
            if "sys.platform" in file.read_text():
                assert f"`{file.relative_to(root).as_posix()}`" in listed, file
