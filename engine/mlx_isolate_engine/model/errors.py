"""The one error of finding or loading a model, with the reason an engine exits with."""

import errno

# Causes outside the model's files and settings: a new try may work, so the engine exits as after
# a crash and is started again under the restart budget, not with EXIT_CANNOT_WORK.
_PASSING = frozenset({"model_download", "disk_full", "out_of_memory"})

# What mlx and mlx-lm raise for files that do not fit: their own checks are of every kind.
FOREIGN_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
)


class ModelError(Exception):
    """The model cannot be had or loaded.

    Args:
        code: a stable word. Until files or settings change: `model_missing`, `model_broken`,
            `model_unsupported`, `model_untrusted`, `model_offline`, `model_gated`,
            `adapter_broken`, `template_broken`, `demo_missing`, `demo_broken`, `mlx_missing`.
            Passing: `model_download`, `disk_full`, `out_of_memory`.
        message: one sentence for a person that says what to do; it may name a local path.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def is_permanent(self) -> bool:
        """Whether a new try cannot work until the files or the settings change."""
        return self.code not in _PASSING


def first_sentence(error: BaseException, limit: int = 300) -> str:
    """The start of a library's message on one line, at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for want of space, quota or allowed file size."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
