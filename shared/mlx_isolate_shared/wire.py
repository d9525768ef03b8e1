"""The three pipes between supervisor and engine as typed JSON lines.

*spec* (supervisor to engine): `Prepare`, then `Start`. *report* (engine to supervisor): `Loading`,
`Ready` or `Failed`, then `Progress` for ever. *lifeline* carries nothing: its end is the message.
Readers tolerate fields they do not know, so that versions can differ by one.
"""

import msgspec

from mlx_isolate_shared.config import EngineSettings
from mlx_isolate_shared.footprint import MemoryKind


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """What a standby may do ahead: imports always, the tokenizer of one model if named.

    Attributes:
        model: as in `Start`; None for imports alone.
        cache_home: as in `Start`.
        settings: of that model; its tokenizer depends on them.
    """

    model: str | None = None
    cache_home: str = ""
    settings: EngineSettings = EngineSettings()


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The engine's whole configuration.

    Attributes:
        model_id: the name clients use.
        model: `demo`, an absolute folder, or a hub repo id.
        incarnation: number of this spawn of the slot, from 1.
        socket_path: absolute path at which the engine listens (it creates it, mode 0600).
        cache_home: the user's cache folder for converted models, absolute.
    """

    model_id: str
    model: str
    incarnation: int
    socket_path: str
    cache_home: str
    log_level: str = "INFO"
    settings: EngineSettings


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """A load that moves: any such line counts as progress against the start timeout.

    Attributes:
        stage: `import`, `download`, `convert`, `weights`, `tokenizer`, `warmup`; `prepared` once
            for each `Prepare` that a standby has done.
        fraction: 0..1 within the stage, None where it is not known.
        detail: a short text for a person, e.g. `1.2 of 4.3 GB`.
    """

    stage: str
    fraction: float | None = None
    detail: str = ""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the loaded model is, for /v1/models, /status and the start-up lines.

    Attributes:
        device_memory_bytes: of the GPU: with `metal` what it recommends to use of the machine's
            memory, with `cuda` all of its own; 0 without a GPU, or where it does not say.
    """

    architecture: str
    parameters: int
    weights_bytes: int
    dtype: str
    context_length: int
    vocab_size: int
    backend: str
    device_memory_bytes: int = 0
    blas: str | None = None
    has_chat_template: bool = False
    mlx_version: str = ""
    mlx_lm_version: str = ""
    # What a person should know about speed or versions, one sentence each.
    warnings: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The socket listens and a warm-up forward pass has run."""

    pid: int
    socket_path: str
    load_s: float
    facts: ModelFacts


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The reason an engine is about to exit with; `code` is a stable word, e.g. `model_missing`."""

    code: str
    message: str


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt cache figures of both tiers; bytes and counts since the engine's start.

    Attributes:
        restore_choices: how often a stored prefix was restored or run again, by the reason.
        ssd_trouble: a sentence for a person where the last write to the SSD tier was not
            possible, else empty.
    """

    ram_entries: int = 0
    ram_bytes: int = 0
    ram_bytes_max: int = 0
    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    ssd_enabled: bool = False
    ssd_entries: int = 0
    ssd_bytes: int = 0
    ssd_bytes_max: int = 0
    restores: int = 0
    restore_ms: float = 0.0
    restore_bytes_per_s: float = 0.0
    spills: int = 0
    pending_snapshots: int = 0
    pending_spills: int = 0
    pending_spill_bytes: int = 0
    dropped_spills: int = 0
    failed_writes: int = 0
    quarantined: int = 0
    longest_durable_prefix: int = 0
    miss_reasons: dict[str, int] = {}
    restore_choices: dict[str, int] = {}
    ssd_trouble: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Counters since the engine's start; written at least every PROGRESS_INTERVAL_S.

    Attributes:
        prompt_tokens: prompt tokens run through the model.
        generated_tokens: tokens generated.
        active: completions that hold the generation thread's attention.
        queued: completions admitted by the engine and not yet running.
        completed: completions that ended by stop, length or tool_calls.
        cancelled: completions whose client left.
        stalled: completions cancelled because their client stopped reading.
        footprint_bytes: process memory (macOS: physical footprint; Linux: PSS where readable,
            else RSS).
        footprint_kind: which of the three.
        device_free_bytes: of a GPU with memory of its own, free for whoever asks; else 0.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    active: int = 0
    queued: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    stalled: int = 0
    footprint_bytes: int = 0
    footprint_kind: MemoryKind = "rss"
    mlx_active_bytes: int = 0
    mlx_peak_bytes: int = 0
    mlx_cache_bytes: int = 0
    device_free_bytes: int = 0
    cache: CacheFigures = CacheFigures()


Spec = Prepare | Start
Report = Loading | Ready | Failed | Progress


def encode_line(message: Spec | Report) -> bytes:
    """One JSON object and a newline."""
    return msgspec.json.encode(message) + b"\n"


_SPEC = msgspec.json.Decoder(Spec)
_REPORT = msgspec.json.Decoder(Report)


def decode_spec(line: bytes) -> Spec:
    """Parse one spec line; raises msgspec.DecodeError on anything else."""
    return _SPEC.decode(line)


def decode_report(line: bytes) -> Report:
    """Parse one report line; raises msgspec.DecodeError on anything else (a lying engine)."""
    return _REPORT.decode(line)
