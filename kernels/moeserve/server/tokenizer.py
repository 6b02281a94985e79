"""Text ↔ token ids, by the model folder's `tokenizer.json`.

Receives a model folder; returns a `Tokenizer` that encodes text and knows the exact bytes of every
token, which makes decoding a table look-up that is right at any token border. Streaming on top of
the bytes is `text.py`; chat templates are `chat.py`.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from moeserve.errors import Unsupported, UsageError

_META_SPACE = "▁"
# Not final: bytes of a character whose rest is missing are kept back.
_utf8 = codecs.getincrementaldecoder("utf-8")


class Encoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        """Encode without offsets; each result has `ids`."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """What the HTTP side knows of a model's tokens.

    Attributes:
        encoder: Text → ids; None where the model has no tokenizer (then text is its UTF-8 bytes).
        table: Bytes of each id.
        special_ids: Ids that `skip_special_tokens` leaves out.
        names: Strings of `tokenizer_config.json`: bos_token, eos_token, pad_token, ...
        chat_template: The model's template, "" if it has none.
        strips_leading_space: A whole text loses one leading blank (SentencePiece).
    """

    encoder: Encoder | None
    table: tuple[bytes, ...]
    special_ids: frozenset[int] = frozenset()
    names: dict[str, object] = field(default_factory=dict)
    chat_template: str = ""
    strips_leading_space: bool = False

    @cached_property
    def longest_chars(self) -> int:
        """No token stands for more characters than this (a normaliser may drop some: twice)."""
        return 2 * max(map(len, self.table), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; thread-safe, releases the interpreter while it works."""
        if self.encoder is None:
            return list(text.encode("utf-8"))
        encoded = self.encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of a token; empty for a skipped one and for a padding id."""
        if skip_special_tokens and token_id in self.special_ids:
            return b""
        return self.table[token_id] if token_id < len(self.table) else b""

    def decode(self, ids: list[int] | tuple[int, ...], skip_special_tokens: bool = True) -> str:
        """Return a whole text; an incomplete character at its end is left out."""
        table, size = self.table, len(self.table)
        left_out = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join([table[i] for i in ids if i < size and i not in left_out])
        if self.strips_leading_space and raw.startswith(b" "):
            raw = raw[1:]
        return _utf8("replace").decode(raw)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model folder.

    Raises:
        Unsupported: No `tokenizer.json`, or a decoder whose tokens have no fixed bytes.
        UsageError: A file that is broken; names it.
    """
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise Unsupported(f"{path}: missing; a model is served with its tokenizer.json")
    text, document = _json_object(path)
    try:
        encoder = HuggingFaceTokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise UsageError(f"{path}: not a tokenizer: {error}") from None
    encoder.no_truncation()
    encoder.no_padding()
    added = {int(item["id"]): item for item in document.get("added_tokens", [])}
    kind = _decoder_kind(document.get("decoder"), path)
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        is_plain = token_id not in added
        table[token_id] = _byte_level(token) if kind == "bytes" else _meta_space(token, is_plain)
    names, template = _read_config(folder)
    return Tokenizer(
        encoder=encoder,
        table=tuple(table),
        special_ids=frozenset(key for key, item in added.items() if item.get("special")),
        names=names,
        chat_template=template,
        strips_leading_space=kind == "metaspace",
    )


def _json_object(path: Path) -> tuple[str, dict[str, Any]]:
    """Return a file's text and the object in it."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected an object, got {type(document).__name__}")
    return text, document


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return the stand-in for a preset without a folder: text is sent as its UTF-8 bytes.

    Ids beyond the bytes show as one printable character each, so that random weights give text.
    """
    table = [bytes([i]) if i < 256 else bytes([33 + i % 94]) for i in range(vocab_size)]
    return Tokenizer(encoder=None, table=tuple(table))


def _decoder_kind(decoder: dict[str, Any] | None, path: Path) -> str:
    parts = (decoder or {}).get("decoders") or [decoder or {}]
    kinds = {part.get("type") for part in parts}
    if kinds == {"ByteLevel"}:
        return "bytes"
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {
        "ByteFallback",
        "Metaspace",
    }:
        return "metaspace"
    raise Unsupported(f"{path}: decoder {sorted(map(str, kinds))}: want ByteLevel or ByteFallback")


def _byte_alphabet() -> dict[str, int]:
    """Map the 256 characters by which byte-level BPE writes bytes (GPT-2's table)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in set(kept)]
    alphabet = {chr(byte): byte for byte in kept}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(moved)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return token.encode("utf-8")


def _meta_space(token: str, is_plain: bool) -> bytes:
    if is_plain and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_META_SPACE, " ").encode("utf-8")


def _read_config(folder: Path) -> tuple[dict[str, object], str]:
    """Return the strings of `tokenizer_config.json` and the chat template."""
    names: dict[str, object] = {}
    template: object = ""
    path = folder / "tokenizer_config.json"
    if path.is_file():
        _, config = _json_object(path)
        for name, value in config.items():
            if name == "chat_template":
                template = _default_template(value)
            elif isinstance(value, dict) and isinstance(value.get("content"), str):
                names[name] = value["content"]
            elif value is None or isinstance(value, (str, int, float, bool)):
                names[name] = value
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        template = beside.read_text(encoding="utf-8")
    return names, template if isinstance(template, str) else ""


def _default_template(value: object) -> object:
    """Pick the template named "default" where a model has several."""
    if not isinstance(value, list):
        return value
    named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    return named.get("default", "")
