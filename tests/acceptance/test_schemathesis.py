"""Schemathesis follows the server's OpenAPI document: hostile requests, no 5xx, a client served."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from served_model import served_model

from moeserve.tiny import MODEL_NAME

MAX_EXAMPLES = 30
LIMIT_S = 420


class Client(threading.Thread):
    """A well-behaved client: one short request after the other."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.texts: list[str] = []
        self.seconds: list[float] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            self.ask()

    def ask(self) -> None:
        body = {"model": MODEL_NAME, "prompt": "Question: 2 + 2?\nAnswer:", "max_tokens": 8,
                "temperature": 0}  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=60) as reply:
            self.texts.append(json.load(reply)["choices"][0]["text"])
        self.seconds.append(time.monotonic() - began)


@pytest.mark.slow
def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("no schemathesis on the PATH")
    with served_model(tmp_path) as url:
        client = Client(url)
        for _ in range(20):
            client.ask()
        client.start()
        command = [program, "run", f"{url}/openapi.json", "--checks", "not_a_server_error",
                   "--max-examples", str(MAX_EXAMPLES), "--request-timeout", "30",
                   "--suppress-health-check", "all", "--generation-database", "none"]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, check=False
        )
        client.is_over.set()
        client.join(60)
        output = done.stdout[-4000:] + done.stderr[-1000:]
        assert done.returncode == 0, output
        with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
            assert reply.status == 200
    served = client.seconds[20:]
    assert len(served) >= 20, f"the client got {len(served)} replies in the whole run"
    assert len(set(client.texts)) == 1
    # What a client may lose to one that floods is bounded by the scheduler's fairness, not by luck.
    assert statistics.median(served) < 20 * statistics.median(client.seconds[:20]) + 1.0
