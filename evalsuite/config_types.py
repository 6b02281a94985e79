"""Types of one value: numbers with their limits, and the mappings inside a config.

Used by `config.py`, which holds the keys; the texts of the messages for other faults are
`config_faults.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

EngineName = str
GateName = Literal["threshold", "statistical", "paired", "equal"]
EvidenceLevel = Literal["declared", "logged", "executed"]

# Seeds are 63-bit in every engine's sampler.
MAX_SEED = 2**63 - 1


# From here on the digits are too many to be read.
_LONGEST = 10**19


def _plain(value: float) -> str:
    """A whole number with all its digits, so that it can be written as it is shown."""
    return str(int(value)) if value == int(value) and abs(value) < _LONGEST else f"{value:g}"


def between(low: float, high: float, remedy: str = "") -> AfterValidator:
    """Check low <= value <= high; NaN fails as every comparison with it does."""

    def check(value: float | None) -> float | None:
        if value is None or low <= value <= high:
            return value
        if math.isnan(value) or math.isinf(value):
            raise ValueError(f"{value} cannot be meant; give a finite number")
        has_top = high < FINITE
        limit = f"from {_plain(low)} to {_plain(high)}" if has_top else f"at least {_plain(low)}"
        raise ValueError(f"{_plain(value)} is out of range; it must be {limit}{remedy}")

    return AfterValidator(check)


# Below it a number above 1 is as well a slip of the finger: 1.2 is no likely way to write 1.2 %.
_LEAST_PER_CENT = 2.0


def fraction(value: float) -> float:
    """Check a share of 1, and recognise per cent."""
    if math.isnan(value) or math.isinf(value):
        raise ValueError(f"{value} cannot be meant; give a fraction of 1 such as 0.88")
    if 1 < value < _LEAST_PER_CENT:
        raise ValueError(f"{value:g} is above 1; give a fraction from 0 to 1 (93 % is 0.93)")
    if 1 < value <= 100:
        raise ValueError(f"{value:g} looks like per cent; write {value / 100:g}")
    if not 0 <= value <= 1:
        raise ValueError(f"{value:g} is no share of the questions; give a fraction from 0 to 1")
    return value


# The largest finite float: "at least LOW, and finite".
FINITE = 1.7976931348623157e308
Fraction = Annotated[float, AfterValidator(fraction)]
Count = Annotated[int, between(1, 10_000_000)]
Seconds = Annotated[float, between(1e-3, 7 * 86400, " seconds")]


class Strict(BaseModel):
    """Frozen, unknown keys forbidden, no value converted into another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ExpectBackend(Strict):
    """The MoE backend a config was written for, and how strongly it must be shown.

    `level` orders as declared < logged < executed; see `evidence.py`.
    """

    name: Annotated[str, Field(min_length=1)]
    level: EvidenceLevel = "logged"


class Gate(Strict):
    """How the score becomes PASS or FAIL. A bare string in YAML is the `name`.

    Attributes:
        name: Which gate.
        alpha: False-alarm rate.
        power: Rate at which the smallest detectable drop is seen.
        max_repeats: Repeats on the warm server, at most.
        max_drop: Largest true drop that is still acceptable, None for none.
        early_end: End the questions once the gate is sure to fail; see `early_end.py`.
    """

    name: GateName = "threshold"
    alpha: Annotated[float, between(1e-9, 0.5)] = 0.05
    power: Annotated[float, between(0.5, 0.999999)] = 0.8
    max_repeats: Annotated[int, between(1, 1000)] = 1
    max_drop: Fraction | None = None
    early_end: bool = True


class Calibration(Strict):
    """Noise of this configuration as `evalsuite calibrate` measured it.

    Attributes:
        sigma_run: Standard deviation of the accuracy between runs, as a fraction.
        discordant: Share of questions on which two runs disagree.
        repeats: Runs measured.
        num_questions: Questions per run.
        hardware: Where it was measured.
        date: When, as text.
    """

    sigma_run: Fraction
    discordant: Fraction
    repeats: Count
    num_questions: Count
    hardware: str = ""
    date: str = ""


class Provenance(Strict):
    """Where the threshold comes from. A bare string in YAML is the `source`.

    Attributes:
        source: Who measured it.
        note: What a reader should know about it.
        num_questions: The number of questions it was made for, None for the whole test set.
    """

    source: str = ""
    note: str = ""
    num_questions: Count | None = None

    def __str__(self) -> str:
        """Source and note in one line, "" if there is neither."""
        return "; ".join(part for part in (self.source, self.note) if part)

    def __bool__(self) -> bool:
        """Whether anything is said."""
        return bool(str(self))
