"""Answers counted in the order of asking, up to the first question that is still open.

Receives outcomes as they arrive, gives two counts. Answers that arrive first are the short ones;
a test that looks at a run while it goes on would be led astray by them.
"""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[int, int]  # question index, repeat


class Settled:
    """The longest settled beginning of a run."""

    def __init__(self, keys: Sequence[Key]) -> None:
        """Take the (index, repeat) of every question, in the order of asking."""
        self._keys = keys
        self._outcomes: dict[Key, bool | None] = {}
        self._next = 0
        self.num_right = 0
        self.num_wrong = 0

    def note(self, key: Key, is_right: bool | None) -> None:
        """Take note of one outcome, None for a question that has no answer and will have none."""
        self._outcomes[key] = is_right
        while self._next < len(self._keys) and self._keys[self._next] in self._outcomes:
            outcome = self._outcomes[self._keys[self._next]]
            self.num_right += outcome is True
            self.num_wrong += outcome is False
            self._next += 1
