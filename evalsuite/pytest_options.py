"""The options of `pytest evalsuite`, and the request that they are.

Receives pytest's parser, later its config; returns a `RunRequest`. They exist only in runs that
name the package (`plugin.py`); what is done with the request is `pytest_run.py`.
"""

from __future__ import annotations

import pytest

from evalsuite.session import RunRequest


def add_options(parser: pytest.Parser) -> None:
    """Declare the options of `pytest evalsuite`."""
    group = parser.getgroup("evalsuite", "accuracy evaluation of MoE servers")
    add = group.addoption
    add("--config", action="append", default=[], metavar="LIST", help="List or YAML; repeatable.")
    add("--engine", default="", help="Engine in place of the files' own.")
    add("--base-url", default="", help="Evaluate this running server; nothing is started.")
    add("--pool", default="", help="Pool in place of the lists' own.")
    add("--limit", type=int, default=None, metavar="N", help="Ask only the first N questions.")
    add("--shard", default="", metavar="I/N", help="Run the i-th of n parts.")
    add("--durations-file", default="", metavar="FILE", help="Recorded durations, for --shard.")
    add("--record-durations", default="", metavar="FILE", help="Add this run's durations to FILE.")
    add("--results", default="results", metavar="DIR", help="Folder for run folders.")
    add("--configs-root", default="", metavar="DIR", help="Folder of the suites.")
    add("--data-dir", default="", metavar="DIR", help="Folder of data files.")
    add("--baselines", default="baselines", metavar="DIR", help="Approved baselines.")
    add("--stop-grace", type=float, default=10.0, metavar="S", help="From TERM to KILL.")
    add("--no-early-end", action="store_true", help="Ask all questions of a job sure to fail.")
    add("--dry-run", action="store_true", help="Check and list the jobs; start nothing.")


def request_of(config: pytest.Config) -> RunRequest:
    """The options of this run, as `evalsuite run` has them."""
    get = config.getoption
    return RunRequest(
        configs=tuple(get("--config")),
        root=get("--configs-root"),
        engine=get("--engine"),
        base_url=get("--base-url"),
        pool=get("--pool"),
        limit=get("--limit"),
        shard=get("--shard"),
        durations=get("--durations-file"),
        recorded=get("--record-durations"),
        results=get("--results"),
        data_dir=get("--data-dir"),
        baselines=get("--baselines"),
        grace_s=get("--stop-grace"),
        ends_early=not get("--no-early-end"),
    )
