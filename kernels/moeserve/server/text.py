"""Tokens of one sequence → its text, piece by piece, exact at any token border.

Receives token ids as they are generated; returns the text that is certain: no half characters, and
nothing of a stop string nor of anything that may still become one. The bytes of tokens come from
`tokenizer.py`; who asks for pieces is `sequences.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.server.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text.

    Attributes:
        stops: Stop strings, none empty.
        min_tokens: Stop strings are looked for only in the text of later tokens.
        has_stop_in_output: The stop string stays in the text, and so does the token that ends it.
        skips_special: Special tokens have no text.
    """

    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    has_stop_in_output: bool = False
    skips_special: bool = True


class StopMatcher:
    """Finds the earliest-starting stop string in a text that arrives in pieces.

    The result does not depend on where the pieces are cut: a match is taken only when no stop
    string that started earlier can still be completed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(set(stops), key=len))
        self._starts = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """Take a piece; return the text that is certain, and the stop string if it was reached."""
        self._held += piece
        match = self._earliest()
        if match is not None and not self._may_start(before=match[0]):
            return self._cut(match)
        keep_from = self._first_open(0)
        if match is not None:
            keep_from = min(keep_from, match[0])
        certain, self._held = self._held[:keep_from], self._held[keep_from:]
        return certain, None

    def finish(self) -> tuple[str, str | None]:
        """Return what is left at the end: a match that was waited with, or the held text."""
        match = self._earliest()
        if match is not None:
            return self._cut(match)
        rest, self._held = self._held, ""
        return rest, None

    def _earliest(self) -> tuple[int, str] | None:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        hits = [hit for hit in found if hit[0] >= 0]
        return min(hits, key=lambda hit: hit[0]) if hits else None

    def _cut(self, match: tuple[int, str]) -> tuple[str, str]:
        certain, self._held = self._held[: match[0]], ""
        return certain, match[1]

    def _first_open(self, start: int) -> int:
        """First place from which the held text is a true beginning of a stop string."""
        held = self._held
        for place in range(max(start, len(held) - self._longest + 1), len(held)):
            if held[place] not in self._starts:
                continue
            rest = held[place:]
            if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                return place
        return len(held)

    def _may_start(self, before: int) -> bool:
        return self._first_open(0) < before


class TextStream:
    """Text of one sequence.

    Attributes:
        num_tokens: Tokens taken so far.
        num_chars: Characters decoded so far, held ones included; the offset of the next token.
        stop: The stop string that was reached, None if none was.
    """

    def __init__(
        self, tokenizer: Tokenizer, options: TextOptions, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._matcher = StopMatcher(options.stops) if options.stops else None
        self._decoder = _utf8("replace")
        # A prompt of ids may end inside a character that the first tokens complete.
        tail = b"".join(tokenizer.token_bytes(token_id, True) for token_id in prompt_ids[-4:])
        self._decoder.decode(tail)
        self.num_tokens = 0
        self.num_chars = 0
        self.stop: str | None = None

    @property
    def has_stop_in_output(self) -> bool:
        """What ends the sequence stays in the text."""
        return self._options.has_stop_in_output

    def feed(self, token_id: int) -> str:
        """Take one token; return the text that became certain."""
        raw = self._tokenizer.token_bytes(token_id, self._options.skips_special)
        piece = self._decoder.decode(raw)
        self.num_tokens += 1
        self.num_chars += len(piece)
        if self._matcher is None or self.num_tokens <= self._options.min_tokens:
            return piece
        if not piece:
            return ""
        return self._outcome(*self._matcher.feed(piece))

    def finish(self) -> str:
        """Return the text that was held back; an incomplete character is left out."""
        if self._matcher is None or self.stop is not None:
            return ""
        return self._outcome(*self._matcher.finish())

    def _outcome(self, certain: str, stop: str | None) -> str:
        if stop is not None:
            self.stop = stop
            if self._options.has_stop_in_output:
                return certain + stop
        return certain


def token_text(tokenizer: Tokenizer, token_id: int, as_id: bool = False) -> str:
    r"""Return how one token is written beside its log-probability.

    Bytes that are no whole characters are written `bytes:\xNN`, as OpenAI does, so that two
    different tokens never share a spelling because both show as a replacement character.
    """
    if as_id:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
