"""One warm server for every job of a run with the same launch; a start is paid once.

Receives launch specs one after the other; starts a server where the launch differs from the
one that runs, after the old one has ended and its memory is free. Two servers never run at once:
they would share the GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evalsuite.engines.base import LaunchSpec
from evalsuite.errors import ServerError
from evalsuite.gpu_memory import GpuMemory
from evalsuite.server import RunningServer, StartSettings, start


class SharedServer:
    """The server of a run; close it, or use it as a context manager.

    Args:
        settings: Of every start; `log_path` names the folder of the logs here.
    """

    def __init__(self, settings: StartSettings) -> None:
        self._settings = settings
        self._spec: LaunchSpec | None = None
        self._server: RunningServer | None = None
        self._num_starts = 0
        self._absent: set[str] = set()

    @property
    def num_starts(self) -> int:
        """Servers started so far, failed starts included."""
        return self._num_starts

    def acquire(self, spec: LaunchSpec, settings: StartSettings) -> tuple[RunningServer, bool]:
        """Return a ready server for `spec`, and whether it was started for this call.

        Args:
            spec: How it must have been started.
            settings: Limit and display of this job; log folder and the rest are the run's.

        Raises:
            ServerError: The old server could not be ended, or the new one not started.
        """
        if self._server is not None and self._spec == spec and self._server.is_alive:
            return self._server, False
        self.close()
        self._num_starts += 1
        log = self._settings.log_path / f"{self._num_starts:03d}.log"
        settings = replace(settings, log_path=log)
        if spec.base_url in self._absent:
            # An earlier job waited for it in vain; the next ones look once.
            settings = replace(settings, startup_limit_s=0.0, absent_limit_s=0.0)
        try:
            self._server = start(spec, settings)
        except ServerError:
            if spec.base_url:
                self._absent.add(spec.base_url)
            raise
        self._spec = spec
        return self._server, True

    def close(self) -> None:
        """End the server that runs, if any."""
        server, self._server, self._spec = self._server, None, None
        if server is not None:
            server.stop()

    @property
    def log_folder(self) -> Path:
        """Where the logs of the servers are."""
        return self._settings.log_path

    @property
    def memory(self) -> GpuMemory | None:
        """GPU memory as it was before the run."""
        return self._settings.memory

    def __enter__(self) -> SharedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
