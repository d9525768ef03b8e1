"""The error with which an engine itself ended a stream, read from the stream's last event; pure."""

import re

import msgspec

from mlx_isolate_supervisor.slots.lease import Outcome

# No text of a model can hold these: in JSON a line end is written as an escape.
_DATA = b"\ndata: "
_ERROR = b'{"error":'
_NAMED_ERROR = b"event: error"
# Codes become labels of metrics and words of the log.
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
UNREADABLE = "engine_error"


class EndError(msgspec.Struct, frozen=True):
    """What the event says of the error, as far as it can be read."""

    code: str | None = None
    type: str | None = None

    @property
    def word(self) -> str:
        """The code where it is one, else a word that stands for all others."""
        return self.code if self.code and _CODE.fullmatch(self.code) else UNREADABLE

    @property
    def outcome(self) -> Outcome:
        """How the request ended by it."""
        if self.code == "client_stalled":
            return "cancelled"
        return "rejected" if self.type == "invalid_request_error" else "failed"


class _Event(msgspec.Struct, frozen=True):
    error: EndError


def error_at_end(last: bytes) -> EndError | None:
    """The error in the last event, None if that is none.

    Args:
        last: the last bytes of a stream that hold an event, in chunks as they came.
    """
    position = last.rfind(_DATA)
    if position < 0:
        return None
    data = last[position + len(_DATA) :]
    if not data.startswith(_ERROR) and not last.endswith(_NAMED_ERROR, 0, position):
        return None
    try:
        return msgspec.json.decode(data.partition(b"\n")[0], type=_Event).error
    except msgspec.DecodeError:
        return EndError()
