"""Scripted servers that misbehave, run as child processes: `python stub_servers.py [options]`.

Each option is one behaviour; together they cover what real servers do to a launcher. Answers
come from `--answers` (a JSON file, prompt -> text), else from `--answer`. What it was asked is
counted in `--count-file`, one byte a question, so that tests see what a resumed run asks again.
Unknown options are ignored, as a stand-in for a real engine's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NUM_REQUESTS = 0
LOCK = threading.Lock()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", default="")
    parser.add_argument("--model", default="stub")
    parser.add_argument("--answer", default=" #### 1")
    parser.add_argument("--exit-code", type=int, default=None)
    parser.add_argument("--exit-after-s", type=float, default=0.3)
    parser.add_argument("--exit-after-requests", type=int, default=0)
    parser.add_argument("--never-listen", action="store_true")
    parser.add_argument("--unhealthy-s", type=float, default=0.0)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--daemonise", action="store_true")
    parser.add_argument("--grandchildren", type=int, default=0)
    parser.add_argument("--pids-file", default="")
    parser.add_argument("--flood-bytes", type=int, default=0)
    parser.add_argument("--line-bytes", type=int, default=0)
    parser.add_argument("--bad-bytes", action="store_true")
    parser.add_argument("--say", default="")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--status", type=int, default=200)
    parser.add_argument("--message", default="scripted")
    parser.add_argument("--answers", default="")
    parser.add_argument("--count-file", default="")
    parser.add_argument("--drafts-per-request", type=int, default=0)
    parser.add_argument("--accepted-per-request", type=int, default=0)
    parser.add_argument("--failing-rpc", default="")
    parser.add_argument("--log-per-request", type=int, default=0)
    parser.add_argument("--argv-file", default="")
    parser.add_argument("--api-key", default="", help="Asked for by every route below /v1.")
    parser.add_argument("--routes", default="", help="JSON file: GET path -> body; read each time.")
    return parser.parse_known_args()[0]


def note_pid(path: str) -> None:
    if path:
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()}\n")


def read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    opts: argparse.Namespace
    healthy_at = 0.0
    answers: dict[str, str]

    def log_message(self, *_: Any) -> None:
        """Quiet: the log's content is the test's business."""

    def reply(self, status: int, body: Any) -> None:
        self.send(status, json.dumps(body).encode(), "application/json")

    def reply_text(self, text: str) -> None:
        self.send(200, text.encode(), "text/plain")

    def send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        key = self.opts.api_key
        if key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {key}":
            self.reply(401, {"error": {"message": "whose key is that?"}})
            return
        more = json.loads(read(self.opts.routes)) if self.opts.routes else {}
        if self.path in more:
            self.reply(200, more[self.path])
        elif self.path == "/health":
            is_healthy = time.monotonic() >= self.healthy_at
            self.reply(200 if is_healthy else 503, {})
        elif self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": self.opts.model}]})
        elif self.path == "/metrics" and self.opts.drafts_per_request:
            drafts = NUM_REQUESTS * self.opts.drafts_per_request
            accepted = NUM_REQUESTS * self.opts.accepted_per_request
            self.reply_text(
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
            )
        else:
            self.reply(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        global NUM_REQUESTS
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            self.reply(500 if body["method"] == self.opts.failing_rpc else 200, {"results": []})
            return
        prompts = body.get("prompt", "")
        prompts = prompts if isinstance(prompts, list) else [prompts]
        if self.opts.count_file:
            with LOCK, Path(self.opts.count_file).open("a") as file:
                file.write("." * len(prompts))
        with LOCK:
            NUM_REQUESTS += 1
            if self.opts.exit_after_requests and self.opts.exit_after_requests < NUM_REQUESTS:
                print("out of luck", file=sys.stderr, flush=True)
                os._exit(self.opts.exit_code or 1)
        if self.opts.log_per_request:
            os.write(2, b"r" * (self.opts.log_per_request - 1) + b"\n")
        time.sleep(self.opts.delay_s)
        if self.opts.status != 200:
            self.reply(self.opts.status, {"error": {"message": self.opts.message}})
            return
        choices = [
            {
                "index": i,
                "text": self.answers.get(prompt, self.opts.answer),
                "finish_reason": "stop",
                "logprobs": None,
            }
            for i, prompt in enumerate(prompts)
        ]
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        self.reply(
            200, {"id": "x", "object": "text_completion", "choices": choices, "usage": usage}
        )


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


def main() -> None:
    opts = options()
    note_pid(opts.pids_file)
    if opts.argv_file:
        Path(opts.argv_file).write_text(json.dumps(sys.argv[1:]))
    if opts.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if opts.daemonise and os.fork():
        os._exit(0)
    if opts.daemonise:
        note_pid(opts.pids_file)
    for _ in range(opts.grandchildren):
        code = (
            "import os, signal, sys, time; os.setsid();"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
        )
        subprocess.Popen([sys.executable, "-c", code, opts.pids_file])
    if opts.say:
        print(opts.say, file=sys.stderr, flush=True)
    if opts.flood_bytes:
        line = b"x" * 99 + b"\n"
        for _ in range(opts.flood_bytes // 100):
            os.write(2, line)
    if opts.line_bytes:
        os.write(2, b"y" * opts.line_bytes)
    if opts.bad_bytes:
        os.write(2, b"\n\xff\xfe bad \x1b[31mred\x1b[0m \x1b]0;title\x07 bytes\n")
    if opts.exit_code is not None and not opts.exit_after_requests:
        time.sleep(opts.exit_after_s)
        sys.exit(opts.exit_code)
    if opts.never_listen:
        time.sleep(600)
    Handler.opts = opts
    Handler.answers = json.loads(Path(opts.answers).read_text()) if opts.answers else {}
    Handler.healthy_at = time.monotonic() + opts.unhealthy_s
    server = Server(("127.0.0.1", opts.port), Handler)
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if opts.port_file:
        partial = Path(opts.port_file + ".partial")
        partial.write_text(json.dumps({"port": server.server_address[1]}))
        partial.rename(opts.port_file)
    server.serve_forever()


if __name__ == "__main__":
    main()
