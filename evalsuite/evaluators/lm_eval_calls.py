"""lm-eval's requests overheard: what each attempt showed at the wire.

Receives the session that lm-eval posts with, gives it one that notes status, words and choice of
every reply on the way. Runs in the child process; what is put on record is `lm_eval_worker.py`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from evalsuite.http_reply import refusal
from evalsuite.retries import is_retriable
from evalsuite.wire import Choice, MalformedError, parse_choices


@dataclass
class Call:
    """What one attempt showed at the wire."""

    status: int | None = None
    error_text: str = ""
    choice: Choice | None = None


CALL: ContextVar[Call] = ContextVar("call")


class _ListeningPost:
    """The context manager of `session.post`, with the reply read along."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __aenter__(self) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await self._inner.__aenter__()
        call = CALL.get()
        call.status = response.status
        # aiohttp keeps the body, so lm-eval reads the same bytes after us.
        payload = await response.read()
        if response.status // 100 == 2:
            call.choice = parse_choices(payload, 1, is_chat=False)[0]
            return response
        call.error_text = refusal(response, payload)
        if response.ok:
            # A redirect, which lm-eval would read as an answer.
            raise aiohttp.ClientResponseError(
                response.request_info, (), status=response.status, message=call.error_text
            )
        return response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)


class ListeningSession:
    """What lm-eval is given for a session; redirects are refused, as `client.py` does."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def post(self, *args: Any, **kwargs: Any) -> _ListeningPost:
        """Post as the session would, and listen."""
        return _ListeningPost(self._session.post(*args, allow_redirects=False, **kwargs))


def describe(error: BaseException, call: Call, timeout_s: float) -> tuple[str, str, bool]:
    """Kind, message and finality of a failed attempt, as `client.py` would give them."""
    name = type(error).__name__
    if isinstance(error, MalformedError):
        return "malformed", f"Malformed: {error}", False
    if isinstance(error, aiohttp.ClientResponseError) and call.status is not None:
        said = call.error_text or error.message or "no message"
        if call.status // 100 == 2:
            # lm-eval reads nothing that does not call itself JSON.
            return "malformed", f"Malformed: {said}", False
        return "http", f"HTTP {error.status}: {said}", not is_retriable(error.status)
    if isinstance(error, TimeoutError):
        return "timeout", f"{name}: no full reply within {timeout_s:g} s", True
    if isinstance(error, aiohttp.ClientError | OSError):
        said = str(error) or "the connection was closed before the reply was complete"
        return "connection", f"{name}: {said}", False
    return "malformed", f"{name}: {error}", False
