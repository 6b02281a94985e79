"""Which KV page belongs to whom: a pool with reference counts and reuse by content.

The scheduler asks for pages, gives them back, and publishes full ones under the hash of all
tokens up to their end. A page nobody uses keeps its content until the room is needed, oldest
first. The memory itself belongs to the attention backend; this file only hands out numbers.
Page 0 is never handed out: padding in block tables points at it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from moeserve.errors import OutOfPages

NULL_PAGE = 0
_HASH_BYTES = 16


def page_keys(token_ids: Sequence[int], page_size: int, parent: bytes = b"") -> list[bytes]:
    """Content keys of the full pages of a sequence, each covering all tokens before its end.

    Args:
        token_ids: The tokens after the page that `parent` names.
        page_size: Tokens a page.
        parent: Key of the page before, b"" at the start of a sequence.

    Returns:
        One 16-byte key for each full page; a remainder has none.
    """
    num_pages = len(token_ids) // page_size
    raw = np.asarray(token_ids[: num_pages * page_size], dtype=np.int32).tobytes()
    width = page_size * 4
    keys = []
    for i in range(num_pages):
        digest = hashlib.blake2b(parent, digest_size=_HASH_BYTES)
        digest.update(raw[i * width : (i + 1) * width])
        parent = digest.digest()
        keys.append(parent)
    return keys


class PagePool:
    """Free list, reference counts and the content index of `num_pages` pages."""

    def __init__(self, num_pages: int, page_size: int, has_caching: bool = True) -> None:
        if num_pages < 2:
            raise OutOfPages(f"{num_pages} KV pages: one besides the padding page is needed")
        self.num_pages = num_pages
        self.page_size = page_size
        self.has_caching = has_caching
        self._ref_counts = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        # A stack, so that few pages are touched while few are needed, lowest numbers first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, unreferenced, oldest first

    @property
    def num_available(self) -> int:
        """Pages that can be handed out, idle cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages held by sequences."""
        return self.num_pages - 1 - self.num_available

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages that already hold the longest leading run of `keys`; takes no reference."""
        pages: list[int] = []
        if self.has_caching:
            for key in keys:
                page = self._by_key.get(key)
                if page is None:
                    break
                pages.append(page)
        return pages

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of `pages` count as available now and would not after `share`."""
        return sum(self._ref_counts[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Take one reference to each of `pages`, found by `match`."""
        for page in pages:
            if self._ref_counts[page] == 0:
                del self._idle[page]
            self._ref_counts[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` private pages, evicting the longest idle content where needed.

        Raises:
            OutOfPages: Fewer are available; nothing is taken.
        """
        if count > self.num_available:
            raise OutOfPages(f"{count} KV pages wanted, {self.num_available} available")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._ref_counts[page] = 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page findable; the first page of a content keeps it."""
        if self.has_caching and self._keys[page] is None and key not in self._by_key:
            self._keys[page] = key
            self._by_key[key] = page

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each page of a sequence, in the sequence's order.

        Later pages become idle first, so that a chain is evicted from its end.
        """
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] < 0:
                raise AssertionError(f"page {page} released more often than taken")
            if self._ref_counts[page] == 0:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def unreferenced(self, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that no sequence holds."""
        return [page for page in pages if self._ref_counts[page] == 0]

    def drop_cache(self) -> None:
        """Forget all content, after a step that failed or left bad values behind."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_key.clear()
        self._keys = [None] * self.num_pages

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._by_key[key]
            self._keys[page] = None
