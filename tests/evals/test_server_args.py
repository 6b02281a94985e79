"""`server_args` in every form -> argv, one element per value, and no shell anywhere."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalsuite.server_args import flag_values, parse_server_args


class TestServerArgs:
    def test_mapping(self) -> None:
        value = {
            "tensor_parallel_size": 2,
            "speculative_config": {"method": "mtp", "n": 2, "deep": {"a": [1, None]}},
            "stop": ["a", "b c"],
            "enforce_eager": True,
            "trust": False,
            "seed": None,
            "--name": "a b",
            "empty": "",
            "attention_config.indexer_kv_dtype": "mxfp4",
        }
        argv = parse_server_args(value)
        assert argv[:3] == ("--tensor-parallel-size", "2", "--speculative-config")
        assert json.loads(argv[3]) == value["speculative_config"]
        assert json.loads(argv[5]) == ["a", "b c"]
        assert argv[6:] == (
            *("--enforce-eager", "--name", "a b", "--empty", ""),
            *("--attention_config.indexer_kv_dtype", "mxfp4"),
        )

    def test_no_shell_is_involved(self) -> None:
        argv = parse_server_args("""--name "a b" --x=$HOME --y '#1' --z '' --g *.py `id` $(id)""")
        assert argv == (
            *("--name", "a b", "--x=$HOME", "--y", "#1", "--z", ""),
            *("--g", "*.py", "`id`", "$(id)"),
        )

    def test_json_inside_a_string(self) -> None:
        argv = parse_server_args("""--cfg '{"method":"mtp","n":2}' --port-range 1""")
        assert argv == ("--cfg", '{"method":"mtp","n":2}', "--port-range", "1")

    def test_list_keeps_every_element(self) -> None:
        assert parse_server_args(["--a", "b c", 2, "", "-x=1"]) == ("--a", "b c", "2", "", "-x=1")

    @pytest.mark.parametrize("value", [3, True, [True], [None], [["a"]], {"a b": 1}, {"x": {1.5}}])
    def test_other_forms_are_refused(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"must be|is a|is not|nothing usable"):
            parse_server_args(value)

    @pytest.mark.parametrize(
        ("text", "position"),
        [("'abc", 1), ('--a "b', 5), ("--a 'x' \"y 'z'", 9), (r"--a \'b'c", 8)],
    )
    def test_position_of_an_open_quote(self, text: str, position: int) -> None:
        with pytest.raises(ValueError, match=f"character {position} is never closed"):
            parse_server_args(text)

    @pytest.mark.parametrize("text", ["\u2013tp 2", "\u2014enforce-eager", "--a \u201c--b 1\u201d"])
    def test_flags_that_a_text_program_spoiled_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="begins with a typographic"):
            parse_server_args(text)

    def test_typographic_values_are_values(self) -> None:
        argv = ["--a", "\u2014", "--b", "\u201cx\u201d", "--c=\u2013tp"]
        assert parse_server_args(argv) == tuple(argv)

    @given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)))
    def test_round_trip_through_a_shell(self, words: list[str]) -> None:
        argv = ["--flag", *(f"v{word}" for word in words)]
        assert parse_server_args(shlex.join(argv)) == tuple(argv)

    @pytest.mark.parametrize(
        "flag",
        [
            *("--port 1", "--port=1", "--port 0", "--port 70000", "--host x", "--model m"),
            *("--model-path m", "--uds s"),
        ],
    )
    def test_the_suites_own_flags(self, flag: str) -> None:
        for value in (flag, flag.replace("=", " ").split()):
            with pytest.raises(ValueError, match="the suite's own"):
                parse_server_args(value)

    def test_flag_values_in_all_spellings(self) -> None:
        argv = ("--moe_backend=a", "--moe-backend", "b", "--moe-backend", "--x", "c")
        assert flag_values(argv, ("--moe-backend",)) == ["a", "b", None]
