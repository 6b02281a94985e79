"""A model folder that brings code: no way of starting the server runs any of it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from moeserve.tiny import model_dir

# Modules that the server imports anyway: a file of that name beside the model must not be taken.
SHADOWS = ("torch", "jinja2", "json", "tokenizers", "moeserve", "sitecustomize")
OWN_CODE = ("configuration_own", "modeling_own", "tokenization_own", "custom_generate", "__init__")


class Bomb:
    """What a pickled checkpoint may hold: a command that runs when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def hostile_folder(folder: Path, marker: Path) -> Path:
    """The embedded model with everything beside it that loaders of the field would run."""
    model = folder / "model"
    shutil.copytree(model_dir(), model)
    for name in (*OWN_CODE, *SHADOWS):
        path = model / f"{name}.py"
        path.write_text(f"open({str(marker)!r}, 'a').write({name!r})\n", encoding="utf-8")
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    config["trust_remote_code"] = True
    (model / "config.json").write_text(json.dumps(config))
    tokens = json.loads((model / "tokenizer_config.json").read_text())
    tokens["auto_map"] = {"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]}
    tokens["tokenizer_class"] = "Own"
    tokens["chat_template"] = (
        "{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}"
        "{{ messages[0].content }}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    return model


def environment(folder: Path, has_transformers: bool) -> dict[str, str]:
    """The process's own; where there is to be no `transformers`, one that cannot be imported."""
    env = dict(os.environ)
    if not has_transformers:
        absent = folder / "absent"
        absent.mkdir()
        (absent / "transformers.py").write_text("raise ImportError('not installed')\n")
        env["PYTHONPATH"] = os.pathsep.join([str(absent), env.get("PYTHONPATH", "")]).rstrip(":")
    return env


@contextmanager
def server(
    model: Path, folder: Path, env: dict[str, str], *options: str
) -> Iterator[tuple[str, Path]]:
    port_file, log = folder / "port.json", folder / "server.log"
    argv = [sys.executable, "-P", "-m", "moeserve", ".", "--port", "0", "--num-threads", "1"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*argv, "--port-file", str(port_file), *options],
            stdout=out, stderr=out, start_new_session=True, env=env,
            cwd=model,  # in the folder itself, where its files shadow the libraries
        )  # fmt: skip
    try:
        end = time.monotonic() + 90
        url = ""
        while not url or httpx.get(f"{url}/health", timeout=30).status_code != 200:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.05)
            if port_file.exists():
                url = f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"
        yield url, log
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("has_transformers", [True, False])
@pytest.mark.parametrize("options", [(), ("--trust-remote-code",)], ids=["plain", "trusting"])
def test_code_of_a_model_folder_is_never_run(
    tmp_path: Path, has_transformers: bool, options: tuple[str, ...]
) -> None:
    marker = tmp_path / "marker"
    model = hostile_folder(tmp_path, marker)
    env = environment(tmp_path, has_transformers)
    with server(model, tmp_path, env, "--served-model-name", "m", *options) as (url, log):
        reply = httpx.post(
            f"{url}/v1/completions", json={"prompt": "Question: 1 + 1?", "max_tokens": 2}
        )
        assert reply.status_code == 200
        messages = [{"role": "user", "content": "hi"}]
        chat = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 2}, timeout=30
        )
        # The model's own template reaches for the interpreter; the sandbox says no.
        assert chat.status_code == 400
        assert "SecurityError" in chat.json()["error"]["message"]
        text = log.read_text()
    assert not marker.exists(), marker.read_text()
    if options:
        assert "--trust-remote-code: accepted without effect" in text


def test_weights_that_are_a_pickle_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    model = hostile_folder(tmp_path, marker)
    (model / "model.safetensors").unlink()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "moeserve", str(model), "--port", "0"],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 1
    assert "safetensors" in done.stderr
    assert not marker.exists()
