"""Two health checks of the field's configs, beside the accuracy.

`startup_rpc_checks` are called once the server is ready; `min_acceptance_length` is read from
the server's metrics after the questions (speculative decoding: 1 + accepted / drafts).
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from evalsuite.errors import ServerError
from evalsuite.readiness import connection_to, get

_RPC_TIMEOUT_S = 120.0
_COUNTERS = {
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
}


@dataclass(frozen=True)
class DraftCounters:
    """Counters of speculative decoding since the server's start."""

    accepted: float = 0.0
    drafts: float = 0.0

    def acceptance_length_since(self, before: DraftCounters) -> float | None:
        """Tokens per step since `before`, None where nothing was drafted."""
        drafts = self.drafts - before.drafts
        return 1.0 + (self.accepted - before.accepted) / drafts if drafts > 0 else None


def call_rpc_checks(base_url: str, names: Sequence[str], api_key: str = "") -> None:
    """Call each check on every worker.

    Raises:
        ServerError: A check that does not answer 200; names it and the answer.
    """
    path = urlsplit(base_url).path.rstrip("/") + "/collective_rpc"
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    for name in names:
        connection = connection_to(base_url, _RPC_TIMEOUT_S)
        body = json.dumps({"method": name})
        try:
            connection.request("POST", path, body, headers)
            reply = connection.getresponse()
            status, text = reply.status, reply.read(2000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"ready: startup_rpc_checks {name}: {error}") from error
        finally:
            connection.close()
        if status != 200:
            raise ServerError(f"ready: startup_rpc_checks {name} answers {status}: {text[:300]}")


def read_draft_counters(base_url: str, api_key: str = "") -> DraftCounters:
    """Read `/metrics`; zeros where the server has no such counters.

    Raises:
        ServerError: `/metrics` does not answer.
    """
    try:
        status, body = get(base_url, "/metrics", timeout_s=10.0, api_key=api_key)
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"evaluation: /metrics for min_acceptance_length: {error}") from error
    if status != 200:
        raise ServerError(f"evaluation: /metrics for min_acceptance_length answers {status}")
    text = body.decode("utf-8", "replace")
    return DraftCounters(**{key: _sum(text, name) for key, name in _COUNTERS.items()})


def _sum(text: str, name: str) -> float:
    """Sum of a counter over its labels (one per engine)."""
    pattern = rf"^{re.escape(name)}(?:\{{[^}}\n]*\}})? ([0-9.eE+-]+)\s*$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def acceptance_fault(length: float | None, least: float) -> str:
    """Why the acceptance length fails the job, "" where it does not."""
    if length is None:
        return (
            f"min_acceptance_length {least:g} is asked for and the server drafted nothing; "
            "is speculative decoding on?"
        )
    return "" if length >= least else f"acceptance length {length:.3f} is below {least:g}"
