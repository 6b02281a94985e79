"""Command line and environment → `ServeConfig`, the one value the server is started with.

Receives argv and an environment mapping; returns a frozen config or raises `UsageError` with the
closest right spelling. The rows are in `flags.py`; what the engine does with its part is in
`engine/config.py`. The only file of this package that reads the environment.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moeserve.engine.config import EngineConfig
from moeserve.errors import UsageError
from moeserve.flags import FLAGS, Flag
from moeserve.foreign_flags import (
    ACCEPTED_SWITCHES,
    ENV_SWITCHES,
    NEUTRAL_FLAGS,
    NEUTRAL_SHORT,
    REFUSED_FLAGS,
)
from moeserve.locate import resolve_model
from moeserve.server.limits import Limits

_BY_NAME = {flag.name: flag for flag in FLAGS}
_SHORT = {flag.short: flag.name for flag in FLAGS if flag.short} | NEUTRAL_SHORT
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
# Thousands and binary thousands, as the field's command lines write lengths.
_SUFFIXES = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


@dataclass(frozen=True)
class ServeConfig:
    """Everything that the server is started with.

    Attributes:
        engine: Options of the engine; its `model` is a folder or a preset's name.
        served_names: Names that requests may use; the first is the one in replies.
        limits: Bounds on requests.
        host: Address to listen on.
        port: 0 takes a free one.
        port_file: Receives `{"port": N}` once connections are accepted; "" is none.
        api_keys: One of them must come with a request to the API; empty: no key is asked for.
        chat_template: File or text that replaces the model's template; "" keeps it.
        has_request_templates: Templates that come with a request are rendered.
        generation_config: "auto" takes sampling defaults from the model's folder.
        shutdown_grace_s: Open requests may finish for this long after SIGTERM or SIGINT.
        keep_alive_s: Idle connections are kept this long. Clients of the field keep theirs for
            5 to 60 s; a server that closes first makes them lose requests.
        log_level: Least level that is logged.
        has_access_log: A log line for each request.
        notes: What was accepted without effect, or ignored; logged at start.
    """

    engine: EngineConfig
    served_names: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    port: int = 8000
    port_file: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    chat_template: str = ""
    has_request_templates: bool = False
    generation_config: str = "auto"
    shutdown_grace_s: float = 30.0
    keep_alive_s: int = 75
    log_level: str = "info"
    has_access_log: bool = False
    notes: tuple[str, ...] = ()


def default_of(flag: Flag) -> object:
    """Return the default of the field that a flag sets, from its dataclass."""
    owner, _, name = flag.target.partition(".")
    config: EngineConfig | Limits | ServeConfig
    config = EngineConfig("") if owner == "engine" else Limits()
    if owner == "server":
        config = ServeConfig(EngineConfig(""), ())
    return getattr(config, name)


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServeConfig:
    """Return the config of one command line.

    Args:
        argv: Arguments after the program's name; one of them is MODEL.
        environ: Environment; the process's own if None.

    Raises:
        UsageError: An argument that cannot be meant; the message names it and the closest one.
    """
    env = os.environ if environ is None else environ
    values, models, notes = _scan(list(argv))
    if len(models) != 1:
        what = "no MODEL given" if not models else f"more than one MODEL: {', '.join(models)}"
        raise UsageError(f"{what}; usage: moeserve MODEL [options]")
    served = values.pop("server.served_names", None)
    engine_values = _part(values, "engine")
    engine_values["env"] = {name: env[name] for name in ENV_SWITCHES if name in env}
    notes += [
        f"{name}={env[name]}: not a switch of this server, ignored"
        for name in sorted(env)
        if name.startswith("VLLM_USE_") and name not in ENV_SWITCHES
    ]
    if engine_values.get("max_model_len") == -1:
        engine_values["max_model_len"] = 0
    dtype = engine_values.get("dtype")
    if isinstance(dtype, str):
        engine_values["dtype"] = _DTYPE_ALIASES.get(dtype, dtype)
    is_dummy = engine_values.get("load_format") == "dummy"
    engine_values["model"] = resolve_model(models[0], is_dummy, env)
    server_values = _part(values, "server")
    if "log_level" in server_values:
        engine_values["log_level"] = server_values["log_level"]  # one option for both processes
    env_key = env.get("MOESERVE_API_KEY") or env.get("VLLM_API_KEY")
    if "api_keys" not in server_values and env_key:
        server_values["api_keys"] = (env_key,)
    config = ServeConfig(
        engine=EngineConfig(**engine_values),  # type: ignore[arg-type]
        served_names=served if isinstance(served, tuple) else (models[0],),
        limits=Limits(**_part(values, "limits")),  # type: ignore[arg-type]
        notes=tuple(notes),
    )
    return replace(config, **server_values)  # type: ignore[arg-type]


def _part(values: Mapping[str, object], owner: str) -> dict[str, object]:
    prefix = owner + "."
    return {key[len(prefix) :]: val for key, val in values.items() if key.startswith(prefix)}


def _scan(argv: list[str]) -> tuple[dict[str, object], list[str], list[str]]:
    """Split argv into target → value, positional arguments, and notes."""
    values: dict[str, object] = {}
    models: list[str] = []
    notes: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("-") or word == "-":
            models.append(word)
            continue
        spelling, has_equals, inline = word.partition("=")
        name = _normalise(spelling)
        if name in REFUSED_FLAGS or name.split(".")[0] in REFUSED_FLAGS:
            reason = REFUSED_FLAGS.get(name) or REFUSED_FLAGS[name.split(".")[0]]
            raise UsageError(f"{spelling}: known, but not supported here: {reason}")
        if name in ACCEPTED_SWITCHES:
            notes.append(f"{spelling}: accepted without effect: {ACCEPTED_SWITCHES[name]}")
            continue
        if name in ("--disable-uvicorn-access-log", "--disable-access-log"):
            values["server.has_access_log"] = False
            continue
        flag, is_negated = _find(name, spelling)
        if flag is not None and flag.kind == "switch":
            values[flag.target] = _switch(spelling, inline if has_equals else "true") != is_negated
            continue
        if not has_equals:
            if at >= len(argv) or (argv[at].startswith("--") and len(argv[at]) > 2):
                raise UsageError(f"{spelling}: wants a value")
            inline = argv[at]
            at += 1
        if flag is None:
            allowed, reason = NEUTRAL_FLAGS[name]
            if inline.lower() not in allowed:
                raise UsageError(
                    f"{spelling} {inline}: known, but not supported here: {reason} "
                    f"(accepted: {', '.join(allowed)})"
                )
            continue
        words = [inline]
        # A list goes on over the next words only once MODEL is known, or it would swallow it.
        while flag.kind == "list" and models and not has_equals and at < len(argv):
            if argv[at].startswith("-"):
                break
            words.append(argv[at])
            at += 1
        value = _convert(flag, spelling, words)
        if flag.kind == "list" and isinstance(value, tuple):
            earlier = values.get(flag.target)
            value = (*earlier, *value) if isinstance(earlier, tuple) else value
        values[flag.target] = value
    return values, models, notes


def _normalise(spelling: str) -> str:
    if spelling in _SHORT:
        return _SHORT[spelling]
    head, dot, rest = spelling.partition(".")
    return head.replace("_", "-") + dot + rest


def _find(name: str, spelling: str) -> tuple[Flag | None, bool]:
    """Return the row of a flag and whether it was negated; None for a neutral one."""
    if name in _BY_NAME:
        return _BY_NAME[name], False
    if name in NEUTRAL_FLAGS:
        return None, False
    positive = "--" + name.removeprefix("--no-")
    if name.startswith("--no-") and positive in _BY_NAME and _BY_NAME[positive].kind == "switch":
        return _BY_NAME[positive], True
    known = [*_BY_NAME, *NEUTRAL_FLAGS, *ACCEPTED_SWITCHES, *REFUSED_FLAGS, *_SHORT]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else "; see moeserve --help"
    raise UsageError(f"{spelling}: unknown option{hint}")


def _switch(spelling: str, text: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0"):
        return False
    raise UsageError(f"{spelling}={text}: a switch takes no value, or true or false")


def _convert(flag: Flag, spelling: str, words: list[str]) -> object:
    text = words[0]
    if flag.kind == "list":
        if "" in words:
            raise UsageError(f"{spelling}: an empty value")
        return tuple(words)
    if flag.kind == "json":
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{spelling} {text}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UsageError(f"{spelling} {text}: want a JSON object")
        return value
    if flag.kind == "text":
        if flag.choices and text not in flag.choices:
            close = difflib.get_close_matches(text, flag.choices, n=1, cutoff=0.0)
            raise UsageError(
                f"{spelling} {text}: want one of {', '.join(flag.choices)}; closest: {close[0]}"
            )
        return text
    return _number(flag, spelling, text)


def _number(flag: Flag, spelling: str, text: str) -> int | float:
    if flag.name == "--max-model-len" and text == "auto":
        return 0
    try:
        number: int | float
        if flag.kind == "float":
            number = float(text)
        elif text[-1:] in _SUFFIXES and text[:-1].isdigit():
            number = int(text[:-1]) * _SUFFIXES[text[-1]]
        else:
            number = int(text)
    except ValueError:
        kind = "a whole number" if flag.kind == "int" else "a number"
        raise UsageError(f"{spelling} {text}: want {kind}") from None
    low, high = flag.low, flag.high
    if (
        number != number
        or (low is not None and number < low)
        or (high is not None and number > high)
    ):
        upper = f" and at most {high:g}" if high is not None else ""
        raise UsageError(f"{spelling} {text}: want at least {low or 0:g}{upper}")
    return number
