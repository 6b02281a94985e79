"""When a failed attempt is repeated, and after which pause.

Receives statuses, attempt numbers and `Retry-After` headers, returns decisions. Who sends the
attempts is `client.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    """How failed attempts are repeated.

    Attributes:
        max_retries: Attempts after the first.
        base_s: First pause; doubled each time, then drawn between half and all of it.
        cap_s: Longest pause of our own choosing.
        retry_after_cap_s: Longest pause a server may ask for.
    """

    max_retries: int = 3
    base_s: float = 0.5
    cap_s: float = 8.0
    retry_after_cap_s: float = 30.0

    def pause_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Pause before the attempt after the 0-based `attempt`."""
        if retry_after_s is not None:
            return min(max(retry_after_s, 0.0), self.retry_after_cap_s)
        return min(self.cap_s, self.base_s * 2.0**attempt) * random.uniform(0.5, 1.0)


def is_retriable(status: int) -> bool:
    """Whether the same request may fare better a little later."""
    return status in (408, 429) or status >= 500


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header; its date form counts as absent."""
    try:
        seconds = float(value) if value is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
