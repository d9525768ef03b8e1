"""The supervisor's settings as it runs with them: resolved, checked, and immutable.

Owns names, units and defaults. Knows nothing of where a value came from (see settings/layers.py)
or of how it is spelled on a command line (see settings/flags.py). Every limit says what breaks
without it.
"""

from typing import Literal

import msgspec

from mlx_isolate_shared.config import EngineSettings

MemoryPolicy = Literal["auto", "keep_then_commit", "evict_first"]

MIB = 1 << 20


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model that is served.

    Attributes:
        id: the name clients use; may hold `/`.
        model: `demo`, an absolute folder, or a hub repo id.
        aliases: other names for the same slot.
        preload: load at start instead of on first use.
        pinned: never evicted to make room, never unloaded by its ttl (`persistent` groups).
        ttl_s: unload after so many idle seconds; None = the daemon's ttl, 0 = never.
        env: extra environment of its engine.
        concurrency_limit: requests handed to its engine at once; None = decode_concurrency.
        unlisted: served by name, absent from /v1/models.
        strip_params: request fields that its engine drops before it reads a request.
        set_params: request fields that its engine overrides.
        send_loading_state: comments keep a streaming client company while it waits.
    """

    id: str
    model: str
    aliases: tuple[str, ...] = ()
    preload: bool = False
    pinned: bool = False
    ttl_s: float | None = None
    env: dict[str, str] = {}
    concurrency_limit: int | None = None
    unlisted: bool = False
    strip_params: tuple[str, ...] = ()
    set_params: dict[str, object] = {}
    send_loading_state: bool = False
    engine: EngineSettings = EngineSettings()

    @property
    def places(self) -> int:
        """Requests that its engine holds at once; the rest wait in the supervisor's queue."""
        return self.concurrency_limit or self.engine.decode_concurrency


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Models that share a rule of residence (llama-swap's groups).

    Attributes:
        swap: at most one member is loaded at a time.
        exclusive: loading a member unloads the models of other groups that are not persistent.
        persistent: no other group may unload its members.
    """

    id: str
    members: tuple[str, ...]
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `mlx-isolate serve` runs with. Times in seconds, sizes in bytes.

    Attributes:
        models: in the order given; the first answers requests that name no model.
        run_dir: run directory; None = the user's, by port.
        log_dir: folder of the log file; None = the user's, "" = no log file.
        log_format: of the log file and stderr, `text` or `json`.
        cache_home: folder for converted models; None = the user's.
        allowed_origins: browser origins that may call; `loopback` stands for any loopback
            origin, `*` for all.
        allowed_hosts: Host names besides loopback and `host` itself that a request may carry;
            `*` switches the DNS-rebinding check off.
        models_max: engines loaded at once; 0 = as many as fit.
        memory_budget_bytes: for all engines; None = 75 % of the machine's memory, or of what a GPU
            that shares it may use of it.
        ttl_s: idle time after which a model is unloaded; 0 = never.
        standby: spare engines; None = 1 where at least 8 GB are free.
        blas: `auto`, `off`, or the path of a library to preload into CPU engines.
        prompt_cache_bytes: RAM tier of all engines together; None = min(8 GB, a quarter of the
            memory budget).
        metrics: whether /metrics answers.
    """

    models: tuple[ModelSpec, ...] = ()
    groups: tuple[GroupSpec, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    config_path: str | None = None
    watch_config: bool = False
    run_dir: str | None = None
    log_dir: str | None = None
    cache_home: str | None = None
    log_level: str = "INFO"
    log_format: Literal["text", "json"] = "text"
    allowed_origins: tuple[str, ...] = ("loopback",)
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    metrics: bool = True
    blas: str = "auto"
    standby: int | None = None

    models_max: int = 0
    memory_budget_bytes: int | None = None
    memory_policy: MemoryPolicy = "auto"
    ttl_s: float = 0.0
    prompt_cache_bytes: int | None = None

    # Waiting requests of one model, and bytes of all waiting bodies; without them a dead engine's
    # queue fills the memory of the process that must not die.
    max_queued_requests: int = 128
    max_queued_bytes: int = 512 * MIB
    # Longest wait for a ready engine; without it a client waits for ever on a model that is down.
    queue_timeout_s: float = 300.0
    # Busy without a counter that moves: hung. 0 = off (an engine held in a debugger).
    watchdog_timeout_s: float = 60.0
    # No report line at all: hung. 0 = off.
    report_silence_s: float = 10.0
    # Loading without progress; without it a load that hangs keeps its requests waiting.
    start_timeout_s: float = 120.0
    # A whole start after its download; bounds a load that reports progress for ever.
    start_total_timeout_s: float = 1800.0
    # From SIGTERM to SIGKILL; long, since a killed process may leak wired memory on macOS.
    stop_timeout_s: float = 30.0
    # Finishing running requests before an unload, a reload or a switch.
    drain_timeout_s: float = 600.0
    # The whole of a shutdown, draining and flushing included.
    shutdown_timeout_s: float = 60.0
    # Silence before a keepalive comment on a stream; 0 = off. Engines get the same value.
    sse_ping_interval_s: float = 15.0
    # Largest request body and header block; without them one client fills the memory.
    body_bytes_max: int = 64 * MIB
    header_bytes_max: int = 32 * 1024
    # CPU niceness added to engines, so that status pages answer when every core is busy.
    engine_nice: int = 5

    @property
    def stall_timeout_s(self) -> float:
        """The longest time in which any of the engines waits for a client that does not read."""
        default = EngineSettings().stall_timeout_s
        return max((model.engine.stall_timeout_s for model in self.models), default=default)
