"""The two generation routes: from a request's body to its reply, whole or streamed.

Receives a FastAPI request and the `Service`; returns a response that sends itself. The steps, in
order: read the body, check it, encode the prompts, plan the sequences, admit them, run them. A
client that goes away ends its sequences.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from moeserve.errors import BadRequest
from moeserve.server.connection import CHUNK_WRITER
from moeserve.server.http_guard import HttpError, Receive, Scope, Send, origin_of
from moeserve.server.params import Job, Prompt, chat_job, completion_job
from moeserve.server.prompts import Truncation, encode, read_messages, read_prompts
from moeserve.server.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    parse_body,
    parse_json,
)
from moeserve.server.replies import Reply
from moeserve.server.running import best, run_all, stream_all
from moeserve.server.sequences import Choice, EngineFailedError, plan_choices
from moeserve.server.service import Service
from moeserve.server.turns import read_body

logger = logging.getLogger("moeserve.server")
Result = TypeVar("Result")
# Replies of more tokens are put together in a thread, so that others are served meanwhile.
_INLINE_TOKENS = 20_000


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


async def with_body(
    request: Request,
    service: Service,
    kind: type[Body],
    use: Callable[[Body], Awaitable[Result]],
) -> Result:
    """Read the request's body as a typed model and return what `use` makes of it.

    A large one waits for its turn, and has it until `use` returns.
    """
    with service.held.counted() as count:
        raw = await read_body(request.scope, request.receive, service.config.limits, count)
        async with service.turns.taken(len(raw)):
            return await use(parse_body(kind, parse_json(raw)))


async def completions(request: Request, service: Service) -> Response:
    """Serve `/v1/completions`."""
    service.require_ready()  # 503 before anything is read
    context = service.context

    async def read(body: CompletionBody) -> tuple[str, Job, tuple[Prompt, ...]]:
        model = service.check_model(body.model)
        job = completion_job(body, context)
        if body.prompt is None:
            raise BadRequest("prompt: missing", "prompt")
        adds_special = body.add_special_tokens is not False
        keep = body.truncate_prompt_tokens
        truncation = None if keep is None else Truncation(keep, job.max_tokens or 0)
        return model, job, await read_prompts(body.prompt, context, adds_special, truncation)

    model, job, prompts = await with_body(request, service, CompletionBody, read)
    return await _answer(request, service, job, prompts, model, is_chat=False)


async def chat_completions(request: Request, service: Service) -> Response:
    """Serve `/v1/chat/completions`."""
    service.require_ready()

    async def read(body: ChatBody) -> tuple[str, Job, Prompt]:
        model = service.check_model(body.model)
        job = chat_job(body, service.context)
        if body.truncate_prompt_tokens is not None:
            name = "truncate_prompt_tokens"
            raise BadRequest(f"{name}: not for chat, whose start would be cut", name)
        return model, job, Prompt(tuple(await chat_ids(body, service)))

    model, job, prompt = await with_body(request, service, ChatBody, read)
    return await _answer(request, service, job, (prompt,), model, is_chat=True)


async def chat_ids(body: ChatBody | TokenizeBody, service: Service) -> list[int]:
    """Return the ids of a conversation after the model's template."""
    messages = read_messages(body.messages, service.config.limits.max_prompts)
    kwargs = body.chat_template_kwargs
    template = body.chat_template
    if isinstance(kwargs, dict) and "chat_template" in kwargs:
        template = kwargs["chat_template"]
    if template is not None and not service.config.has_request_templates:
        raise BadRequest(
            "chat_template: templates in requests are off (--trust-request-chat-template)",
            "chat_template",
        )
    if template is not None and not isinstance(template, str):
        raise BadRequest("chat_template: want a string", "chat_template")
    if isinstance(kwargs, dict):
        kwargs = {key: val for key, val in kwargs.items() if key != "chat_template"}
    continues_last = bool(body.continue_final_message)
    begins_turn = body.add_generation_prompt
    text = await service.chat.render(
        messages,
        template=template,
        variables=kwargs,
        has_generation_prompt=not continues_last if begins_turn is None else begins_turn,
        continues_last=continues_last,
    )
    # The template writes the special tokens itself.
    ids = await encode(text, service.context, bool(body.add_special_tokens))
    if not ids:
        raise BadRequest("messages: the template gives an empty prompt", "messages")
    return ids


