"""The whole examination, in the order in which a start would meet the faults."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_shared.probe import ProbeAnswer
from mlx_isolate_supervisor.commands.client import daemon_of_settings
from mlx_isolate_supervisor.commands.errors import CommandError
from mlx_isolate_supervisor.commands.service import remarks, run_command
from mlx_isolate_supervisor.config import ServeSettings
from mlx_isolate_supervisor.doctor.engine_check import (
    PROBE,
    ask_probe,
    judge_backend,
    judge_folder,
)
from mlx_isolate_supervisor.doctor.findings import Finding, doubt, fault, ok
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
from mlx_isolate_supervisor.engines.memory import available_bytes, physical_bytes
from mlx_isolate_supervisor.models.devices import FILE_NAME, DeviceBook
from mlx_isolate_supervisor.models.pool_limits import pool_limits, with_devices
from mlx_isolate_supervisor.service.definition import DEFAULT_NAME
from mlx_isolate_supervisor.service.managers import manager_here
from mlx_isolate_supervisor.settings.layers import Resolved
from mlx_isolate_supervisor.settings.models import DEMO
from mlx_isolate_supervisor.user_folders import cache_folder, state_folder


def examine(resolved: Resolved, *, probe: Sequence[str] = PROBE) -> Iterator[Finding]:
    """All findings about this machine with these settings, one after another.

    Args:
        resolved: what `serve` would run with.
        probe: the engine's probe.
    """
    settings = resolved.settings
    yield ok("settings", f"these would be served: {_names(settings)}.")
    for sentence in resolved.warnings:
        yield doubt("settings", sentence, "see mlx-isolate config show")
    for sentence in remarks(resolved):
        text, _, remedy = sentence.partition("; ")
        yield doubt("keys", f"{text}.", remedy)
    yield from _examine_engine(settings, probe)
    yield check_open_files()
    yield from _examine_disks(settings)
    port, is_ours = check_port(settings, daemon_of_settings(settings))
    yield port
    yield check_run_directory(settings, is_ours_running=is_ours)
    yield check_log_folder(settings)
    try:
        yield check_service(manager_here(), DEFAULT_NAME, run_command)
    except CommandError as error:
        yield doubt("service", f"{error}.", "start it from your own service manager")


def _names(settings: ServeSettings) -> str:
    return ", ".join(model.id for model in settings.models) or "none"


def _examine_engine(settings: ServeSettings, probe: Sequence[str]) -> Iterator[Finding]:
    local = [model for model in settings.models if model.model.startswith("/")]
    folders = [model.model for model in local]
    trusted = [model.model for model in local if model.engine.trust_remote_code]
    try:
        answer = ask_probe(folders, settings.blas, trusted=trusted, program=probe)
    except ConfigError as error:
        answer = fault("blas", str(error), "give --blas auto, off, or a library's path")
    weights: list[tuple[str, int]] = []
    if isinstance(answer, ProbeAnswer):
        yield from judge_backend(answer)
        yield from (judge_folder(answer, found) for found in answer.folders)
        weights = [(Path(found.folder).name, found.weights_bytes) for found in answer.folders]
    else:
        yield answer
    for model in settings.models:
        if model.model not in (DEMO, *folders):
            yield check_hub_model(model.model)
    yield from judge_memory(_memory(settings), weights)


def _memory(settings: ServeSettings) -> Memory:
    known = DeviceBook(state_folder() / FILE_NAME).known
    limits, physical = with_devices(pool_limits(settings), known), physical_bytes()
    return Memory(
        available=available_bytes(),
        physical=physical,
        budget=physical if limits.budget_bytes is None else limits.budget_bytes,
        ceiling=physical if limits.ceiling_bytes is None else limits.ceiling_bytes,
    )


def _examine_disks(settings: ServeSettings) -> Iterator[Finding]:
    cache = Path(settings.cache_home) if settings.cache_home else cache_folder()
    yield check_disk("converted models in", cache)
    folders = {model.engine.ssd_cache_dir for model in settings.models} - {None}
    for folder in sorted(str(folder) for folder in folders):
        yield check_disk("prompt caches in", Path(folder).expanduser())
