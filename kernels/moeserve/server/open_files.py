"""Open files of the server process: as many as the system lets it have, and a calm log without.

Every connection is an open file. The usual limit of 1,024 is less than evaluators open at once, and
a process may raise it by itself up to a second one. Used by `launch.py`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from typing import Any

logger = logging.getLogger("moeserve.server")
# Some systems have no second limit; no more connections than this are meant to be served.
_MOST_FILES = 65_536
_NONE_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_LOG_INTERVAL_S = 10.0


def raise_file_limit() -> int:
    """Raise this process's limit on open files as far as it may; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class LoopErrors:
    """What the event loop reports: a connection that cannot be accepted is said now and then.

    The loop tries again for each place in the backlog, and would write a traceback for each: tens
    of megabytes a second, while nothing else runs.
    """

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log one fault; an event loop's exception handler."""
        error = context.get("exception")
        if "_start_serving" in context.get("message", ""):
            return  # a second try, a second later, on a socket that was closed meanwhile
        if not (isinstance(error, OSError) and error.errno in _NONE_LEFT and "socket" in context):
            loop.default_exception_handler(context)
            return
        if time.monotonic() < self._silent_until:
            return
        self._silent_until = time.monotonic() + _LOG_INTERVAL_S
        logger.error(
            "no further connection can be accepted: %s (at most %d open files: ulimit -Hn)",
            error.strerror,
            self._max_files,
        )
