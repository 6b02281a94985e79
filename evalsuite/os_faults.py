"""A refusal of the operating system -> one line and an exit code, of a job or of the process.

Receives an `OSError` that nothing nearer could explain; returns what to tell and whether it is
the user's to mend (4) or the machine's (75). Faults of servers and replies are data long before
they come here (`errors.py`).
"""

from __future__ import annotations

import errno
import os
import sys

from evalsuite.errors import ConfigError, EvalError, EvalsuiteError
from evalsuite.verdict import EXIT_INFRASTRUCTURE, EXIT_USAGE

# A name or a right that the command line can change.
_USERS = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
        *(errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS, errno.ENOTEMPTY, errno.EINVAL),
    }
)
_MACHINES = {
    errno.ENOSPC: "free some space, or name another folder by --results",
    errno.EDQUOT: "free some space, or name another folder by --results",
    errno.EIO: "the disk is faulty",
    errno.ESTALE: "the network file system lost it",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files",
    errno.ENOMEM: "free some memory",
}


def explain(error: OSError) -> tuple[str, int] | None:
    """The line to print and the exit code; None for what only a traceback explains."""
    place = f"{_shown(error.filename)}: " if error.filename is not None else ""
    text = error.strerror or str(error)
    if error.errno in _MACHINES:
        return f"error: {place}{text}; {_MACHINES[error.errno]}", EXIT_INFRASTRUCTURE
    if error.errno in _USERS and place:
        return f"error: {place}{text}", EXIT_USAGE
    return None


def as_error(error: OSError) -> EvalsuiteError:
    """The same as what ends one job, and not the run.

    Raises:
        OSError: What only a traceback explains.
    """
    explained = explain(error)
    if explained is None:
        raise error
    text = explained[0].removeprefix("error: ")
    return ConfigError(text) if explained[1] == EXIT_USAGE else EvalError(text)


def forget_stdout() -> None:
    """The reader of our output has gone, as `| head` does: let nothing be said about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _shown(name: object) -> str:
    text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
