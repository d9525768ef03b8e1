"""Every bound the relay holds to, with what breaks without it."""

import msgspec

MIB = 1 << 20

# An idle connection to an engine is not reused after this time. It lies far below the hour
# after which engines close idle connections, so that a request never meets a closing one.
UPSTREAM_IDLE_MAX_S = 15.0
# Idle connections kept for one engine; without it a burst leaves its descriptors behind.
UPSTREAM_IDLE_CONNECTIONS_MAX = 8
# An engine's response head; without it a lying engine fills memory.
ANSWER_HEAD_BYTES_MAX = 64 * 1024
# Trailers after a chunked answer, which are read and dropped.
ANSWER_TRAILER_BYTES_MAX = 8 * 1024
# What is held back while a chunk, or an event made of several chunks, is not whole yet.
ANSWER_HELD_BYTES_MAX = 16 * MIB
# An answer of known length up to this size is sent only once it is whole, so that a death in
# the middle of it is still a plain status instead of a torn body.
ANSWER_WHOLE_BYTES_MAX = 1 * MIB
# What the kernel holds for a client beyond what is on the wire. Left to itself it takes
# megabytes, and an engine would generate for many minutes into them before it notices that
# nobody reads.
CLIENT_UNSENT_BYTES_MAX = 128 * 1024
# While a client does not read, how often it is asked whether its engine has given it up.
CLIENT_STALL_LOOK_S = 1.0
# Places tried for one request whose engine could not be connected to at all.
CONNECT_TRIES_MAX = 3
# At a shutdown, the time in which requests that were cut off are told so.
END_RUNNING_S = 1.0


class RelayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds that an operator may set. Times in seconds, sizes in bytes.

    Attributes:
        body_bytes_max: one request body; a larger one is 413.
        bodies_bytes_max: bodies held at once by all requests that no engine has read yet;
            without it a queue of large prompts fills the memory of the process that must not die.
        header_bytes_max: one request's header block; a larger one is 431.
        body_idle_s: longest pause inside a request body; without it a client that stops
            sending holds its connection and its memory for ever.
        body_total_s: longest time for a whole request body; bounds a client that trickles.
        keep_alive_s: longest wait for the next whole request head on a client's connection;
            without it idle or trickling clients use up the descriptors.
        client_stall_s: longest time in which a client reads nothing of an answer. An engine
            cancels such a request by itself (`stall_timeout_s`), so this lies above that and
            only ends what a stalled client would hold in the supervisor.
        loading_look_s: how long a request waits before its client is kept company
            (`sendLoadingState`), and how often there may be news; a refusal that comes before
            the first comment is a plain status.
        loading_silence_s: how long that may say nothing.
    """

    body_bytes_max: int = 64 * MIB
    bodies_bytes_max: int = 512 * MIB
    header_bytes_max: int = 32 * 1024
    body_idle_s: float = 30.0
    body_total_s: float = 300.0
    keep_alive_s: float = 75.0
    client_stall_s: float = 90.0
    loading_look_s: float = 1.0
    loading_silence_s: float = 15.0
