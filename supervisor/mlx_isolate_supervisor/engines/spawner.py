"""Gets the engine process for a model: a standby that fits, else a fresh one."""

from collections import deque
from typing import Protocol

import msgspec

from mlx_isolate_supervisor.config import ModelSpec
from mlx_isolate_supervisor.engines.command import EngineCommand
from mlx_isolate_supervisor.engines.process import EngineProcess, ProcessListener
from mlx_isolate_supervisor.engines.rundir import RunDirectory
from mlx_isolate_supervisor.engines.standby import Standbys


class EngineSource(Protocol):
    """Where a slot gets its engine processes from."""

    def spawn(
        self,
        spec: ModelSpec,
        incarnation: int,
        *,
        listener: ProcessListener,
        output: deque[str],
        use_standby: bool,
    ) -> EngineProcess:
        """A process that has its whole configuration.

        Raises:
            OSError: it cannot be started.
        """
        ...


class Spawner(msgspec.Struct, frozen=True):
    """Engine processes of this machine."""

    command: EngineCommand
    run_directory: RunDirectory
    standbys: Standbys | None

    def spawn(
        self,
        spec: ModelSpec,
        incarnation: int,
        *,
        listener: ProcessListener,
        output: deque[str],
        use_standby: bool,
    ) -> EngineProcess:
        """A process that has its whole configuration.

        Raises:
            OSError: it cannot be started.
        """
        if use_standby and self.standbys is not None:
            process = self.standbys.take(spec, incarnation, listener=listener, output=output)
            if process is not None:
                return process
        return EngineProcess.spawn(
            self.command,
            spec,
            incarnation,
            run_directory=self.run_directory,
            listener=listener,
            output=output,
        )
