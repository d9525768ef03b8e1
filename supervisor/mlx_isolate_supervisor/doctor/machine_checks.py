"""Memory, open files and disks of this machine."""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mlx_isolate_supervisor.doctor.findings import Finding, doubt, fault, ok
from mlx_isolate_supervisor.models.projection import unmeasured_bytes
from mlx_isolate_supervisor.open_files import allow_many_open_files
from mlx_isolate_supervisor.settings.quantities import show_bytes

# Written and synced to measure a disk; the first few MB of a slow one tell nothing.
SAMPLE_BYTES = 64 << 20
# A disk below this makes a prompt cache on it slower than the prompt itself.
DISK_BYTES_PER_S_MIN = 50e6
# The converted demo needs 1.1 GB; a disk with less room than this will soon be full.
FREE_BYTES_MIN = 2_000_000_000
OPEN_FILES_MIN = 1024


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes.

    Attributes:
        available: what the system could give now, None where it does not say.
        physical: all of it.
        budget: for all engines.
        ceiling: for one model alone.
    """

    available: int | None
    physical: int
    budget: int
    ceiling: int


def judge_memory(memory: Memory, weights: Sequence[tuple[str, int]]) -> list[Finding]:
    """Whether the models fit, by what is projected for their weights; all sizes in bytes.

    Args:
        memory: what there is.
        weights: each model's name and weights.
    """
    available, budget = memory.available, memory.budget
    shown = f", {show_bytes(available)} of it free" if available is not None else ""
    text = (
        f"{show_bytes(memory.physical)}{shown}; the budget of all engines is {show_bytes(budget)}."
    )
    found = [ok("memory", text)]
    needs = [(name, unmeasured_bytes(size)) for name, size in weights]
    for name, size in needs:
        if size > memory.ceiling:
            found.append(
                fault(
                    "memory",
                    f"{name} will need some {show_bytes(size)}, more than it may: it would be "
                    "refused (507).",
                    "raise --memory-budget-gb, or serve a smaller or quantized model",
                )
            )
        elif available is not None and size > available:
            found.append(
                doubt(
                    "memory",
                    f"{name} will need some {show_bytes(size)}, more than is free now.",
                    "end other programs before it loads",
                )
            )
    total = sum(size for _, size in needs)
    if total > budget and all(size <= memory.ceiling for _, size in needs):
        found.append(
            doubt(
                "memory",
                f"all models together will need some {show_bytes(total)}, more than the budget: "
                "they will take turns.",
                "raise --memory-budget-gb if they should stay loaded",
            )
        )
    return found


def check_open_files() -> Finding:
    """Whether a daemon may have many connections open, which raises its limit as far as it may."""
    limit = allow_many_open_files()
    if limit != resource.RLIM_INFINITY and limit < OPEN_FILES_MIN:
        return doubt(
            "files",
            f"{limit} files may be open; each request takes two.",
            f"raise the hard limit: ulimit -Hn {OPEN_FILES_MIN * 8} as root, before the start",
        )
    is_endless = limit == resource.RLIM_INFINITY
    return ok("files", "any number may be open." if is_endless else f"{limit} may be open.")


def check_disk(what: str, folder: Path, sample_bytes: int = SAMPLE_BYTES) -> Finding:
    """Room and speed of the disk that holds `folder`, or will."""
    place = folder
    # Not Path.is_dir, which raises where a folder above may not be looked into.
    while not os.path.isdir(place) and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
        if free < sample_bytes * 2:
            return fault(
                "disk",
                f"{what} {folder}: only {show_bytes(free)} are free.",
                "free some room, or choose another folder",
            )
        speed = _write_speed(place, sample_bytes)
    except OSError as error:
        return fault(
            "disk",
            f"{what} {folder} cannot be written: {error.strerror or error}.",
            f"make {place} writable for this user, or choose another folder",
        )
    text = f"{what} {folder}: {show_bytes(free)} free, {show_bytes(int(speed))}/s written."
    if free < FREE_BYTES_MIN:
        return doubt("disk", text, "free some room; a full disk costs the prompt cache its writes")
    if speed < DISK_BYTES_PER_S_MIN:
        return doubt("disk", text, "put the folder on a faster disk")
    return ok("disk", text)


def _write_speed(folder: Path, count: int) -> float:
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(count // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return count / (time.perf_counter() - began)
