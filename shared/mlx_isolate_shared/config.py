"""Settings that travel from the supervisor to an engine, with the limits both sides hold to.

Every limit says what breaks without it. Settings of the supervisor alone live in the
supervisor's own config module.
"""

from typing import Any

import msgspec

# An engine writes a progress line at least this often; without it a hang cannot be told from work.
PROGRESS_INTERVAL_S = 0.5
# After the lifeline closes an engine is gone within this time, whatever its threads are doing.
LIFELINE_EXIT_S = 1.0
# Longest line on a report or spec pipe, in bytes; without it a lying peer fills memory.
PIPE_LINE_BYTES_MAX = 1 << 20
# Exit code of an engine that can never work as configured: no respawn until something changes.
EXIT_CANNOT_WORK = 78


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's settings, named as mlx-lm's flags are; None means the model's own default."""

    adapter_path: str | None = None
    # What requests may choose instead, by name: folders of adapters.
    adapters: dict[str, str] = {}
    draft_model: str | None = None
    num_draft_tokens: int = 3
    trust_remote_code: bool = False
    # Put prompts and answers into the log; they are what people wrote, so never by default.
    log_text: bool = False
    chat_template: str | None = None
    use_default_chat_template: bool = False
    chat_template_args: dict[str, Any] = {}
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    # RAM tier: entries and bytes. Bytes are this engine's share, handed out by the supervisor.
    prompt_cache_size: int = 10
    prompt_cache_bytes: int | None = None
    # SSD tier: off without a directory.
    ssd_cache_dir: str | None = None
    ssd_cache_bytes_max: int = 32_000_000_000
    ssd_cache_verify: bool = False
    ssd_restore: str = "auto"
    ssd_write_behind: bool = True
    ssd_spill_queue_bytes: int | None = None
    ssd_demote_idle_s: float = 300.0
    # Longest time one generation step may keep a running stream waiting.
    max_step_s: float = 0.5
    # Wall-clock silence before a keepalive comment; 0 switches them off.
    sse_ping_interval_s: float = 15.0
    # What a client that stopped reading may hold in this engine before its row is cancelled.
    stall_buffer_bytes: int = 256 * 1024
    stall_timeout_s: float = 60.0
    # Requests beyond decode_concurrency that an engine accepts on its socket; the supervisor hands
    # out no more than decode_concurrency, so this only guards the socket against other callers.
    engine_queue_max: int = 128
    # Request fields that the engine drops, and those that it sets, before it reads a request.
    strip_params: tuple[str, ...] = ()
    set_params: dict[str, Any] = {}
    body_bytes_max: int = 64 * 1024 * 1024
    header_bytes_max: int = 32 * 1024
