"""Async OpenAI client: one prompt in, `Reply` or `RequestFailure` out, never "".

Receives a base URL, request settings and bodies (built by `wire.py`); bounded, counted retries
(`retries.py`). What a reply is worth is decided by `tasks/`; what is kept of it by `ledger.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp

from evalsuite.http_reply import one_line, read_bounded, refusal
from evalsuite.retries import RetryPolicy, is_retriable, retry_after
from evalsuite.wire import Choice, MalformedError, SamplingSettings, parse_choices

Content = TypeVar("Content")

# An idle socket is dropped before the server does it (uvicorn: 5 s), or a request would be sent
# into a connection that was just closed.
KEEPALIVE_S = 2.0


@dataclass(frozen=True)
class Reply:
    """A completed request.

    Attributes:
        text: Generated text; may be empty, which is then the model's own doing.
        finish_reason: "stop", "length" or what else the server says; "length" where it says
            nothing and `max_tokens` tokens were generated.
        prompt_tokens: From `usage`, 0 where the server sends none.
        completion_tokens: From `usage`, 0 where the server sends none.
        latency_s: From sending the request to the last byte, the last attempt only.
        retries: Attempts before this one; each one's error is in `retry_errors`.
        retry_errors: "Type: message" of each failed attempt, in order.
        token_ids: Token ids of the completion where the server returns them.
        token_logprobs: Log-probabilities of the completion's tokens where asked for.
        model: What the server says has answered, "" where it does not.
    """

    text: str
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latency_s: float = 0.0
    retries: int = 0
    retry_errors: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    model: str = ""


@dataclass(frozen=True)
class RequestFailure:
    """A request that got no usable answer after all attempts.

    Attributes:
        kind: "http", "timeout", "connection" or "malformed".
        message: Type and text of the last error, never blank.
        status: HTTP status of the last attempt, None where there was none.
        retries: Attempts after the first.
        latency_s: Time spent over all attempts.
        retry_errors: "Type: message" of each failed attempt, in order.
    """

    kind: str
    message: str
    status: int | None = None
    retries: int = 0
    latency_s: float = 0.0
    retry_errors: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Exchange(Generic[Content]):
    """A reply that was read.

    Attributes:
        content: What `read` made of it.
        latency_s: Of the last attempt.
        retry_errors: "Type: message" of each failed attempt before it, in order.
    """

    content: Content
    latency_s: float
    retry_errors: tuple[str, ...]


@dataclass(frozen=True)
class ClientSettings:
    """Where requests go and how long they may take.

    Attributes:
        base_url: Server root, with or without a trailing "/v1".
        sampling: What the bodies were built with; it also names the route.
        timeout_s: Limit of one attempt, connecting included, queueing in this client not.
        retry: Repeats of failed attempts.
        api_key: Sent as a bearer token; never written anywhere.
    """

    base_url: str
    sampling: SamplingSettings
    timeout_s: float = 600.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    api_key: str = field(default="", repr=False)

    @property
    def root(self) -> str:
        """Server root without "/v1" and trailing slashes."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine, where a proxy would only be in the way."""
        host = urlsplit(self.base_url).hostname or ""
        return host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")


@dataclass(eq=False)
class _AttemptError(Exception):
    """One failed attempt on its way from the transport to the retry loop."""

    kind: str
    message: str
    status: int | None = None
    is_final: bool = False
    retry_after_s: float | None = None