async def _answer(
    request: Request,
    service: Service,
    job: Job,
    prompts: tuple[Prompt, ...],
    model: str,
    *,
    is_chat: bool,
) -> Response:
    num_sequences = len(prompts) * job.best_of
    most = service.config.limits.max_sequences
    if num_sequences > most:
        name = "best_of" if job.best_of > job.n else "n"
        raise BadRequest(
            f"{name}: {len(prompts)} prompts times {job.best_of} are more than {most} sequences",
            name,
        )
    unique = uuid.uuid4().hex
    request_id = ("chatcmpl-" if is_chat else "cmpl-") + (job.name or unique)
    # The engine's name for it stays unique where a client uses one name twice.
    origin = origin_of(request.scope, len(service.config.api_keys))
    choices = await plan_choices(job, prompts, service.context, unique, origin)
    _check_size(choices, service.config.limits.max_logprob_entries)
    reply = Reply(request_id, model, job, service.context.tokenizer, is_chat)
    service.admit(num_sequences)
    if job.is_streamed:
        return StreamReply(service, reply, choices)
    with service.released(num_sequences):
        try:
            work = run_all(service.engine, choices, service.metrics, service.most_in_engine)
            await _unless_gone(work, request.receive)
        except EngineFailedError as failure:
            raise _http_error(failure, service, request_id) from None
    num_tokens = sum(len(choice.token_ids) + len(choice.prompt.ids) for choice in choices)
    if num_tokens < _INLINE_TOKENS:
        raw = _whole(reply, choices)
    else:
        raw = await asyncio.to_thread(_whole, reply, choices)
    return Response(raw, media_type="application/json")


def _whole(reply: Reply, choices: list[Choice]) -> bytes:
    return _dumps(reply.whole(best(choices, reply.job), choices))


def _check_size(choices: list[Choice], most: int) -> None:
    """Refuse log-probabilities whose reply would fill the memory.

    Raises:
        BadRequest: More entries than allowed.
    """
    num_entries = 0
    for choice in choices:
        sampling = choice.request.sampling
        if sampling.num_logprobs is not None:
            num_entries += sampling.max_tokens * (sampling.num_logprobs + 1)
        if sampling.num_prompt_logprobs is not None:
            num_entries += len(choice.prompt.ids) * (sampling.num_prompt_logprobs + 1)
    if num_entries > most:
        raise BadRequest(
            f"logprobs: {num_entries} log-probabilities were asked for, at most {most} are given",
            "logprobs",
        )


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _http_error(failure: EngineFailedError, service: Service, request_id: str) -> HttpError:
    # What the engine could not finish before it ended is to be asked of another server.
    if failure.is_stopping or service.status == "stopping":
        return HttpError(503, str(failure), code="stopping", closes=True, retry_after_s=1)
    logger.error("%s failed: %s", request_id, failure)
    return HttpError(500, str(failure), code="engine_error")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Run `work`, or cancel it when the client goes away.

    Raises:
        ClientGoneError: It did.
    """
    running = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({running, watch}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientGoneError
    finally:
        for task in (running, watch):
            task.cancel()
        await asyncio.gather(running, watch, return_exceptions=True)


class StreamReply(Response):
    """Server-sent events, one a step of each sequence; its sequences are already admitted."""

    def __init__(self, service: Service, reply: Reply, choices: list[Choice]) -> None:
        super().__init__(media_type="text/event-stream")
        self._service = service
        self._reply = reply
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; ends early when the client goes away."""
        with self._service.released(len(self._choices)):
            try:
                write = scope.get(CHUNK_WRITER)
                await _unless_gone(self._send_all(send, write), receive)
            except ClientGoneError:
                self._service.metrics.disconnected()

    async def _send_all(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(text: str) -> None:
            body = f"data: {text}\n\n".encode()
            if write is None or not write(body):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        reply = self._reply
        needs_prompt_first = reply.job.sampling.num_prompt_logprobs is not None
        opened: set[int] = set()
        if not needs_prompt_first:
            for choice in self._choices:
                await self._open(choice, opened, event)
        service = self._service
        try:
            most = service.most_in_engine
            deltas = stream_all(service.engine, self._choices, service.metrics, most)
            async with aclosing(deltas):
                async for choice, delta in deltas:
                    await self._open(choice, opened, event)
                    await event(reply.chunk(choice, delta))
            if reply.job.has_usage_chunk:
                await event(reply.usage_chunk(self._choices))
        except (EngineFailedError, HttpError) as failure:
            if isinstance(failure, EngineFailedError):
                error = _http_error(failure, service, reply.id)
            else:
                error = failure
            service.metrics.failed(error.status)
            await event(_dumps(error.body()).decode("utf-8"))
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _open(self, choice: Choice, opened: set[int], event: Any) -> None:
        """Send what comes before a choice's first token, once."""
        if choice.index in opened:
            return
        opened.add(choice.index)
        opening = self._reply.opening_chunk(choice)
        if opening is not None:
            await event(opening)
