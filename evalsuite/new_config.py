"""`evalsuite new`: parts named on the command line -> a valid YAML and its line in a list.

Receives a `NewConfig`, writes two files, returns their paths. Everything is checked before
anything is written, and nothing is overwritten.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evalsuite import tasks
from evalsuite.capacity import check_capacity
from evalsuite.config import read_config
from evalsuite.config_checks import TEST_SET_SIZE
from evalsuite.errors import ConfigError, Problem
from evalsuite.hardware import load_hardware
from evalsuite.layout import layout_of
from evalsuite.lists import hardware_file
from evalsuite.names import suggestion
from evalsuite.server_args import flag_values, split_shell
from evalsuite.validate import refused_flags

_LAYOUT = re.compile(r"(?P<kind>tp|dp|tep|dep)(?P<size>[1-9][0-9]{0,2})(?P<ep>-ep)?")
_FILE_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# What the field's configs ask for: five shots and an answer fit with room to spare.
_CONTEXT = ("--max-model-len", "8192")
_SUITES = {"tp": "moe-refactor", "dp": "moe-refactor-dp-ep"}
_USUAL_SHOTS = 5
# lm-eval's chain-of-thought task has eight examples of its own.
_SHOTS = {"gsm8k_cot": 8}
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# What YAML 1.1 reads as something else than text.
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


@dataclass(frozen=True)
class NewConfig:
    """What `evalsuite new` is asked for.

    Attributes:
        model: Model id or folder.
        backend: MoE backend, as `--moe-backend` takes it.
        layout: "tp2", "tp2-ep", "dp2", "dp2-ep", any number in place of 2; "tp1" for one device.
        pool: Pool whose list gets the line.
        threshold: Expected accuracy.
        suite: Folder below the suites' root, "" for the one that the layout belongs to.
        provenance: Where the threshold comes from.
        engine: Engine name.
        task: Task name; gives the shots, the metric and the number of questions.
        tolerance: What may be lost below the threshold.
        extra_args: More server arguments, as one string.
        name: File stem, "" to build it from the parts.
        quant: Number format in the file's name.
    """

    model: str
    backend: str
    layout: str
    pool: str
    threshold: float
    suite: str = ""
    provenance: str = ""
    engine: str = "moeserve"
    task: str = "gsm8k"
    tolerance: float = 0.02
    extra_args: str = ""
    name: str = ""
    quant: str = "BF16"


def write_config(asked: NewConfig, root: Path) -> tuple[Path, Path, list[Problem]]:
    """Write the YAML and add its line.

    Returns:
        The YAML, the list, and warnings about the new config.

    Raises:
        ConfigError: With every fault; nothing is written then.
    """
    hardware = load_hardware(hardware_file(root))
    pool = hardware.find(asked.pool)
    parts = _LAYOUT.fullmatch(asked.layout.lower())
    faults = []
    if pool is None:
        faults.append(f"--pool {asked.pool!r} is no pool{suggestion(asked.pool, hardware.pools)}")
    if parts is None:
        faults.append(f"--layout {asked.layout!r} is none of tp2, tp2-ep, dp2, dp2-ep (any size)")
    if faults or pool is None or parts is None:
        raise ConfigError([Problem("error", fault) for fault in faults])
    kind, size = parts["kind"][0] + "p", parts["size"]
    is_ep = bool(parts["ep"]) or "e" in parts["kind"]
    suite = asked.suite or _SUITES[kind]
    short = f"{kind[0]}{'e' if is_ep else ''}p{size}"
    backend = asked.backend.replace("flashinfer_", "fi-").replace("_", "-")
    model = asked.model.rstrip("/").rpartition("/")[2]
    stem = asked.name or f"{model}-{asked.quant}-{backend}-{short}"
    for name, text in (("--suite", suite), ("the file name", stem)):
        if not _FILE_STEM.fullmatch(text):
            message = f"{name} {text!r} must be letters, digits and . _ + - ; give another"
            raise ConfigError(message)
    path = root / suite / f"{stem}.yaml"
    list_path = root / suite / f"config-{asked.pool}.txt"
    text = _render(asked, f"{kind}{size}", is_ep)
    problems = _check(text, path, list_path, asked.pool, root)
    _write(path, list_path, text)
    return path, list_path, problems


def _render(asked: NewConfig, layout: str, is_ep: bool) -> str:
    sizes = {"tp": "--tensor-parallel-size", "dp": "--data-parallel-size"}
    try:
        argv = split_shell(asked.extra_args)
    except ValueError as error:
        raise ConfigError(f"the extra server arguments: {error}") from error
    if not flag_values(argv, _CONTEXT[:1]):
        argv += _CONTEXT
    argv += [sizes[layout[:2]], layout[2:], *(["--enable-expert-parallel"] if is_ep else [])]
    argv += ["--moe-backend", asked.backend]
    task = tasks.get(asked.task)
    source = asked.provenance or "given by hand; not measured"
    lines = [
        f"model_name: {_scalar(asked.model)}",
        f"accuracy_threshold: {asked.threshold!r}",
        f"tolerance: {asked.tolerance!r}",
        "calibration: uncalibrated",
        f"provenance: {_scalar(source)}",
        f"num_questions: {TEST_SET_SIZE[task.name]}",
        f"num_fewshot: {_SHOTS.get(task.name, _USUAL_SHOTS)}",
        f"task: {_scalar(task.name)}",
        "evaluator: builtin",
        f"metric: {_scalar(task.default_metric)}",
        f"engine: {_scalar(asked.engine)}",
        f"server_args: {json.dumps(shlex.join(argv), ensure_ascii=False)}",
        f"expect_backend: {_scalar(asked.backend)}",
        f"tags: [{_scalar(asked.quant.lower())}, {layout}{'-ep' if is_ep else ''}]",
    ]
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """Plain where it reads back as the same text, quoted as JSON (which is YAML) otherwise."""
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _check(text: str, path: Path, list_path: Path, pool_name: str, root: Path) -> list[Problem]:
    """Read the new file back from elsewhere, as if it lay in its place.

    Raises:
        ConfigError: It would be no valid config, would not fit, or is there already.
    """
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        loaded = read_config(draft, display=str(path))
    problems = list(loaded.problems)
    pool = load_hardware(hardware_file(root)).find(pool_name)
    if loaded.config is not None and pool is not None:
        problems += refused_flags(loaded.config, loaded, path)
        line = loaded.lines["server_args"]
        problems += check_capacity(loaded.config, layout_of(loaded.config), pool, str(path), line)
    if path.exists():
        message = f"exists already and is not overwritten; add its line to {list_path}, or --name"
        problems.append(Problem("error", message, str(path)))
    if list_path.is_file() and path.name in list_path.read_text(encoding="utf-8-sig").split():
        problems.append(Problem("error", f"lists {path.name} already", str(list_path)))
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    return problems


def _write(path: Path, list_path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        old = list_path.read_text(encoding="utf-8") if list_path.is_file() else ""
        gap = "" if not old or old.endswith("\n") else "\n"
        with list_path.open("a", encoding="utf-8") as file:
            file.write(f"{gap}{path.name}\n")
    except OSError as error:
        raise ConfigError(Problem("error", f"cannot be written: {error}", str(path))) from error