class Client:
    """One client of one server. The caller bounds how many `ask` run at the same time.

    First attempts share kept-alive connections. A repeat opens one of its own: a busy client may
    find several kept ones closed in a row, and would spend every attempt on them.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self._url = settings.root + settings.sampling.route
        self._first: aiohttp.ClientSession | None = None
        self._repeats: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        """Open the sessions; sockets are opened as requests need them."""
        # No limit here: waiting for a free connection would count against the request.
        self._first = self._session(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        )
        self._repeats = self._session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.settings.api_key:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self.settings.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            trust_env=not self.settings.is_loopback,
        )

    async def __aexit__(self, *_: object) -> None:
        """Close every socket."""
        for session in (self._first, self._repeats):
            if session is not None:
                await session.close()

    async def ask(self, body: bytes, num_prompts: int = 1) -> tuple[Reply, ...] | RequestFailure:
        """Post one body until it is answered or the attempts are used up.

        Args:
            body: From `wire.build_body`.
            num_prompts: Prompts in it.

        Returns:
            One reply per prompt in prompt order, or the failure of them all.
        """
        asked = self.settings.sampling
        outcome = await self.exchange(
            body,
            lambda data: parse_choices(
                data, num_prompts, asked.is_chat, has_logprobs=asked.has_logprobs
            ),
        )
        if isinstance(outcome, RequestFailure):
            return outcome
        return tuple(
            Reply(
                text=choice.text,
                finish_reason=self._finish_reason(choice, num_prompts),
                prompt_tokens=choice.prompt_tokens,
                completion_tokens=choice.completion_tokens,
                latency_s=outcome.latency_s,
                retries=len(outcome.retry_errors),
                retry_errors=outcome.retry_errors,
                token_ids=choice.token_ids,
                token_logprobs=choice.token_logprobs,
                model=choice.model,
            )
            for choice in outcome.content
        )

    def _finish_reason(self, choice: Choice, num_prompts: int) -> str:
        """The server's word, or what its token count says of a lone reply without one."""
        limit = self.settings.sampling.max_tokens
        is_full = num_prompts == 1 and choice.completion_tokens >= limit > 0
        return choice.finish_reason or ("length" if is_full else "")

    async def exchange(
        self, body: bytes, read: Callable[[bytes], Content]
    ) -> Exchange[Content] | RequestFailure:
        """Post one body and read its reply, with the attempts, limits and key of the settings.

        Args:
            body: JSON.
            read: Makes something of the reply's bytes; a `MalformedError` of it is one more
                failed attempt, anything else it raises goes to the caller.
        """
        policy = self.settings.retry
        started = time.perf_counter()
        errors: list[str] = []
        while True:
            sent = time.perf_counter()
            try:
                content = await self._post(self._repeats if errors else self._first, body, read)
            except _AttemptError as failed:
                message = one_line(failed.message, self.settings.api_key)
                errors.append(message)
                if failed.is_final or len(errors) > policy.max_retries:
                    spent = time.perf_counter() - started
                    retries = len(errors) - 1
                    return RequestFailure(
                        failed.kind, message, failed.status, retries, spent, tuple(errors)
                    )
                await asyncio.sleep(policy.pause_s(len(errors) - 1, failed.retry_after_s))
                continue
            return Exchange(content, time.perf_counter() - sent, tuple(errors))

    async def _post(
        self,
        session: aiohttp.ClientSession | None,
        body: bytes,
        read: Callable[[bytes], Content],
    ) -> Content:
        """Run one attempt.

        Raises:
            _AttemptError: Whatever went wrong, with a message that is never blank.
        """
        if session is None:
            raise RuntimeError("Client is used outside `async with`")
        try:
            # A redirect would turn the POST into a GET, or take the key elsewhere.
            async with session.post(self._url, data=body, allow_redirects=False) as response:
                payload = await read_bounded(response)
        except TimeoutError as error:
            limit = f"no full reply within {self.settings.timeout_s:g} s"
            raise _AttemptError("timeout", f"{_name(error)}: {limit}", is_final=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _AttemptError("connection", f"{_name(error)}: {_words(error)}") from error
        except MalformedError as error:
            raise _AttemptError("malformed", f"Malformed: {error}", response.status) from error
        if response.status // 100 != 2:
            raise _AttemptError(
                kind="http",
                message=f"HTTP {response.status}: {refusal(response, payload)}",
                status=response.status,
                is_final=not is_retriable(response.status),
                retry_after_s=retry_after(response.headers.get("Retry-After")),
            )
        try:
            return read(payload)
        except MalformedError as error:
            raise _AttemptError("malformed", f"Malformed: {error}", response.status) from error


def _name(error: BaseException) -> str:
    return type(error).__name__


def _words(error: BaseException) -> str:
    """Text of an error, or what stands in for the many that have none."""
    return str(error) or "the connection was closed before the reply was complete"
