"""Baselines: content address, approval, anchor, refusal of what cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from verdict_helpers import make_job, make_record, make_result

from evalsuite import baseline_store as store
from evalsuite.baseline import (
    Baseline,
    differences,
    digest,
    identity_of,
    make_baseline,
    parse,
    render,
    text_sha256,
    with_logprobs,
)
from evalsuite.errors import ConfigError

JOB = "moe-refactor/Qwen3"


def made(right: tuple[bool, ...] = (True, True, False), text: str = "18") -> Baseline:
    n = len(right)
    result = make_result(sum(right), n, per_question={i: (r,) for i, r in enumerate(right)})
    records = [
        make_record(i, f"{text} {i}", right=r, token_logprobs=(-0.1234567, -2.0))
        for i, r in enumerate(right)
    ]
    identity = identity_of(make_job(num_questions=n).config, result, "rev1")
    return make_baseline(
        identity, result, records, engine="moeserve 1", hardware="cpu", commit="c0ffee"
    )


def test_round_trip_keeps_the_digest() -> None:
    text = "tab\t nul\x00 \ud800 lone, ümlaut, \u2028 line"
    base = made(text=text)
    again = parse(render(base), "x.json")
    assert again == base
    assert digest(again) == digest(base)
    assert base.answers[0].text_sha256 == text_sha256(f"{text} 0")
    assert base.answers[0].logprobs == (-0.1234567, -2.0)
    # One question a line, so that a diff shows questions.
    assert sum('"outcomes"' in line for line in render(base).splitlines()) == 3


def test_digest_changes_with_any_content() -> None:
    base = made()
    assert digest(base) != digest(made((True, False, False)))
    assert digest(base) != digest(replace(base, hardware="h100"))


def test_save_load_and_tampering(tmp_path: Path) -> None:
    path = store.save(tmp_path, JOB, made())
    assert path.name == f"{digest(made())}.json"
    assert store.load(path) == made()
    path.write_text(path.read_text().replace("[true]", "[false]", 1))
    with pytest.raises(ConfigError, match="changed after it was made"):
        store.load(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "not JSON"), ("[]", "schema is 'list'"), ('{"schema": "x"}', "schema is 'x'")],
)
def test_broken_files_are_named(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"b\.json") as caught:
        store.load(path)
    assert word in str(caught.value)


def test_missing_fields_are_named() -> None:
    data = json.loads(render(made()))
    del data["identity"]["metric"]
    with pytest.raises(ConfigError, match="metric"):
        parse(json.dumps(data), "b.json")


def test_approve_keeps_previous_and_anchor(tmp_path: Path) -> None:
    folder = store.job_folder(tmp_path, JOB)
    names = [
        store.save(tmp_path, JOB, base).stem
        for base in (made(), made((True, False, False)), made((True, True, True)))
    ]
    with pytest.raises(ConfigError, match="no approved baseline"):
        store.resolve(None, JOB, tmp_path)
    store.approve(folder, names[0][:10])
    first = store.resolve(None, JOB, tmp_path)
    assert first.anchor is None
    store.approve(folder, names[1])
    approved = store.approve(folder, names[2])
    assert (approved.current, approved.previous, approved.anchor) == (names[2], names[1], names[0])
    pair = store.resolve(None, JOB, tmp_path)
    assert pair.current == made((True, True, True))
    assert pair.anchor == made()
    assert list(pair.references()) == ["baseline", "anchor"]
    moved = store.approve(folder, names[2], move_anchor=True)
    assert (moved.anchor, moved.previous) == (names[2], names[1])
    assert store.resolve(None, JOB, tmp_path).anchor is None


def test_resolve_a_named_file_or_folder(tmp_path: Path) -> None:
    path = store.save(tmp_path, JOB, made())
    assert store.resolve(str(path), "other/job", tmp_path).current == made()
    inside = f"{path.parent.name}/{path.name}"
    assert store.resolve(inside, "other/job", tmp_path).current == made()
    with pytest.raises(ConfigError, match="no such baseline"):
        store.resolve("nowhere.json", JOB, tmp_path)


def test_find_refuses_unknown_and_ambiguous(tmp_path: Path) -> None:
    path = store.save(tmp_path, JOB, made())
    store.save(tmp_path, JOB, made((False, False, False)))
    with pytest.raises(ConfigError, match="known: "):
        store.find(path.parent, "zz")
    with pytest.raises(ConfigError, match="2 baselines"):
        store.find(path.parent, "")


def test_differences_name_every_key() -> None:
    config = make_job().config
    result = make_result(1, 3)
    before = identity_of(config, result, "rev1")
    after = identity_of(
        config.model_copy(update={"max_tokens": 512}),
        replace(result, metric="strict-match"),
        "rev2",
    )
    assert differences(before, after) == [
        "metric: 'numeric' -> 'strict-match'",
        "model_revision: 'rev1' -> 'rev2'",
        "sampling.max_tokens: 256 -> 512",
    ]
    assert differences(before, identity_of(config, result, "")) == []


def test_a_run_with_missing_answers_makes_no_baseline() -> None:
    result = make_result(1, 2, failed=1, per_question={0: (True,), 1: (None,)})
    with pytest.raises(ConfigError, match="1 of them lack"):
        make_baseline(
            identity_of(make_job().config, result), result, [], engine="", hardware="", commit=""
        )


def test_diff_and_show_say_what_changed() -> None:
    old, new = made(), replace(made((True, False, False), "19"), commit="beef")
    text = store.describe_diff(old, new)
    assert "commit: c0ffee -> beef" in text
    assert "question 1: 1.00 -> 0.00" in text
    assert "3 of 3 replies changed" in text
    other = replace(new, identity=replace(new.identity, prompt_hash="beef"))
    assert "not comparable: prompt_hash" in store.describe_diff(old, other)
    assert "accuracy    0.6667 over 1 repeat(s)" in store.describe(old)


def test_replayed_logprobs_replace_sampled_ones() -> None:
    base = made()
    assert base.logprob_source == "sampled"
    replayed = with_logprobs(base, {0: (-1.0, -2.0)}, {0: 0.01})
    assert replayed.logprob_source == "replay"
    assert replayed.answers[0].logprobs == (-1.0, -2.0)
    assert replayed.answers[0].logprob_noise == 0.01
    assert replayed.answers[1].logprobs == ()
    assert parse(render(replayed), "x") == replayed
