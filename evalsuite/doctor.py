"""`evalsuite doctor`: what this machine can run, what is missing, and how to get it.

Receives the environment, returns lines; imports no engine and no torch, starts nothing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from evalsuite import __version__, engines
from evalsuite.errors import ConfigError
from evalsuite.hardware import Hardware, read_hardware
from evalsuite.lists import configs_root, hardware_file
from evalsuite.machine import Machine, detect_machine, detect_pool
from evalsuite.tasks.base import DataSource
from evalsuite.tasks.data import gsm8k_file, source_from

# Distribution -> what it is for.
_LIBRARIES = {
    "torch": "engine moeserve",
    "triton": "the Triton backend on a GPU",
    "flashinfer-python": "the FlashInfer backends on a GPU",
    "fastapi": "engine moeserve",
    "tokenizers": "engine moeserve",
    "safetensors": "engine moeserve",
    "lm-eval": "evaluator lm-eval",
    "ray": "executor ray",
    "transformers": "tests only",
}


def report(environ: Mapping[str, str]) -> list[str]:
    """Every section, one line per fact."""
    machine = detect_machine(environ=environ)
    return [
        f"evalsuite {__version__}, Python {platform.python_version()} ({sys.executable})",
        f"machine: {_machine(machine)}",
        f"pool: {_pool(machine)}",
        "engines:",
        *_engines(),
        "libraries:",
        *_libraries(),
        "data:",
        *_data(source_from(environ)),
    ]


def _machine(machine: Machine) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{machine}, {cores} CPU cores"


def _pool(machine: Machine) -> str:
    try:
        hardware: Hardware = read_hardware(hardware_file(configs_root()))
    except ConfigError as error:
        return f"unknown: {error}"
    found = detect_pool(machine, hardware)
    known = ", ".join(hardware.pools)
    return f"{found.name} (of {known})" if found else f"none of {known}"


def _line(name: str, is_there: bool, text: str) -> str:
    return f"  {'ok     ' if is_there else 'missing'} {name}: {text}"


def _engines() -> list[str]:
    lines = []
    for name in engines.names():
        if name == "external":
            lines.append(_line(name, True, "needs --base-url URL only"))
            continue
        engine = engines.get(name)
        version = engine.version()
        reason = engine.unavailable_reason()
        lines.append(_line(name, not reason, reason or version or "version unknown"))
    return lines


def _libraries() -> list[str]:
    lines = []
    for name, purpose in _LIBRARIES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(_line(name, False, f"for {purpose}: pip install {name}"))
            continue
        lines.append(_line(name, True, f"{version}, for {purpose}"))
    return lines


def _data(source: DataSource) -> list[str]:
    splits: Sequence[str] = ("train", "test")
    lines = []
    for split in splits:
        found: Path | None = gsm8k_file(split, source)
        remedy = "evalsuite data get gsm8k, or set EVALSUITE_GSM8K_DIR"
        lines.append(_line(f"gsm8k {split}", found is not None, str(found or remedy)))
    has_minigsm = importlib.util.find_spec("evalsuite.tasks.minigsm") is not None
    lines.append(_line("minigsm", has_minigsm, "generated, needs no file"))
    return lines
