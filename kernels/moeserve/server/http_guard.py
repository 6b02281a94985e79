"""What stands before the routes: bounds on headers, the API key, errors as JSON.

Receives raw ASGI messages; passes a request on or answers it; bodies are read in `turns.py`. Plain
ASGI rather than a framework's middleware, so that a client's disconnect reaches the routes and a
stream costs nothing extra. What happens before there is a request is `connection.py`.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from moeserve.errors import BadRequest
from moeserve.server.limits import Limits
from moeserve.server.replies import error_body

logger = logging.getLogger("moeserve.server")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}


class HttpError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: For the client.
        param: Field at fault.
        code: Machine-readable reason.
        closes: The connection is closed after the answer.
        retry_after_s: Seconds for `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        closes: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.closes = closes
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """Return the body of the answer, in OpenAI's form."""
        kind = _KINDS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return error_body(self.message, kind, self.param, self.code or self.status)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that this error adds."""
        extra = [(b"connection", b"close")] if self.closes else []
        if self.retry_after_s is not None:
            extra.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        return extra


async def send_json(
    send: Send, status: int, body: object, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send one whole JSON answer."""
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send(
        {"type": "http.response.start", "status": status, "headers": start + (headers or [])}
    )
    await send({"type": "http.response.body", "body": raw})


class Guard:
    """Checks every request before the routes see it, and answers what they raise.

    Args:
        app: The routes.
        limits: Bounds on headers.
        api_keys: Empty asks for none.
        on_error: Told the status of every error answered.
    """

    def __init__(
        self, app: App, limits: Limits, api_keys: tuple[str, ...], on_error: Callable[[int], None]
    ) -> None:
        self._app = app
        self._limits = limits
        self._keys = tuple(key.encode("utf-8") for key in api_keys)
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = has_ended = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started, has_ended
            has_started = True
            is_body = message["type"] == "http.response.body"
            has_ended = is_body and not message.get("more_body", False)
            await send(message)

        try:
            self._check_headers(scope)
            await self._app(scope, receive, watched_send)
        except HttpError as error:
            failure = error
        except BadRequest as error:
            failure = HttpError(400, str(error), error.param)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            failure = HttpError(500, "internal error; see the server's log")
        else:
            return
        self._on_error(failure.status)
        if has_ended:  # the framework has answered before it passed the exception on
            return
        if has_started:
            # Too late for a status; a cut reply must not look whole.
            raise ConnectionAbortedError(failure.message)
        await send_json(send, failure.status, failure.body(), failure.headers())

    def _check_headers(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        limits = self._limits
        if len(headers) > limits.max_headers:
            raise HttpError(431, f"more than {limits.max_headers} header lines", closes=True)
        if sum(len(name) + len(value) + 4 for name, value in headers) > limits.max_header_bytes:
            raise HttpError(431, f"more than {limits.max_header_bytes} header bytes", closes=True)
        names = [name for name, _ in headers]
        if b"content-length" in names and b"transfer-encoding" in names:
            # Two readings of one body are how a request is smuggled past a proxy.
            raise HttpError(
                400, "content-length and transfer-encoding exclude each other", closes=True
            )
        if self._keys and scope["path"] not in _OPEN_PATHS and scope["method"] != "OPTIONS":
            scope["moeserve.key"] = self._check_key(headers)

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> int:
        """Return which key came."""
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        key = key.strip()
        place = -1
        for index, known in enumerate(self._keys):  # all of them, so that time tells nothing
            if hmac.compare_digest(key, known):
                place = index
        if scheme.lower() != b"bearer" or place < 0:
            raise HttpError(401, "wrong or missing API key", code="invalid_api_key")
        return place


def origin_of(scope: Scope, num_keys: int) -> tuple[str, str]:
    """Return who sends a request, and by which connection, for the shares of a step.

    Args:
        scope: Of the request, after the guard.
        num_keys: How many keys the server knows; with one, it tells nobody from anybody.
    """
    host, port = scope.get("client") or ("", 0)
    client = f"key {scope['moeserve.key']}" if num_keys > 1 else str(host)
    return client, f"{host}:{port}"
