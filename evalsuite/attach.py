"""A server that somebody else runs: waited for while it loads, never started, never stopped.

Receives its address, the model it must serve and how long to wait; returns when it is ready.
What can pass (nothing listens yet, `/health` answers 503) is waited for, what cannot (an unknown
host, another protocol, another model) is said at once. Servers of ours are `server.py`.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from evalsuite.errors import ConfigError, ServerError
from evalsuite.readiness import NO_SUCH_ROUTE, ask, connection_to, served_names

_LOOK_TIMEOUT_S = 10.0
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 2.0
# Besides 5xx, the statuses that say "later" (RFC 9110, RFC 8470, RFC 6585).
_LATER = (408, 425, 429)
_NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


@dataclass(frozen=True)
class Patience:
    """How long to wait.

    Attributes:
        limit_s: `startup_max_wait_seconds`: for a server that answers and is not ready.
        absent_limit_s: For an address at which nothing listens, at a stretch.
        on_wait: Called before each pause with (seconds waited, what was seen).
    """

    limit_s: float
    absent_limit_s: float
    on_wait: Callable[[float, str], None] | None = None


@dataclass(frozen=True)
class _Look:
    """What one look saw that may still change."""

    state: Literal["ready", "loading", "absent"]
    detail: str = ""


def wait_for(base_url: str, model: str, patience: Patience, api_key: str = "") -> None:
    """Wait until the server is ready.

    Args:
        base_url: Its root, without "/v1".
        model: Name that `/v1/models` must list.
        patience: How long.
        api_key: Bearer token it asks for, "" for none.

    Raises:
        ConfigError: It will not become the expected server, whatever the wait.
        ServerError: It was not ready in time, or its host name cannot be looked up now.
    """
    began = present_at = time.monotonic()
    pause_s = _PAUSE_MIN_S
    while True:
        seen = _look(base_url, model, api_key)
        now = time.monotonic()
        if seen.state == "ready":
            return
        if seen.state == "loading":
            present_at = now
        left_s = patience.limit_s - (now - began)
        if seen.state == "absent":
            left_s = min(left_s, patience.absent_limit_s - (now - present_at))
        if left_s <= 0:
            raise ServerError(
                f"ready: the server at {base_url} cannot be evaluated: "
                f"{seen.detail}; {_given_up(patience, now - began, now - present_at)}"
            )
        if patience.on_wait is not None:
            patience.on_wait(now - began, seen.detail)
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, _PAUSE_MAX_S)


def _given_up(patience: Patience, waited_s: float, absent_s: float) -> str:
    if not patience.limit_s:
        return "an earlier job of this run has waited for it"
    if waited_s >= patience.limit_s:
        return f"waited for startup_max_wait_seconds {patience.limit_s:g}"
    return (
        f"waited {absent_s:.0f} s for something to listen there; a file that names "
        "startup_max_wait_seconds waits as long as it says"
    )


def _look(base_url: str, model: str, api_key: str) -> _Look:
    """Look once.

    Raises:
        ConfigError, ServerError: See `wait_for`.
    """
    connection = connection_to(base_url, _LOOK_TIMEOUT_S)
    try:
        if absent := _connect(connection, base_url):
            return absent
        prefix = urlsplit(base_url).path.rstrip("/")
        status, _ = ask(connection, f"{prefix}/health", api_key)
        if status != 200 and status not in NO_SUCH_ROUTE:
            return _not_ready(base_url, "/health", status)
        connection.close()  # the next request opens it again: not every server keeps it
        status, body = ask(connection, f"{prefix}/v1/models", api_key)
        if status != 200:
            return _not_ready(base_url, "/v1/models", status)
        names = served_names(body)
    except ConnectionError as error:
        # What forwards a port takes a connection and drops it while nothing is behind it.
        return _Look("absent", f"it takes no request ({_said(error)})")
    except (OSError, http.client.IncompleteRead) as error:
        return _Look("loading", f"it does not answer ({_said(error)})")
    except http.client.HTTPException as error:
        raise _hopeless(base_url, f"it does not speak HTTP ({_said(error)})") from error
    except ValueError as error:
        raise _hopeless(base_url, f"/v1/models gave no model list ({error})") from error
    finally:
        connection.close()
    if not names:
        return _Look("loading", "/v1/models lists nothing")
    if model not in names:
        raise _hopeless(
            base_url,
            f"it serves {', '.join(names)}, not {model}; name its model in `model_name`, or its "
            "name for it by --served-model-name in `server_args`",
        )
    return _Look("ready")


def _connect(connection: http.client.HTTPConnection, base_url: str) -> _Look | None:
    """Open the connection; what was seen where that may still come.

    Raises:
        ConfigError: There is no such host, or it speaks no TLS that can be trusted.
        ServerError: The name service does not answer.
    """
    try:
        connection.connect()
    except socket.gaierror as error:
        message = f"its host name is not found ({_said(error)})"
        if error.errno in _NO_SUCH_HOST:
            raise _hopeless(base_url, message) from error
        raise ServerError(
            f"start: the server at {base_url} cannot be evaluated: {message}"
        ) from error
    except UnicodeError as error:
        raise _hopeless(base_url, f"its host name is none ({error})") from error
    except ssl.SSLEOFError as error:
        return _Look("absent", f"it takes no connection ({_said(error)})")
    except ssl.SSLError as error:
        hint = "" if isinstance(error, ssl.SSLCertVerificationError) else "; is it http://?"
        raise _hopeless(base_url, f"no TLS with it ({_said(error)}){hint}") from error
    except OSError as error:
        return _Look("absent", f"it takes no connection ({_said(error)})")
    return None


def _not_ready(base_url: str, path: str, status: int) -> _Look:
    """A status other than 200.

    Raises:
        ConfigError: One that no wait changes.
    """
    detail = f"{path} answers {status}"
    if status >= 500 or status in _LATER:
        return _Look("loading", detail)
    hint = "is this the root of an OpenAI-compatible server?"
    if status in (401, 403):
        hint = "its key is read from the environment, OPENAI_API_KEY"
    elif status // 100 == 3:
        hint = "redirects are not followed; give the final address"
    raise _hopeless(base_url, f"{detail}; {hint}")


def _hopeless(base_url: str, detail: str) -> ConfigError:
    return ConfigError(f"the server at {base_url} cannot be evaluated: {detail}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
