"""How many files this process may have open, connections among them.

Shells give 256 (macOS) or 1,024 (Linux), which idle connections alone can fill; then no engine can
be started. The hard limit is usually far above.
"""

import resource
from contextlib import suppress

# A connection holds one, a request that runs two. The second is what macOS grants to anyone.
WANTED = (65_536, 10_240)


def allow_many_open_files() -> int:
    """Raise the soft limit as far as wanted and allowed; returns what it is now, -1 for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in WANTED:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            break
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            break
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
