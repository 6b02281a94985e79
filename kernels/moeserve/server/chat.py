"""Chat messages → prompt text, by the model's template, in a child process with bounds.

Receives messages and template variables; returns text, or raises `BadRequest` with the template's
own message. Message text is a value and never a template. It is encoded afterwards like the rest,
so the spelling of a special token inside a message becomes that token, as clients of the field
expect. The sandbox itself is `template_worker.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping

from moeserve.errors import BadRequest
from moeserve.server.limits import Limits
from moeserve.server.protocol import shorten

# Set by the server for every template; a request may not replace them.
_RESERVED = frozenset({"messages", "add_generation_prompt", "chat_template", "tools", "documents"})


class ChatTemplate:
    """Renders one model's template; its child process starts with the first use."""

    def __init__(self, template: str, names: Mapping[str, object], limits: Limits) -> None:
        self._template = template
        self._names = {key: val for key, val in names.items() if key.endswith("_token")}
        self._limits = limits
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def render(
        self,
        messages: list[dict[str, object]],
        *,
        template: str | None = None,
        variables: object = None,
        has_generation_prompt: bool = True,
        continues_last: bool = False,
    ) -> str:
        """Return the prompt of a conversation.

        Args:
            messages: As `read_messages` returns them.
            template: Replaces the model's own.
            variables: `chat_template_kwargs` of the request.
            has_generation_prompt: The prompt ends where an assistant's turn begins.
            continues_last: The prompt ends inside the last message, which is continued.

        Raises:
            BadRequest: No template, a template's own error, or a bound that was passed.
        """
        text = template or self._template
        if not text:
            raise BadRequest("messages: this model has no chat template", "messages")
        if continues_last and has_generation_prompt:
            name = "continue_final_message"
            raise BadRequest(f"{name}: contradicts add_generation_prompt", name)
        job = {
            "template": text,
            "variables": {
                **self._names,
                **_checked_variables(variables),
                "messages": messages,
                "add_generation_prompt": has_generation_prompt,
            },
            "max_chars": self._limits.max_template_chars,
        }
        rendered = await self._ask(json.dumps(job).encode() + b"\n")
        if continues_last:
            return _cut_after_last(rendered, str(messages[-1]["content"]))
        return rendered

    async def _ask(self, line: bytes) -> str:
        async with self._turn:
            try:
                # Its start is not the template's time: a busy machine may take long over it.
                child = await self._running_child()
                async with asyncio.timeout(self._limits.template_timeout_s):
                    assert child.stdin is not None
                    assert child.stdout is not None
                    child.stdin.write(line)
                    await child.stdin.drain()
                    answer = await child.stdout.readline()
            except TimeoutError:
                await self._kill()
                limit = self._limits.template_timeout_s
                raise BadRequest(
                    f"messages: the chat template took longer than {limit:g} s", "messages"
                ) from None
            except (ConnectionError, ValueError, asyncio.CancelledError):
                # Died, answered too long a line, or left half-way: its next answer is not ours.
                await self._kill()
                raise
        if not answer:
            await self._kill()
            raise BadRequest("messages: the chat template ended its process", "messages")
        reply: dict[str, str] = json.loads(answer)
        if "error" in reply:
            raise BadRequest(f"messages: the chat template failed: {reply['error']}", "messages")
        return reply["text"]

    async def _running_child(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        child = self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing is imported from the current folder, which may be the model's
            "-m",
            "moeserve.server.template_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A character is at most 12 bytes of JSON (a pair of surrogate escapes).
            limit=12 * self._limits.max_template_chars + 65536,
        )
        assert child.stdout is not None
        await child.stdout.readline()  # it says when it is ready
        return child

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()

    async def close(self) -> None:
        """End the child process."""
        await self._kill()


def _checked_variables(variables: object) -> dict[str, object]:
    if variables is None:
        return {}
    name = "chat_template_kwargs"
    if not isinstance(variables, dict):
        raise BadRequest(f"{name}: want an object", name)
    for key in variables:
        if key in _RESERVED or not key.isidentifier():
            raise BadRequest(f"{name}.{shorten(key)}: not a variable that a request may set", name)
    return variables


def _cut_after_last(rendered: str, content: str) -> str:
    """Return the prompt up to the end of the last message's text."""
    place = rendered.rfind(content.strip())
    if place < 0 or not content.strip():
        name = "continue_final_message"
        raise BadRequest(f"{name}: the template does not show the last message", name)
    return rendered[: place + len(content.strip())]
