"""Small shared pieces of the reports: clean text, number formats, table cells.

Receives values of a verdict, returns text every format can hold.
"""

from __future__ import annotations

import re

from evalsuite.verdict import Status, Verdict

# XML 1.0 allows only these below the surrogates; everything else is shown as #xNN, the form
# that pytest's own JUnit writer uses.
_ILLEGAL = re.compile("[^\u0009\u000a\u000d\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def visible(text: str) -> str:
    """Replace characters that no XML, HTML or UTF-8 file can hold by `#xNN`."""
    return _ILLEGAL.sub(lambda match: f"#x{ord(match.group()):02X}", text)


def percent(value: float | None, digits: int = 2) -> str:
    """Render a fraction as per cent, "-" where there is none."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def points(value: float | None, digits: int = 1) -> str:
    """Render a difference of fractions as points, "-" where there is none."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def rate(value: float | None) -> str:
    """Render an error rate; the small ones as a power of ten."""
    if value is None:
        return "-"
    return f"{100 * value:.3g} %" if value >= 1e-4 else ("0" if value == 0 else f"{value:.0e}")


def follow_up(verdict: Verdict) -> list[str]:
    """What the next step needs: the server's command and log, and how to run the job again."""
    if verdict.status is Status.PASS:
        return []
    detail = verdict.detail
    places = {
        "server command": detail.get("server_command"),
        "server log": detail.get("server_log"),
        "reproduce": verdict.reproduce,
    }
    return [f"{name}: {visible(str(text))}" for name, text in places.items() if text]


def accuracy_cell(verdict: Verdict) -> str:
    """Accuracy as printed in every table; truncation and empties stand beside it."""
    if verdict.accuracy is None:
        return "-"
    text = f"{verdict.accuracy:.4f}"
    result = verdict.result
    if result is None:
        return text
    flags = [
        f"{count} {name}"
        for count, name in (
            (result.num_truncated, "cut"),
            (result.num_empty, "empty"),
            (result.num_failed, "missing"),
        )
        if count
    ]
    return f"{text} ({', '.join(flags)})" if flags else text


def interval_cell(verdict: Verdict) -> str:
    """95 % interval, "-" where there is none."""
    if verdict.interval is None:
        return "-"
    return f"{verdict.interval[0]:.4f} to {verdict.interval[1]:.4f}"


def backend_cell(verdict: Verdict) -> str:
    """Observed backend; what was declared where nothing was observed."""
    evidence = verdict.evidence
    if evidence.observed:
        return evidence.observed
    return f"{evidence.declared} (declared)" if evidence.declared else "-"


def asked_cell(verdict: Verdict) -> str:
    """Requested backend, "auto" where the server chose."""
    return verdict.evidence.declared or "auto"


def margin_cell(verdict: Verdict) -> str:
    """Distance from the floor in standard errors, with its sign."""
    return "-" if verdict.margin_se is None else f"{verdict.margin_se:+.1f} SE"


def speed_cell(verdict: Verdict) -> str:
    """Questions per second of this run; answers kept from an earlier one are left out."""
    result = verdict.result
    if result is None or result.duration_s <= 0:
        return "-"
    asked = sum(
        outcome is not None for outcomes in result.per_question.values() for outcome in outcomes
    )
    fresh = (asked or result.num_answered) - result.reused
    return f"{fresh / result.duration_s:.1f}" if fresh > 0 else "-"
