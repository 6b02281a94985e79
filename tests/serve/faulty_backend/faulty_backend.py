"""The CPU experts with a fault, for a server under test: `--moe-backend faulty`."""

from __future__ import annotations

import os

from moeserve.moe.backends.cpu import CpuExperts
from moeserve.tiny.faults import FaultyExperts, parse_fault

VARIABLE = "MOESERVE_TEST_FAULT"
# Without the variable this raises, and the server lists the backend as broken with the reason.
BACKEND = FaultyExperts(CpuExperts(), parse_fault(os.environ[VARIABLE]))
