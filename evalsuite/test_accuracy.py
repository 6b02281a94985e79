"""The one test: every job's verdict must be PASS. The run itself is the `verdict` fixture."""

from __future__ import annotations

import pytest

from evalsuite.pytest_text import explain
from evalsuite.verdict import Status, Verdict


def test_accuracy(verdict: Verdict) -> None:
    """The score passes the gate of its config."""
    if verdict.status is not Status.PASS:
        pytest.fail(explain(verdict), pytrace=False)
