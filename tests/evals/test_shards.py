"""`--shard i/n`: an exact partition, longest first, the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalsuite.config import EvalConfig
from evalsuite.errors import ConfigError
from evalsuite.jobs import EvalJob, make_job
from evalsuite.shards import (
    Shard,
    launch_keys,
    parse_shard,
    read_durations,
    record_durations,
    split,
    take,
    unknown_durations,
)


class TestShards:
    LONG = tuple(f"long{index}" for index in range(3))
    SHORT = tuple(f"short{index}" for index in range(12))
    DURATIONS = dict.fromkeys(LONG, 1800.0) | dict.fromkeys(SHORT, 120.0)

    def test_longest_first(self) -> None:
        shards = split([*self.LONG, *self.SHORT], self.DURATIONS, 4)
        loads = sorted(sum(self.DURATIONS[name] for name in shard) / 60 for shard in shards)
        assert loads == [24, 30, 30, 30]

    def test_few_jobs_many_shards(self) -> None:
        assert split(["a", "b"], {}, 4) == [["a"], ["b"], [], []]
        assert split([], {}, 4) == [[], [], [], []]

    def test_without_durations_the_counts_are_even(self) -> None:
        shards = split([*self.LONG, *self.SHORT], {}, 4)
        assert sorted(map(len, shards)) == [3, 4, 4, 4]

    @given(
        st.lists(st.text(max_size=5), unique=True, max_size=30),
        st.integers(1, 8),
        st.lists(st.floats(0, 1e6), min_size=30, max_size=30),
    )
    def test_an_exact_partition_that_depends_on_no_order(
        self, ids: list[str], count: int, seconds: list[float]
    ) -> None:
        durations = dict(zip(ids[::2], seconds, strict=False))
        shards = split(ids, durations, count)
        assert sorted(name for shard in shards for name in shard) == sorted(ids)
        assert len(shards) == count
        backwards = split(ids[::-1], dict(reversed(durations.items())), count)
        assert [sorted(shard) for shard in backwards] == [sorted(shard) for shard in shards]

    def test_jobs_with_one_launch_share_a_shard_and_so_a_start(self) -> None:
        launches = {"a1": "A", "a2": "A", "a3": "A", "b1": "B", "b2": "B"}
        ids = ["b1", "a1", "c", "a2", "d", "a3", "b2", "e", "f"]
        shards = split(ids, {}, 3, launches)
        # Three each; without the launches the first would hold a1, b1 and d.
        assert list(map(sorted, shards)) == [["a1", "a2", "a3"], ["b1", "b2", "e"], ["c", "d", "f"]]
        assert split(ids, {}, 3)[0] == ["b1", "a1", "d"]

    def test_a_launch_longer_than_a_fair_share_is_dealt_out(self) -> None:
        # All six on one server would take six units, where two shards need three each.
        one = dict.fromkeys("abcdef", "same")
        assert sorted(map(len, split(list("abcdef"), {}, 2, one))) == [3, 3]
        assert sorted(map(len, split(list("abcdef"), {}, 6, one))) == [1] * 6

    @given(
        st.dictionaries(st.text(max_size=4), st.sampled_from("ABC"), max_size=20),
        st.integers(1, 25),
        st.lists(st.floats(0, 1e6), min_size=20, max_size=20),
    )
    def test_launches_change_neither_the_partition_nor_its_order(
        self, launches: dict[str, str], count: int, seconds: list[float]
    ) -> None:
        ids = list(launches)
        durations = dict(zip(ids[::2], seconds, strict=False))
        shards = split(ids, durations, count, launches)
        assert sorted(name for shard in shards for name in shard) == sorted(ids)
        backwards = split(ids[::-1], durations, count, launches)
        assert [sorted(shard) for shard in backwards] == [sorted(shard) for shard in shards]
        if count >= len(ids):
            assert max(map(len, shards), default=0) <= 1

    def test_a_launch_is_what_the_server_is_started_with(self) -> None:
        def job(name: str, **values: object) -> EvalJob:
            base = {"model_name": "m", "accuracy_threshold": 0.9, "num_questions": 10}
            config = EvalConfig(**{**base, "num_fewshot": 5, **values})  # type: ignore[arg-type]
            return make_job(Path(f"one/{name}.yaml"), config, None)

        jobs = [
            job("a"),
            job("b", num_questions=20, task="minigsm", max_tokens=64),
            job("c", server_args="--max-model-len 4096"),
            job("d", env={"X": "1"}),
            job("e", engine="vllm"),
            job("f", model_name="other"),
        ]
        keys = list(launch_keys(jobs).values())
        assert keys[0] == keys[1]
        assert len(set(keys)) == 5
        parts = [take(jobs, {}, Shard(index, 2)) for index in (1, 2)]
        assert any({"one/a", "one/b"} <= {job.id for job in part} for part in parts)

    def test_take(self) -> None:
        config = EvalConfig(
            model_name="m/x", accuracy_threshold=0.9, num_questions=10, num_fewshot=5
        )
        jobs = [make_job(Path(f"one/{name}.yaml"), config, None) for name in "abcdef"]
        parts = [take(jobs, {"one/a": 900.0}, Shard(index, 3)) for index in (1, 2, 3)]
        assert sorted(job.id for part in parts for job in part) == sorted(job.id for job in jobs)
        assert take(jobs[:1], {}, Shard(2, 2)) == []

    @pytest.mark.parametrize("text", ["5/4", "0/4", "1/0", "-1/4", "1", "a/b", "", "1/4/2"])
    def test_shards_that_do_not_exist(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--shard"):
            parse_shard(text)

    def test_the_form_of_a_shard(self) -> None:
        assert parse_shard("2/4") == Shard(2, 4)
        assert str(parse_shard(" 1 / 1 ")) == "1/1"

    def test_bad_durations_are_ignored_with_a_notice(self, tmp_path: Path) -> None:
        path = tmp_path / "durations.json"
        path.write_text('{"a": 60, "b": NaN, "c": -1, "d": "9", "e": true, "f": Infinity, "g": 0}')
        durations, problems = read_durations(path)
        assert durations == {"a": 60.0, "g": 0.0}
        assert sorted(problem.key for problem in problems) == ["b", "c", "d", "e", "f"]
        unknown = unknown_durations(["a"], durations)
        assert "1 recorded durations are of no job here: g" in unknown[0].message

    @pytest.mark.parametrize("content", ["", "[1]", "{", "\xff"])
    def test_a_file_of_nonsense_is_ignored_with_a_notice(
        self, tmp_path: Path, content: str
    ) -> None:
        path = tmp_path / "durations.json"
        path.write_text(content, encoding="latin-1")
        durations, problems = read_durations(path)
        assert durations == {}
        assert [problem.severity for problem in problems] == ["warning"]

    def test_recorded_durations_are_read_back(self, tmp_path: Path) -> None:
        path = tmp_path / "durations.json"
        record_durations(path, {"a": 12.34})
        record_durations(path, {"b": 5.0})
        assert json.loads(path.read_text()) == {"a": 12.3, "b": 5.0}
        assert read_durations(path) == ({"a": 12.3, "b": 5.0}, [])
