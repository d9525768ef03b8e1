"""Which worker runs which tests: a file whole, the longest first, one daemon for those who share."""

from xdist.scheduler import LoadFileScheduling

# Files that keep a worker longest, so that none of them begins while the other worker has nothing
# left to do. It decides the order and nothing else.
LONGEST: tuple[str, ...] = ()
# One daemon with four real engines serves these; on two workers there would be two of them.
SHARING = tuple(
    f"tests/e2e/test_{name}.py" for name in ("abuse", "openai_client", "oracle", "together")
)


def scope_of(nodeid: str) -> str:
    """What one worker runs on its own: the file, or all files that share the daemon."""
    file = nodeid.partition("::")[0]
    return SHARING[0] if file in SHARING else file


def rank(nodeid: str) -> int:
    """The place of a test's scope in a run, first to last."""
    scope = scope_of(nodeid)
    return LONGEST.index(scope) if scope in LONGEST else len(LONGEST)


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """xdist's distribution by file, but for the files that share a daemon."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
