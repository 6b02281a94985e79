"""Errors of the server: what a client did wrong, what this build cannot do, what ran out."""

from __future__ import annotations


class MoeserveError(Exception):
    """Base of every error that this package raises on purpose."""


class UsageError(MoeserveError):
    """A command-line argument or environment switch that cannot be meant."""


class BadRequest(MoeserveError):
    """A request field that cannot be honoured; becomes HTTP 400.

    Attributes:
        param: Name of the field, as the client sent it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(MoeserveError):
    """A model, backend or platform that this build cannot serve; says why."""


class OutOfPages(MoeserveError):
    """The KV cache has no free page and nothing to preempt."""
