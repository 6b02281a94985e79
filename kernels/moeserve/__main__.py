"""Entry point: `moeserve MODEL ...`, and the subcommands, each imported only when it is called.

Receives argv; returns the exit status (2 for a command line that cannot be meant). Options of the
server are `args.py`; everything else belongs to the modules named in `_COMMANDS`.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from moeserve import __version__
from moeserve.errors import UsageError

if TYPE_CHECKING:
    from moeserve.args import ServeConfig

_BENCHES = {
    "serve": "moeserve.bench.serve",
    "moe": "moeserve.bench.moe",
    "router": "moeserve.bench.router",
    "startup": "moeserve.bench.startup",
    "engine": "moeserve.bench.engine",
    "compat": "moeserve.bench.compat",
    "peers": "moeserve.bench.peers",
}
# Each module has `main(argv) -> exit status`.
_COMMANDS = {"backends": "moeserve.backends_command", "repro": "moeserve.bench.repro"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"moeserve {__version__}")
        return 0
    try:
        return _dispatch(words)
    except UsageError as error:
        print(f"moeserve: {error}", file=sys.stderr)
        return 2


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else ""
    if command == "bench":
        name = words[1] if len(words) > 1 else ""
        if name not in _BENCHES:
            close = difflib.get_close_matches(name, _BENCHES, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(
                f"bench {name}".rstrip() + f": want one of {', '.join(_BENCHES)}{hint}"
            )
        return _run(_BENCHES[name], words[2:])
    if command in _COMMANDS:
        return _run(_COMMANDS[command], words[1:])
    if command == "serve":
        words = words[1:]
    from moeserve.args import parse
    from moeserve.help import help_text

    if "--help" in words or "-h" in words or not words:
        print(help_text())
        return 0 if words else 2
    return _serve(parse(words))


def _serve(config: ServeConfig) -> int:
    from moeserve.engine.process import start_engine
    from moeserve.engine.spawn import spawn_engine

    # The engine imports torch while this process imports the HTTP side.
    spawned = spawn_engine(config.engine)
    try:
        from moeserve.server.launch import serve

        return serve(config, partial(start_engine, spawned=spawned))
    finally:
        spawned.abandon()


def _run(module: str, words: list[str]) -> int:
    status: int = importlib.import_module(module).main(words)
    return status


if __name__ == "__main__":
    sys.exit(main())
