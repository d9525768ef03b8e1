"""From an engine's settings to its prompt cache: defaults, checks, and the tier below RAM."""

import logging
from pathlib import Path
from typing import cast

import psutil

from mlx_isolate_engine.cache.cold_side import ColdSettings
from mlx_isolate_engine.cache.fingerprint import Fingerprint, fingerprint
from mlx_isolate_engine.cache.prompt_cache import PromptCache
from mlx_isolate_engine.cache.restore_choice import MODES, Mode, RestoreChoice
from mlx_isolate_engine.cache.ssd_store import SsdStore, StoreIdentity
from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_shared.wire import Start

log = logging.getLogger(__name__)

# The RAM tier of an engine that nobody gave a share: an eighth of the machine, at most 8 GB.
RAM_BYTES_MAX = 8_000_000_000
RAM_SHARE = 1 / 8


def check_settings(settings: EngineSettings) -> None:
    """Refuse what can never work.

    Raises:
        ConfigError: in one sentence.
    """
    if settings.ssd_restore not in MODES:
        raise ConfigError(
            f"--ssd-restore is '{settings.ssd_restore}'; it can be {', '.join(MODES)}."
        )
    if settings.ssd_cache_dir is not None and settings.prompt_cache_size == 0:
        raise ConfigError(
            "--prompt-cache-size 0 switches the prompt cache off, so --ssd-cache-dir has nothing "
            "to store; give it at least 1."
        )


def identify(settings: EngineSettings, folder: Path) -> Fingerprint:
    """The fingerprint of a model folder under these settings, as the files are now.

    Raises:
        OSError: a file cannot be read.
    """
    others = [Path(path) for path in (settings.adapter_path, settings.draft_model) if path]
    named = [str(path) for path in others if not path.is_dir()]
    bits = f"bits={settings.kv_bits} group={settings.kv_group_size}"
    scheme = f"{bits} start={settings.quantized_kv_start}" if settings.kv_bits else "full"
    return fingerprint(
        folder,
        kv_scheme=" ".join([scheme, *named]),
        template=f"{_template(settings)}|{settings.use_default_chat_template}",
        others=[path for path in others if path.is_dir()],
    )


def _template(settings: EngineSettings) -> str:
    given = settings.chat_template or ""
    if "\n" not in given and len(given) < 4096 and Path(given).is_file():
        return Path(given).read_text(errors="replace")
    return given


def build_prompt_cache(
    start: Start, folder: Path, before_load: Fingerprint | None
) -> PromptCache | None:
    """The prompt cache of an engine; None where it is switched off.

    Args:
        folder: where the model was loaded from.
        before_load: its fingerprint before the load; where it has changed since, files were
            replaced meanwhile and nobody knows what was loaded, so nothing is stored or restored.

    Raises:
        ConfigError: see check_settings.
    """
    settings = start.settings
    check_settings(settings)
    if settings.prompt_cache_size == 0:
        return None
    bytes_max = settings.prompt_cache_bytes
    if bytes_max is None:
        bytes_max = min(RAM_BYTES_MAX, int(psutil.virtual_memory().total * RAM_SHARE))
    return PromptCache(
        entries_max=settings.prompt_cache_size,
        bytes_max=bytes_max,
        cold=_cold_settings(start, folder, before_load, bytes_max),
    )


def _cold_settings(
    start: Start, folder: Path, before_load: Fingerprint | None, ram_bytes_max: int
) -> ColdSettings | None:
    settings = start.settings
    if settings.ssd_cache_dir is None:
        return None
    try:
        now = identify(settings, folder)
    except OSError as error:
        log.warning("cache.ssd_off cause=%s", error.strerror)
        return None
    if before_load is not None and before_load != now:
        log.warning("cache.ssd_off cause=the model's files changed while it was loaded")
        return None
    identity = StoreIdentity(
        model=str(folder), model_id=start.model_id, fingerprint=now.value, tokenizer=now.tokenizer
    )
    store = SsdStore(
        Path(settings.ssd_cache_dir).expanduser().absolute(),
        identity,
        bytes_max=settings.ssd_cache_bytes_max,
        verify=settings.ssd_cache_verify,
    )
    try:
        store.open()
    except OSError:
        log.warning("cache.ssd_unusable cause=%s", store.stats().trouble)
    stats = store.stats()
    log.info("cache.opened entries=%d bytes=%d", stats.entries, stats.bytes)
    spill_bytes_max = settings.ssd_spill_queue_bytes
    return ColdSettings(
        tier=store,
        choice=RestoreChoice(cast(Mode, settings.ssd_restore)),
        write_behind=settings.ssd_write_behind,
        spill_bytes_max=ram_bytes_max // 4 if spill_bytes_max is None else spill_bytes_max,
        demote_idle_s=settings.ssd_demote_idle_s,
    )
