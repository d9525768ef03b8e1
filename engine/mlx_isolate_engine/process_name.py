"""Renames this process's command line for `ps`, when a standby has become a model's engine (Linux).

The kernel shows the memory that the arguments were passed in, so that memory is written over,
within its length. Elsewhere a standby keeps its name; nothing depends on it.
"""

import ctypes
import sys
from pathlib import Path

# Places of arg_start and arg_end behind the name in /proc/self/stat.
_ARG_START, _ARG_END = 45, 46


def name_in_ps(model_id: str, incarnation: int) -> bool:
    """Show `--id MODEL_ID --incarnation N` as the last arguments; whether that worked.

    What comes after them by then (the pipes' numbers) has been read, and makes room.
    """
    if sys.platform != "linux":
        return False
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    shown = Path("/proc/self/cmdline").read_bytes()
    # Only memory that the kernel itself shows as our arguments is written to.
    if not start or len(shown) != end - start or ctypes.string_at(start, end - start) != shown:
        return False
    renamed = renamed_arguments(shown, model_id, incarnation)
    if renamed is None:
        return False
    ctypes.memmove(start, renamed, len(renamed))
    return True


def renamed_arguments(shown: bytes, model_id: str, incarnation: int) -> bytes | None:
    """`shown` (NUL-separated) with the new name, in as many bytes; a long id is cut."""
    head, separator, _ = shown.partition(b"\0--id\0")
    tail = b"\0--incarnation\0%d\0" % incarnation
    room = len(shown) - len(head) - len(separator) - len(tail)
    if not separator or room < 1:
        return None
    name = model_id.encode().replace(b"\0", b"?")[:room]
    return (head + separator + name + tail).ljust(len(shown), b"\0")
