"""Reads the spec pipe: what a standby may prepare, then the engine's whole configuration."""

import os
from collections.abc import Iterator

import msgspec

from mlx_isolate_shared.config import PIPE_LINE_BYTES_MAX
from mlx_isolate_shared.errors import ConfigError
from mlx_isolate_shared.wire import Spec, decode_spec


def read_specs(spec_fd: int) -> Iterator[Spec]:
    """Yield spec lines until the pipe ends; blocks between them.

    Raises:
        ConfigError: a line is no spec, or longer than a spec may be.
    """
    buffer = b""
    while data := os.read(spec_fd, 65536):
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            try:
                yield decode_spec(line)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"the spec pipe carried a line that is no spec: {error}"
                ) from error
        if len(buffer) > PIPE_LINE_BYTES_MAX:
            raise ConfigError("the spec pipe carried a line that is too long.")
