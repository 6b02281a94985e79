"""A process that compiles Triton kernels while the engine still imports and loads.

Python's part of a compilation holds the interpreter's lock, so the engine's threads would take
turns at it. `CompileProcess.start` begins one process at the very start of the engine's; what is
asked of it lies in Triton's cache on disk when the answer comes. Its other end is
`compile_worker.py`, what is asked `compile_ahead.py`'s business. No torch is imported here.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)
# With fewer cores it would only take them from the engine.
MIN_CORES = 4
# Device files of the drivers that Triton compiles for.
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class CompileProcess:
    """Asks for kernels; every question is answered, at the latest when the process ends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._questions: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self._open: dict[int, Future[bool]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._has_ended = False
        threading.Thread(target=self._read, daemon=True, name="compile answers").start()

    @classmethod
    def start(cls) -> CompileProcess:
        """Begin the process; it imports what it needs on its own."""
        # One thread each: the process forks, and only threads that exist can be lost in a fork.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moeserve.runner.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        return cls(process)

    @classmethod
    def start_if_useful(cls) -> CompileProcess | None:
        """The same where there is a GPU and cores are free."""
        has_gpu = any(path.exists() for path in GPU_DEVICES)
        return cls.start() if has_gpu and num_cores() >= MIN_CORES else None

    def ask(self, question: dict[str, object]) -> Future[bool]:
        """Whether the kernel lies on disk now; False where it does not, whatever the cause."""
        answer: Future[bool] = Future()
        with self._lock:
            number = self._count
            self._count += 1
            if self._has_ended:
                answer.set_result(False)
                return answer
            self._open[number] = answer
        try:
            self._questions.write(json.dumps({"number": number, **question}) + "\n")
            self._questions.flush()
        except OSError:
            logger.warning("the compiling process is gone; the engine compiles by itself")
            self._end()
        return answer

    def close(self) -> None:
        """No more questions; the process answers those that are open, and ends."""
        try:
            self._questions.close()
        except OSError:
            logger.info("the compiling process ended before its last question")

    def _read(self) -> None:
        for line in self._answers:
            number, _, outcome = line.rstrip("\n").partition(" ")
            with self._lock:
                answer = self._open.pop(int(number), None)
            if outcome != "ok":
                logger.warning("a kernel did not compile ahead: %s", outcome)
            if answer is not None:
                answer.set_result(outcome == "ok")
        self._end()
        self._process.wait()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            unanswered, self._open = self._open, {}
        for answer in unanswered.values():
            answer.set_result(False)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
