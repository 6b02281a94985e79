"""A normal client's rate with and without a flood beside it, and the memory of the server.

Windows alternate, so that whatever else the machine does falls on both; medians are compared. The
flood is a program of its own with less priority: its own work is no part of what is measured.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from moeserve.tiny import MODEL_NAME

BODY = {"model": MODEL_NAME, "prompt": "Question: 2 + 2?\nAnswer:", "max_tokens": 8,
        "temperature": 0, "ignore_eos": True}  # fmt: skip


class NormalClient(threading.Thread):
    """One short request after the other.

    Attributes:
        num_answered: So far.
        texts: Every different answer; greedy, so there has to be one.
        faults: Anything but an answer.
        slowest_s: Of all requests.
    """

    def __init__(self, url: str, key: str) -> None:
        super().__init__(daemon=True)
        self._address = urlsplit(url)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self.num_answered = 0
        self.texts: set[str] = set()
        self.faults: list[str] = []
        self.slowest_s = 0.0
        self.is_over = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection(
            str(self._address.hostname), self._address.port, timeout=60
        )
        while not self.is_over.is_set():
            began = time.monotonic()
            try:
                connection.request("POST", "/v1/completions", json.dumps(BODY), self._headers)
                reply = connection.getresponse()
                answer = json.loads(reply.read())
                self.texts.add(answer["choices"][0]["text"])
            except (OSError, http.client.HTTPException, KeyError, ValueError) as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                connection.close()
                time.sleep(0.1)
                continue
            self.num_answered += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def rate_over(self, seconds: float) -> float:
        """Answers a second in the time that begins now."""
        before, began = self.num_answered, time.monotonic()
        time.sleep(seconds)
        return (self.num_answered - before) / (time.monotonic() - began)


class FloodProgram:
    """`hostile.py` as a process, started and stopped by lines.

    Attributes:
        statuses: How often each status has come, "0" for heavy requests that were left.
        faults: What must not happen.
    """

    def __init__(self, url: str, key: str, seed: int, num_workers: int) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("hostile.py")), url, key]
        self._process = subprocess.Popen(
            [*argv, str(seed), str(num_workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []

    def go(self) -> None:
        self._say("go")

    def stop(self) -> None:
        """Wait until the open requests have ended, and read what happened."""
        self._say("stop")
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.statuses, self.faults = Counter(told["statuses"]), told["faults"]

    @property
    def num_sent(self) -> int:
        return sum(self.statuses.values())

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def normal_client(url: str, key: str) -> Iterator[NormalClient]:
    """A client that asks until the block ends."""
    client = NormalClient(url, key)
    client.start()
    try:
        yield client
    finally:
        client.is_over.set()
        client.join(60)


def resident_mib(folder_of_log: Path) -> float:
    """Memory of the process whose log is in a folder, and of its children."""
    pid = int((folder_of_log / "pid").read_text())
    total = 0
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if os.getpgid(int(process.name)) == pid:
                (line,) = [
                    line
                    for line in (process / "status").read_text().splitlines()
                    if line.startswith("VmRSS:")
                ]
                total += int(line.split()[1])
    return total / 1024


def median_ratio(with_flood: list[float], without: list[float]) -> float:
    return statistics.median(with_flood) / statistics.median(without)
