"""What an engine's probe says about this machine and about model folders: one JSON line."""

import msgspec


class FolderFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One model folder.

    Attributes:
        weights_bytes: of its weight files; 0 where they cannot be read.
        dtype: as its configuration says, None where it does not.
        error: why it cannot be served, None if nothing is wrong.
    """

    folder: str
    weights_bytes: int = 0
    dtype: str | None = None
    error: str | None = None


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What computes here.

    Attributes:
        backend: `metal`, `cuda` or `cpu`.
        blas: the BLAS in use on a CPU, None where it is not known.
        gflops: float32 matrix product, measured, in 1e9 operations a second.
        versions: of mlx and mlx-lm.
    """

    backend: str
    blas: str | None
    gflops: float
    versions: dict[str, str]
    folders: tuple[FolderFinding, ...] = ()
