"""Entry point: `evalsuite ...`, or `python -m evalsuite ...`.

Receives argv, returns the exit status. The command line itself is `cli.py`; it takes a quarter of a
second to load, and Ctrl-C is an interrupt from the first of them on.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Load the command line and run one command."""
    try:
        from evalsuite import cli
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 2  # verdict.EXIT_INTERRUPTED, which is not loaded yet
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
