"""The parser of every command but the server's own: one line for what cannot be meant.

Receives arguments; returns argparse's namespace or raises `UsageError`, which names the command,
the value and, for a misspelt flag, the closest one. The server's flags are `flags.py`.
"""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn

from moeserve.errors import UsageError

UNKNOWN = "unrecognized arguments: "


class CommandParser(argparse.ArgumentParser):
    """Argparse without abbreviations and without a page of usage before each error."""

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=f"moeserve {command}", allow_abbrev=False, **options)
        self.command = command

    def error(self, message: str) -> NoReturn:
        """One line.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{self.command}: {message}{self._closest(message)}")

    def _closest(self, message: str) -> str:
        if not message.startswith(UNKNOWN):
            return ""
        unknown = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
        close = get_close_matches(unknown, self._option_string_actions, n=1)
        return f"; did you mean {close[0]}?" if close else f"; see moeserve {self.command} --help"
