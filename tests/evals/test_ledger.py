from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalsuite.errors import ConfigError, EvalError
from evalsuite.ledger import Ledger, LedgerHead, LedgerRecord, encode, read_ledger

HEAD = LedgerHead("builtin", "gsm8k/script", "m", 256, 0.0, 42, ("Question",))


def record(index: int, text: str | None = "#### 18", repeat: int = 0) -> LedgerRecord:
    if text is None:
        return LedgerRecord(index, repeat, "http_error", None, "18", error="HTTP 500: x")
    return LedgerRecord(
        index,
        repeat,
        "answered",
        text,
        "18",
        scores={"numeric": "correct"},
        extracted={"numeric": "18"},
        finish_reason="stop",
        latency_s=0.25,
        retries=1,
        retry_errors=("HTTP 500: x",),
        prompt_hash=f"hash{index}",
        token_logprobs=(-0.5,),
    )


def write(path: Path, *records: LedgerRecord, head: LedgerHead = HEAD) -> None:
    with Ledger(path, head) as ledger:
        for item in records:
            ledger.add(item)


def test_records_come_back_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.jsonl"
    records = [record(0), record(1, None), replace(record(2, ""), status="empty")]
    write(path, *records)
    assert read_ledger(path) == records


def test_answers_of_a_server_with_other_arguments_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, record(0), head=replace(HEAD, server="vllm -tp 2"))
    with pytest.raises(ConfigError, match=r"other settings: server 'vllm -tp 2' .now 'vllm -tp 4'"):
        Ledger(path, replace(HEAD, server="vllm -tp 4"))
    # A ledger of a version that did not write it down is continued.
    old = tmp_path / "old.jsonl"
    write(old, record(0))
    lines = old.read_text().splitlines()
    head = json.loads(lines[0])
    del head["ledger"]["server"]
    old.write_text("\n".join([json.dumps(head), *lines[1:], ""]))
    with Ledger(old, replace(HEAD, server="vllm -tp 4")) as ledger:
        assert [kept.index for kept in ledger.records] == [0]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=50))
def test_any_text_is_safe_and_stays_one_line(text: str) -> None:
    item = replace(record(0, text), error=text, extracted={text: text})
    line = encode(item)
    assert line.count(b"\n") == 1
    assert line.isascii()
    data = json.loads(line)
    assert (data["text"], data["error"], data["extracted"]) == (text, text, {text: text})


def test_a_record_is_on_disk_before_the_ledger_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, HEAD) as ledger:
        ledger.add(record(0))
        assert read_ledger(path) == [record(0)]


def test_a_cut_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, record(0), record(1))
    whole = path.read_bytes()
    last = len(encode(record(1)))
    for kept in range(0, last, 7):
        path.write_bytes(whole[: len(whole) - last + kept])
        assert read_ledger(path) == [record(0)]
        write(path, record(1))
        assert path.read_bytes() == whole


def test_a_cut_head_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"ledger": {"eval')
    write(path, record(0))
    assert read_ledger(path) == [record(0)]


def test_what_is_answered_is_kept_and_what_failed_is_not(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, record(0), record(1, None), record(2, "x", repeat=1))
    with Ledger(path, HEAD) as ledger:
        hashes = {index: f"hash{index}" for index in range(3)}
        assert set(ledger.answered(hashes)) == {(0, 0), (2, 1)}
        # A question that is not asked this time is no matter.
        assert set(ledger.answered({0: "hash0"})) == {(0, 0)}
        ledger.add(record(1))
    assert [item.status for item in read_ledger(path)] == ["answered"] * 3


def test_an_answer_to_another_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, record(0))
    with Ledger(path, HEAD) as ledger, pytest.raises(ConfigError, match=r"question 0 .*hash0.*new"):
        ledger.answered({0: "new"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "other"),
        ("max_tokens", 512),
        ("temperature", 0.7),
        ("seed", 1),
        ("profile", "gsm8k/border"),
        ("stop", ()),
        ("is_chat", True),
        ("evaluator", "lm-eval"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, record(0))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"{key} .*now.*results folder"):
        Ledger(path, replace(HEAD, **{key: value}))
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", [b"{}", b"nonsense", b'{"index": 1}', b"[1]", b"\xff"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, record(0), record(1))
    lines = path.read_bytes().splitlines()
    lines[1] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(ConfigError, match=r"ledger\.jsonl:2: "):
        read_ledger(path)


class FullDisk:
    """Takes `room` bytes, then what a full disk says."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, content: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = int(self.file.write(content[: self.room]))
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_is_an_error_and_leaves_no_half_line(tmp_path: Path, room: int) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, HEAD) as ledger:
        ledger.add(record(0))
        before = path.read_bytes()
        ledger._file = FullDisk(ledger._file, room)  # type: ignore[assignment]
        with pytest.raises(EvalError, match=r"ledger\.jsonl cannot be written .*No space left"):
            ledger.add(record(1))
        assert path.read_bytes() == before
        ledger._file.room = 10**6  # type: ignore[attr-defined]
        ledger.add(record(1))
    assert read_ledger(path) == [record(0), record(1)]


def test_a_line_that_the_disk_takes_in_parts_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, HEAD) as ledger:
        file = ledger._file

        class Slow(FullDisk):
            def write(self, content: memoryview) -> int:
                return int(file.write(content[:7]))

        ledger._file = Slow(file, 0)  # type: ignore[assignment]
        ledger.add(record(0))
    assert read_ledger(path) == [record(0)]


def test_another_file_is_no_ledger_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(ConfigError, match="not a line of a ledger"):
        Ledger(path, HEAD)
    assert path.read_text() == "my notes\n"


@pytest.mark.parametrize("key", ["build", "weights"])
def test_answers_of_two_builds_are_not_mixed_and_an_unknown_one_is_no_other(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path, replace(HEAD, **{key: "one"})).close()
    for same in ("one", ""):
        Ledger(path, replace(HEAD, **{key: same})).close()
    with pytest.raises(ConfigError, match=r"another build: the .* had 'one' and now 'two'"):
        Ledger(path, replace(HEAD, **{key: "two"}))
