"""The routes of the server, as one ASGI application.

Receives a `Service`; returns the application that uvicorn runs. Generation is `generate.py`; this
file has the short routes, and turns every exception into OpenAI's error form.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from moeserve import __version__
from moeserve.errors import BadRequest, MoeserveError
from moeserve.server import generate
from moeserve.server.fields import check_token_ids
from moeserve.server.http_guard import App, Guard, HttpError
from moeserve.server.params import ModelContext
from moeserve.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from moeserve.server.service import Service
from moeserve.server.tokenizer import Tokenizer

logger = logging.getLogger("moeserve.server")
Handler = Callable[[Request, Service], Awaitable[Response]]


def build_app(service: Service) -> App:
    """Return the application."""
    app = FastAPI(title="moeserve", version=__version__, docs_url=None, redoc_url=None)

    def route(
        path: str, method: str, handler: Handler, body: type[BaseModel] | None = None
    ) -> None:
        async def endpoint(request: Request) -> Response:
            return await handler(request, service)

        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            response_class=Response,
            name=f"{method} {path}",
            operation_id=f"{method.lower()}_{path.strip('/').replace('/', '_')}",
            openapi_extra=_schema(path, body),
        )
        if method == "GET":  # for probes: the same without its body, which uvicorn leaves out
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)

    route("/v1/completions", "POST", generate.completions, CompletionBody)
    route("/v1/chat/completions", "POST", generate.chat_completions, ChatBody)
    route("/v1/models", "GET", _models)
    route("/v1/models/{name:path}", "GET", _model)
    route("/v1/backends", "GET", _backends)
    route("/v1/evidence", "GET", _evidence)
    route("/tokenize", "POST", _tokenize, TokenizeBody)
    route("/detokenize", "POST", _detokenize, DetokenizeBody)
    route("/tokenizer_info", "GET", _tokenizer_info)
    route("/health", "GET", _health)
    route("/ping", "GET", _health)
    route("/ping", "POST", _health)
    route("/version", "GET", _version)
    route("/metrics", "GET", _metrics)
    _add_error_handlers(app, service)
    config = service.config
    return Guard(app, config.limits, config.api_keys, service.metrics.failed)


def _schema(path: str, body: type[BaseModel] | None) -> dict[str, Any]:
    """What `/openapi.json` says beyond the path; bodies are read by hand in `generate.py`."""
    extra: dict[str, Any] = {}
    if body is not None:
        schema = body.model_json_schema()
        required = {CompletionBody: "prompt", ChatBody: "messages", DetokenizeBody: "tokens"}
        schema["required"] = [required[body]] if body in required else []
        content = {"application/json": {"schema": schema}}
        extra["requestBody"] = {"required": True, "content": content}
    if "{name" in path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        extra["parameters"] = [name]
    kind = "text/plain" if path == "/metrics" else "application/json"
    content = {kind: {"schema": {}}}
    if path in ("/v1/completions", "/v1/chat/completions"):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    extra["responses"] = {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "An error.", "content": {"application/json": {"schema": {}}}},
    }
    return extra


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    def answer(error: HttpError) -> Response:
        service.metrics.failed(error.status)
        headers = {key.decode(): val.decode() for key, val in error.headers()}
        return JSONResponse(error.body(), error.status, headers)

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        return answer(error)

    async def on_bad_request(_: Request, error: Exception) -> Response:
        assert isinstance(error, BadRequest)
        return answer(HttpError(400, str(error), error.param))

    async def on_refusal(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed: %s", request.method, request.url.path, error)
        return answer(HttpError(500, str(error)))

    async def on_fault(_: Request, error: Exception) -> Response:
        # Logged and counted by the guard, to which the framework passes it on.
        fault = HttpError(500, "internal error; see the server's log")
        return JSONResponse(fault.body(), fault.status)

    async def on_no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:200]
        # `/chat/completions` and `/v1/v1/completions` come of a base URL without or with `/v1`.
        known = [route.path for route in app.routes if isinstance(route, APIRoute)]
        close = difflib.get_close_matches(path, known, 1, 0.8) if error.status_code == 404 else []
        hint = f"; did you mean {close[0]}?" if close else ""
        message = f"{error.detail}: {request.method} {path}{hint}"
        response = answer(HttpError(error.status_code, message))
        response.headers.update(error.headers or {})  # `Allow`, with a 405
        return response

    async def on_gone(_: Request, error: Exception) -> Response:
        service.metrics.disconnected()
        # Nobody reads this; 499 is how proxies log a client that went away.
        return Response(status_code=499)

    app.add_exception_handler(HttpError, on_http_error)
    app.add_exception_handler(BadRequest, on_bad_request)
    app.add_exception_handler(MoeserveError, on_refusal)
    app.add_exception_handler(Exception, on_fault)
    app.add_exception_handler(HTTPException, on_no_route)
    app.add_exception_handler(generate.ClientGoneError, on_gone)


async def _health(_: Request, service: Service) -> Response:
    status = service.status if service.status != "ready" or service.is_healthy() else "failed"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


async def _version(_: Request, service: Service) -> Response:
    return JSONResponse({"version": __version__, "source": service.source})


async def _metrics(_: Request, service: Service) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _card(name: str, service: Service) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moeserve",
        "root": service.config.engine.model,
        "parent": None,
        "max_model_len": service.context.info.max_model_len,
    }


async def _models(_: Request, service: Service) -> Response:
    cards = [_card(name, service) for name in service.config.served_names]
    return JSONResponse({"object": "list", "data": cards})


async def _model(request: Request, service: Service) -> Response:
    given = request.path_params["name"]
    if not given:  # `/v1/models/`: clients that put a slash at the end of every address
        return await _models(request, service)
    return JSONResponse(_card(service.check_model(given), service))


async def _backends(_: Request, service: Service) -> Response:
    return JSONResponse(service.context.info.backends)


async def _evidence(_: Request, service: Service) -> Response:
    return JSONResponse(await service.engine.profile())


async def _tokenize(request: Request, service: Service) -> Response:
    async def read(body: TokenizeBody) -> Response:
        return JSONResponse(await _tokens_of(body, service))

    return await generate.with_body(request, service, TokenizeBody, read)


async def _tokens_of(body: TokenizeBody, service: Service) -> dict[str, object]:
    service.check_model(body.model)
    tokenizer = service.context.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("prompt: want either prompt or messages", "prompt")
    if body.messages is not None:
        ids = await generate.chat_ids(body, service)
    else:
        adds_special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt or "", adds_special)
    return {
        "count": len(ids),
        "max_model_len": service.context.info.max_model_len,
        "tokens": ids,
        "token_strs": [_token_string(tokenizer, i) for i in ids]
        if body.return_token_strs
        else None,
    }


def _token_string(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


async def _detokenize(request: Request, service: Service) -> Response:
    async def read(body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        if not isinstance(body.tokens, list):
            raise BadRequest("tokens: want an array of token ids", "tokens")
        # In a thread: a body can hold millions.
        text = await asyncio.to_thread(
            _checked_text, body.tokens, service.context, bool(body.skip_special_tokens)
        )
        return JSONResponse({"prompt": text})

    return await generate.with_body(request, service, DetokenizeBody, read)


def _checked_text(ids: list[object], context: ModelContext, skips_special: bool) -> str:
    return context.tokenizer.decode(
        check_token_ids(ids, context.info.vocab_size, "tokens"), skips_special
    )


async def _tokenizer_info(_: Request, service: Service) -> Response:
    tokenizer = service.context.tokenizer
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
    return JSONResponse(
        {
            **names,
            **tokenizer.names,
            "chat_template": tokenizer.chat_template or None,
            "vocab_size": service.context.info.vocab_size,
        }
    )
