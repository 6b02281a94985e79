"""Child process that renders chat templates: `python -m moeserve.server.template_worker`.

Receives one JSON object a line on stdin (`template`, `variables`, `max_chars`), answers with one a
line on stdout (`text` or `error`), after one that says it is ready. It runs apart so that a
template that never ends, or asks for more memory than there is, can be killed; `chat.py` does
that. Ends when stdin closes.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MEMORY_BYTES = 1 << 30


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ENVIRONMENT = _environment()


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _ENVIRONMENT.from_string(template)


def render(template: str, variables: dict[str, Any], max_chars: int) -> str:
    """Return the rendered text.

    Raises:
        ValueError: More than `max_chars` characters.
        TemplateError: The template's own, or the sandbox's refusal.
    """
    pieces: list[str] = []
    num_chars = 0
    for piece in _compiled(template).generate(**variables):
        num_chars += len(piece)
        if num_chars > max_chars:
            raise ValueError(f"more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def _answer(line: str) -> dict[str, str]:
    try:
        job = json.loads(line)
        return {"text": render(job["template"], job["variables"], job["max_chars"])}
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # noqa: BLE001 - process boundary: whatever a template raises
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer lines until stdin closes."""
    # The terminal's Ctrl-C is for the server, which closes stdin when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    _say({"ready": "yes"})
    for line in sys.stdin:
        _say(_answer(line))


if __name__ == "__main__":
    main()
