"""Single fields of a request, read with their bounds.

Receives a value as it was sent; returns it typed, or raises `BadRequest` with the field's name.
What the fields mean together is `params.py`.
"""

from __future__ import annotations

from moeserve.errors import BadRequest
from moeserve.server.limits import Limits
from moeserve.server.protocol import SamplingBody, shorten


def bounded(given: int | None, name: str, low: int, high: int, otherwise: int) -> int:
    """Return a whole number, or `otherwise` where none was sent; refuse it out of bounds."""
    value = otherwise if given is None else given
    if not low <= value <= high:
        raise BadRequest(f"{name}: want {low} to {high}, got {shorten(value)}", name)
    return value


def read_stream_options(body: SamplingBody) -> dict[str, bool]:
    """Return the stream options that were sent."""
    options = body.stream_options
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options: want an object", "stream_options")
    if not body.stream:
        raise BadRequest("stream_options: only with stream", "stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise BadRequest(f"stream_options.{shorten(name)}: unknown field", "stream_options")
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"stream_options.{name}: want a boolean", "stream_options")
    if options.get("include_obfuscation"):
        raise BadRequest("stream_options.include_obfuscation: not implemented", "stream_options")
    return {name: bool(value) for name, value in options.items()}


def read_stops(given: object, limits: Limits) -> tuple[str, ...]:
    """Return the stop strings, each once."""
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list):
        raise BadRequest(
            f"stop: want a string or an array of strings, got {shorten(given)}", "stop"
        )
    if len(stops) > limits.max_stop:
        raise BadRequest(f"stop: at most {limits.max_stop} strings, got {len(stops)}", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise BadRequest(f"stop: want non-empty strings, got {shorten(stop)}", "stop")
        if len(stop) > limits.max_stop_chars:
            raise BadRequest(
                f"stop: at most {limits.max_stop_chars} characters, got {len(stop)}", "stop"
            )
    return tuple(dict.fromkeys(stops))


def read_stop_token_ids(given: object, vocab_size: int, limits: Limits) -> tuple[int, ...]:
    """Return the stop token ids."""
    if given is None:
        return ()
    name, most = "stop_token_ids", limits.max_stop
    if not isinstance(given, list) or len(given) > most:
        raise BadRequest(f"{name}: want an array of at most {most} token ids", name)
    for token_id in given:
        check_token_id(token_id, vocab_size, name)
    return tuple(given)


def read_logit_bias(given: object, vocab_size: int, limits: Limits) -> dict[int, float]:
    """Return the bias of each token id."""
    if given is None:
        return {}
    name, most = "logit_bias", limits.max_logit_bias
    if not isinstance(given, dict) or len(given) > most:
        raise BadRequest(f"{name}: want an object of at most {most} entries", name)
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12):
            raise BadRequest(f"{name}: want token ids as keys, got {shorten(key)}", name)
        check_token_id(int(key), vocab_size, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadRequest(f"{name}: want numbers as values, got {shorten(value)}", name)
        if not -100 <= value <= 100:
            raise BadRequest(f"{name}: want values from -100 to 100, got {shorten(value)}", name)
        bias[int(key)] = float(value)
    return bias


def check_token_ids(given: list[object], vocab_size: int, name: str) -> list[int]:
    """Return ids of the vocabulary, or raise `BadRequest` naming the first that is none."""
    # The usual case in a few passes at the speed of C; a body can hold millions.
    if set(map(type, given)) <= {int}:
        ids: list[int] = given  # type: ignore[assignment]
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            return ids
    return [check_token_id(token_id, vocab_size, name) for token_id in given]


def check_token_id(token_id: object, vocab_size: int, name: str) -> int:
    """Return an id of the vocabulary, or raise `BadRequest`."""
    if type(token_id) is not int:
        raise BadRequest(f"{name}: want token ids, got {shorten(token_id)}", name)
    if not 0 <= token_id < vocab_size:
        raise BadRequest(
            f"{name}: token id {shorten(token_id)} is outside the vocabulary of {vocab_size}", name
        )
    return token_id
