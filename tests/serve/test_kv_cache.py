from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.engine.config import EngineConfig
from moeserve.engine.engine import Engine
from moeserve.engine.kv_cache import NULL_PAGE, PagePool, page_keys
from moeserve.errors import OutOfPages, UsageError


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(5, 4)
    assert NULL_PAGE not in pool.allocate(4)
    assert pool.num_available == 0
    assert pool.num_used == 4


def test_too_many_pages_are_refused_and_nothing_is_taken() -> None:
    pool = PagePool(5, 4)
    with pytest.raises(OutOfPages, match="5 KV pages wanted, 4 available"):
        pool.allocate(5)
    assert pool.num_available == 4
    with pytest.raises(OutOfPages):
        PagePool(1, 4)


@pytest.mark.parametrize("change", [{"kv_cache_memory_bytes": 10}, {"num_pages": 1}])
def test_a_cache_that_holds_no_token_is_refused(change: dict[str, Any]) -> None:
    config = EngineConfig(
        model="minigsm-tiny", load_format="dummy", hf_overrides={"num_hidden_layers": 1},
        device="cpu", **change,
    )  # fmt: skip
    (name, value), *_ = change.items()
    flag = {"num_pages": "num_gpu_blocks_override"}.get(name, name)
    with pytest.raises(UsageError, match=f"{flag}={value}.*KV pages hold no token; at least 2"):
        Engine(config)


def test_fresh_pages_are_consecutive_and_returned_ones_come_again_first() -> None:
    pool = PagePool(100, 4)
    first = pool.allocate(3)
    assert first == [1, 2, 3]
    pool.release(first)
    assert pool.allocate(3) == [1, 2, 3]


def test_keys_name_all_tokens_before_their_end() -> None:
    tokens = list(range(12))
    keys = page_keys(tokens, 4)
    assert len(keys) == 3
    assert len(page_keys(tokens[:11], 4)) == 2
    assert page_keys(tokens[:8], 4) == keys[:2]
    # The same four tokens behind another first page are another content.
    assert page_keys([9, *tokens[1:]], 4)[1] != keys[1]
    assert page_keys(tokens[4:], 4)[0] != keys[1]
    # A chain may be continued from its parent.
    assert page_keys(tokens[4:], 4, keys[0]) == keys[1:]


def test_published_pages_are_found_shared_and_survive_their_owner() -> None:
    pool = PagePool(10, 4)
    keys = page_keys(list(range(12)), 4)
    pages = pool.allocate(3)
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    assert pool.match(keys) == pages
    assert pool.match([keys[0], b"other", keys[2]]) == pages[:1]
    pool.share(pages[:2])
    pool.release(pages)
    assert pool.num_used == 2
    assert pool.match(keys) == pages  # the third is idle, not gone
    assert pool.num_idle(pages) == 1
    pool.release(pages[:2])
    assert pool.num_used == 0
    assert pool.match(keys) == pages


def test_idle_content_is_evicted_oldest_first_and_from_the_end_of_a_chain() -> None:
    pool = PagePool(7, 4)
    chains = []
    for start in (0, 100):
        keys = page_keys(list(range(start, start + 12)), 4)
        pages = pool.allocate(3)
        for page, key in zip(pages, keys, strict=True):
            pool.publish(page, key)
        pool.release(pages)
        chains.append((keys, pages))
    old, new = chains
    pool.allocate(1)
    assert pool.match(old[0]) == old[1][:2]
    assert pool.match(new[0]) == new[1]
    pool.allocate(2)
    assert pool.match(old[0]) == []
    assert pool.match(new[0]) == new[1]


def test_the_first_page_of_a_content_keeps_it() -> None:
    pool = PagePool(5, 4)
    key = page_keys([1, 2, 3, 4], 4)[0]
    first, second = pool.allocate(2)
    pool.publish(first, key)
    pool.publish(second, key)
    pool.release([second])
    assert pool.match([key]) == [first]


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(5, 4, has_caching=False)
    key = page_keys([1, 2, 3, 4], 4)[0]
    pages = pool.allocate(1)
    pool.publish(pages[0], key)
    assert pool.match([key]) == []
    pool.release(pages)
    assert pool.num_available == 4


def test_dropping_the_cache_forgets_content_and_keeps_owners() -> None:
    pool = PagePool(5, 4)
    keys = page_keys(list(range(8)), 4)
    kept, idle = pool.allocate(2)
    pool.publish(kept, keys[0])
    pool.publish(idle, keys[1])
    pool.release([idle])
    pool.drop_cache()
    assert pool.match(keys) == []
    assert pool.num_used == 1
    assert pool.unreferenced([kept, idle]) == [idle]
    assert sorted([*pool.allocate(3), kept]) == [1, 2, 3, 4]


def test_a_page_given_back_twice_is_noticed() -> None:
    pool = PagePool(5, 4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_no_page_is_lost_or_held_twice(steps: list[tuple[int, int]]) -> None:
    pool = PagePool(12, 2)
    held: list[list[int]] = []
    for number, (action, size) in enumerate(steps):
        if action == 0 and size <= pool.num_available:
            pages = pool.allocate(size)
            owned = {page for other in held for page in other}
            assert not owned & set(pages)
            for page, key in zip(pages, page_keys([number] * 2 * size, 2), strict=True):
                pool.publish(page, key)
            held.append(pages)
        elif action == 1 and held:
            pool.release(held.pop(size % len(held)))
        elif action == 2 and held:
            pages = held[size % len(held)]
            pool.share(pages)
            held.append(list(pages))
        elif action == 3 and size == 0:
            pool.drop_cache()
        assert pool.num_used == len({page for pages in held for page in pages})
        assert pool.num_used + pool.num_available == 11
    for pages in held:
        pool.release(pages)
    assert pool.num_available == 11
