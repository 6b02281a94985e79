"""A scripted `EngineClient`, and a real HTTP server in front of it, for tests without a model.

`FakeEngine` answers each request with the ids that a function gives; `live_server` runs the HTTP
side as it is shipped (uvicorn, guard, routes) in a thread on a free port.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from moeserve.args import ServeConfig
from moeserve.engine.client import EngineInfo, EngineStats
from moeserve.engine.config import EngineConfig
from moeserve.engine.request import FinishReason, Logprob, Request, TokenEvent
from moeserve.server.chat import ChatTemplate
from moeserve.server.launch import HttpServer, listen, uvicorn_config
from moeserve.server.params import ModelContext
from moeserve.server.service import Service
from moeserve.server.tokenizer import Tokenizer, byte_tokenizer

EOS = 256
VOCAB = 300
INFO = EngineInfo(
    max_model_len=4096, vocab_size=VOCAB, eos_token_ids=(EOS,), num_pages=100, page_size=16
)


def piece_tokenizer(*pieces: str | bytes) -> Tokenizer:
    """Bytes are ids 0 to 255, 256 is a special end of text, the pieces follow."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    base = byte_tokenizer(256)
    return replace(
        base,
        table=(*base.table, b"<eos>", *raw),
        special_ids=frozenset({EOS}),
        names={"eos_token": "<eos>", "bos_token": None, "pad_token": None},
        chat_template="{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    )


def pieces_then_eos(*pieces: str | bytes) -> Callable[[Request], list[int]]:
    """A script that emits the pieces of `piece_tokenizer` in order, then ends."""
    return lambda request: [*range(EOS + 1, EOS + 1 + len(pieces)), EOS]


def logprob_of(token_id: int, num_top: int) -> Logprob:
    """A made-up log-probability that depends on the token alone."""
    top = tuple((place, -0.5 * (place + 1)) for place in range(num_top))
    return Logprob(-0.125 * (token_id % 8), 1 + token_id % 8, top)


@dataclass
class FakeEngine:
    """Answers with `respond(request)`; `EOS` in the answer ends it unless `ignore_eos`.

    Attributes:
        respond: Ids for a request; longer answers than `max_tokens` are cut.
        step_s: Pause before each token.
        delay_s: Pause before the first, by request.
        fail: Message with which a request ends, by request; "" is none.
        seen: Every request, in order of arrival.
        aborted: Ids of requests whose stream was closed before its end.
    """

    respond: Callable[[Request], Sequence[int]] = lambda request: [72, 105, EOS]
    info: EngineInfo = INFO
    step_s: float = 0.0
    delay_s: Callable[[Request], float] = lambda request: 0.0
    fail: Callable[[Request], str] = lambda request: ""
    is_alive_now: bool = True
    seen: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    stopping: asyncio.Event | None = None

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        self.seen.append(request)
        try:
            async for event in self._events(request):
                if event.finish_reason is not None:
                    self.finished.append(request.id)
                yield event
        finally:
            if request.id not in self.finished:
                self.aborted.append(request.id)

    async def _events(self, request: Request) -> AsyncIterator[TokenEvent]:
        params = request.sampling
        await asyncio.sleep(self.delay_s(request))
        prompt: tuple[Logprob | None, ...] = ()
        if params.num_prompt_logprobs is not None:
            scored = [logprob_of(i, params.num_prompt_logprobs) for i in request.prompt_ids[1:]]
            prompt = (None, *scored)
        if self.fail(request):
            message = self.fail(request)
            yield TokenEvent(request.id, finish_reason=FinishReason.ERROR, error=message)
            return
        if params.max_tokens == 0:
            yield TokenEvent(request.id, prompt_logprobs=prompt, finish_reason=FinishReason.LENGTH)
            return
        for place, token_id in enumerate(self.respond(request)):
            if self.stopping is not None and self.stopping.is_set():
                yield TokenEvent(request.id, finish_reason=FinishReason.ABORT)
                return
            await asyncio.sleep(self.step_s)
            is_stop = token_id == EOS and not params.ignore_eos
            if is_stop or token_id in params.stop_token_ids:
                reason = FinishReason.STOP
                yield TokenEvent(request.id, finish_reason=reason, stop_token_id=token_id)
                return
            is_last = place + 1 >= params.max_tokens
            scores = ()
            if params.num_logprobs is not None:
                scores = (logprob_of(token_id, params.num_logprobs),)
            yield TokenEvent(
                request.id,
                (token_id,),
                scores,
                prompt if place == 0 else (),
                FinishReason.LENGTH if is_last else None,
            )
            if is_last:
                return
        yield TokenEvent(request.id, finish_reason=FinishReason.STOP, stop_token_id=EOS)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=3, num_waiting=2, cache_usage=0.25, padding_rows=7)

    def is_alive(self) -> bool:
        return self.is_alive_now

    async def profile(self) -> dict[str, object]:
        return {"ranks": [{"kernels": {"fake": 4}}], "num_moe_layers": 4}

    async def shutdown(self, grace_s: float) -> None:
        self.stopping = self.stopping or asyncio.Event()
        if grace_s == 0:
            self.stopping.set()
        open_ids = len(self.seen) - len(self.finished) - len(self.aborted)
        for _ in range(int(grace_s / 0.01)):
            open_ids = len(self.seen) - len(self.finished) - len(self.aborted)
            if open_ids <= 0 or self.stopping.is_set():
                break
            await asyncio.sleep(0.01)
        self.stopping.set()
        self.is_alive_now = False


def config_for_tests(**server: object) -> ServeConfig:
    """A config with a name and nothing else set."""
    base = ServeConfig(engine=EngineConfig("no-folder"), served_names=("fake",), port=0)
    return replace(base, **server)  # type: ignore[arg-type]


def service_for(
    engine: FakeEngine, tokenizer: Tokenizer, config: ServeConfig | None = None
) -> Service:
    """A service that is ready."""
    config = config or config_for_tests()
    service = Service(config)
    context = ModelContext(engine.info, tokenizer, config.limits)
    template = config.chat_template or tokenizer.chat_template
    service.ready(engine, context, ChatTemplate(template, tokenizer.names, config.limits))
    return service


@contextmanager
def live_server(service: Service) -> Iterator[str]:
    """Run the HTTP side in a thread; yields its base URL."""
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = HttpServer(uvicorn_config(service))

    async def run() -> None:
        try:
            await server.serve(sockets=[sock])
        finally:
            await service.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()
