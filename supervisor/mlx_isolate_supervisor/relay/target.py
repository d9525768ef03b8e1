"""Where a request is to go: a path on an engine, and the name of the model where the path has it."""

from collections.abc import Callable
from urllib.parse import unquote

import msgspec

UPSTREAM = "/upstream/"
# The engine's paths whose answers are completions, or what else an engine is there for.
WORK_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
    }
)
# Paths on this server that are others on the engine. Queries are kept.
ALIASES = {"/chat/completions": "/v1/chat/completions"}
# A model's name may hold slashes, but not more than this; it bounds the search for its end.
_NAME_SEGMENTS_MAX = 16


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor knows about a request's way before it has read the body.

    Attributes:
        path: on the engine, percent-encoded as it came, without a query.
        model: the model's name; None where the body names it.
        is_work: whether an answer shows that the engine completes what it is asked.
    """

    path: str
    model: str | None = None
    is_work: bool = True


def split_upstream(raw_path: str, is_known: Callable[[str], bool]) -> Target:
    """The target of `/upstream/{model}/…`: the longest known name, and what follows it.

    Args:
        raw_path: percent-encoded; begins with UPSTREAM.
        is_known: whether a name is a model's.
    """
    segments = raw_path.removeprefix(UPSTREAM).split("/")
    for count in range(min(len(segments), _NAME_SEGMENTS_MAX), 0, -1):
        name = unquote("/".join(segments[:count]))
        if is_known(name):
            path = "/" + "/".join(segments[count:])
            return Target(path=path, model=name, is_work=path in WORK_PATHS)
    return Target(path="/", model=unquote("/".join(segments[:2])), is_work=False)


def path_on_engine(path: str) -> str:
    """The path on the engine, for errors that come before any model is looked up."""
    if not path.startswith(UPSTREAM):
        return path
    place = path.find("/v1/")
    return path if place < 0 else path[place:]


def asks_for_work(path: str) -> bool:
    """Whether a path on this server, whatever the model, is for completions and no control."""
    return path_on_engine(path) in WORK_PATHS or path in ALIASES
