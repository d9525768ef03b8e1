"""What the exit status of `mlx-isolate` means; see docs/operations.md."""

# Stopped as asked (the first SIGTERM or SIGINT: drained), or the command succeeded.
OK = 0
# The daemon failed itself, or a command got no for an answer.
FAILED = 1
# It cannot work as configured: a flag, a file, a path, a missing package. Starting again will not
# help until something is changed.
USAGE = 2
# The port is in use by another process.
TAKEN = 3
# A drill could not be run here; no promise was found broken.
NOT_RUN = 4
# A second signal cut the shutdown short: 128 + the signal's number, as shells report it.
CUT_BASE = 128
# A command was ended by Ctrl-C: by SIGINT, whose number is 2 everywhere.
INTERRUPTED = CUT_BASE + 2
