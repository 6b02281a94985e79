"""What `evalsuite run` refuses before anything starts, and server arguments from file to argv."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from run_helpers import Suite

from evalsuite import cli
from evalsuite.yaml_loader import parse_document

sys.path.insert(0, str(Path(__file__).parent))
from config_files import BASE, errors, load

sys.path.pop(0)

RUN = ["run", "--configs-root", "configs", "--config", "config-cpu.txt"]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    suite = Suite(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", suite.environ["PATH"])
    return suite


FILES = {
    "extra": (BASE + "num_fewshots: 5\n", 6, "num_fewshots", "`num_fewshot`"),
    "dash": (BASE + 'server-args: "--x"\n', 6, "server-args", "`server_args`"),
    "case": (BASE + "Env: {}\n", 6, "Env", "`env`"),
    "absent": (
        *(BASE.replace("accuracy_threshold: 0.88", "accuracy_treshold: 0.9"), 2),
        *("accuracy_treshold", "`accuracy_threshold`"),
    ),
    "text": (BASE.replace("1319", '"50"'), 3, "num_questions", "write 50 without quotes"),
    "deep": (BASE + "env:\n  max_tokens: '5'\n", 7, "env.max_tokens", "move `max_tokens`"),
    "deeper": (BASE + "options:\n  seed: 5\n", 6, "options", "`seed` belongs one level up"),
    "gate": (BASE + "gate: {nmae: paired}\n", 6, "gate.nmae", "'name'"),
}


class TestKeys:
    def test_faults_of_all_files_are_listed_in_one_go_and_nothing_is_launched(
        self, suite: Suite, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pids = suite.folder / "pids"
        suite.add("right", f"{suite.right()} --pids-file {pids}")
        for name, (text, *_) in FILES.items():
            (suite.root / "s" / f"{name}.yaml").write_text(text)
        listed = "".join(f"{name}.yaml\n" for name in FILES)
        (suite.root / "s" / "config-cpu.txt").write_text(f"right.yaml\n{listed}")
        assert cli.main(RUN) == 4
        said = capsys.readouterr().err
        for name, (_, line, key, nearest) in FILES.items():
            place = f"configs/s/{name}.yaml:{line}: error: {key}: "
            (found,) = [told for told in said.splitlines() if told.startswith(place)]
            assert nearest in found
        assert not pids.exists()
        assert not suite.results.exists()


class TestDuplicates:
    def test_both_lines_are_named_however_far_apart(self, tmp_path: Path) -> None:
        between = "".join(f"# line {number}\n" for number in range(10))
        text = BASE.replace("1319", "50") + between + "num_questions: 1319\n"
        (found,) = errors(tmp_path, text)
        assert (found.line, found.key) == (16, "num_questions")
        assert "given twice, on lines 3 and 16" in found.message

    @pytest.mark.parametrize(
        ("text", "key"),
        [
            ("env: {A: '1'}\nseed: 1\nenv: {A: '1'}\n", "env"),
            ("env:\n  A: '1'\n  B: '1'\n  A: '1'\n", "env.A"),
            ('env:\n  A: "1"\n  "A": "2"\n', "env.A"),
            ("gate: {name: paired, name: threshold}\n", "gate.name"),
            ("server_args: {a: {b: 1, b: 2}}\n", "server_args.a.b"),
            ("server_args: [a, {b: 1, b: 2}]\n", "server_args[1].b"),
            ("env: {<<: {A: '1', A: '2'}}\n", "env.A"),
            ("x-a: &a {A: '1'}\nenv:\n  <<: *a\n  <<: *a\n", "env"),
        ],
    )
    def test_at_any_depth_and_in_any_spelling(self, tmp_path: Path, text: str, key: str) -> None:
        found = [problem for problem in errors(tmp_path, BASE + text) if "twice" in problem.message]
        assert [problem.key for problem in found] == [key]

    def test_in_the_file_of_pools_too(
        self, suite: Suite, capsys: pytest.CaptureFixture[str]
    ) -> None:
        suite.add("right")
        with (suite.root / "hardware.yaml").open("a") as file:
            file.write("cpu: {arch: cpu}\n")
        assert cli.main(RUN) == 4
        assert "configs/hardware.yaml:3: error: cpu: given twice" in capsys.readouterr().err

    def test_a_merge_is_no_duplicate_and_the_local_value_wins_wherever_it_stands(
        self, tmp_path: Path
    ) -> None:
        common = "x-common: &common {A: '1', B: '2', C: '3'}\n"
        for own in ("env:\n  <<: *common\n  B: '9'\n", "env:\n  B: '9'\n  <<: *common\n"):
            assert load(tmp_path, BASE + common + own).env == {"A": "1", "B": "9", "C": "3"}
        nested = f"{common}x-more: &more\n  <<: *common\n  C: '8'\nenv:\n  <<: *more\n  B: '9'\n"
        assert load(tmp_path, BASE + nested).env == {"A": "1", "B": "9", "C": "8"}

    @pytest.mark.parametrize(
        "level", ["[{}]", "{{<<: [{}]}}", "{{a: [{}]}}"], ids=["lists", "merges", "maps"]
    )
    def test_a_bomb_of_aliases_is_refused_quickly_whatever_it_is_made_of(self, level: str) -> None:
        lines = ["x0: &x0 {a: b}"]
        for number in range(1, 10):
            aliases = ", ".join([f"*x{number - 1}"] * 10)
            lines.append(f"x{number}: &x{number} {level.format(aliases)}")
        tracemalloc.start()
        began = time.process_time()
        document = parse_document("\n".join(lines), "a.yaml")
        seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert any("once its aliases are expanded" in p.message for p in document.problems)
        assert seconds < 5
        assert peak < 64 << 20

    @pytest.mark.parametrize("text", ["a: *a\n", "a: &a [*a]\n", "a: &a {b: *a}\n", "<<: *b\n"])
    def test_an_alias_that_names_nothing_yet_is_an_error_with_its_line(self, text: str) -> None:
        document = parse_document("x: 1\n" + text, "a.yaml")
        (found,) = [p for p in document.problems if "names no anchor" in p.message]
        assert found.line == 2


JSON = {"method": "mtp", "n": 2, "deep": {"a": [1, None, True], "quote": "it's"}}


class TestServerArgs:
    @pytest.mark.parametrize(
        "text",
        [
            'server_args: >-\n  --cfg \'{"method": "mtp",\n  "n": 2,\n  "deep": {}}\'\n',
            'server_args: |\n  --cfg \'{"method": "mtp",\n  "n": 2,\n  "deep": {}}\'\n',
            'server_args: "--cfg \'{\\"method\\": \\"mtp\\", \\"n\\": 2, \\"deep\\": {}}\'"\n',
            'server_args: \'--cfg \'\'{"method": "mtp", "n": 2, "deep": {}}\'\'\'\n',
            'server_args: [\'--cfg\', \'{"method": "mtp", "n": 2, "deep": {}}\']\n',
            "server_args: {cfg: {method: mtp, n: 2, deep: {}}}\n",
        ],
        ids=["folded", "literal", "double", "single", "list", "mapping"],
    )
    def test_json_is_one_element_in_every_form(self, tmp_path: Path, text: str) -> None:
        flag, value = load(tmp_path, BASE + text).server_args
        assert flag == "--cfg"
        assert json.loads(value) == {"method": "mtp", "n": 2, "deep": {}}

    def test_a_mapping_says_true_false_nothing_and_the_rest(self, tmp_path: Path) -> None:
        flags = {"cfg": JSON, "stop": ["a", "b c"], "on": True, "off": False, "none": None}
        text = f"server_args: {json.dumps({**flags, 'x_y': 2, 'empty': ''})}\n"
        argv = load(tmp_path, BASE + text).server_args
        assert [argv[0], *argv[2:3], *argv[4:]] == [
            *("--cfg", "--stop", "--on", "--x-y", "2", "--empty", ""),
        ]
        assert json.loads(argv[1]) == JSON
        assert json.loads(argv[3]) == ["a", "b c"]

    def test_what_is_shown_can_be_pasted_and_is_what_the_server_gets(
        self, suite: Suite, capsys: pytest.CaptureFixture[str]
    ) -> None:
        got = suite.folder / "argv.json"
        given = [
            *("--name", "a b", "--x=$HOME", "--y", "#1", "--empty", "", "--cfg", json.dumps(JSON)),
            *("--port-range", "1", "--star", "*", "--tick", "`id`", "--back", "a\\b"),
            *("--quote", 'it\'s "so"', "--percent", "%d {port}", "--accent", "é"),
        ]
        env = {"PLAIN": "1", "WITH": "a $b 'c'"}
        arguments = [*shlex.split(suite.right()), "--argv-file", str(got), *given]
        suite.add("right", env=env, server_args=arguments)
        suite.add("dies", env=env, server_args=[*arguments, "--exit-code", "3"])
        done = suite.run(*RUN)
        assert done.returncode == 75, done.stdout + done.stderr
        received = json.loads(got.read_text())
        start = received.index("--argv-file") + 2
        assert received[start : start + len(given)] == given
        # The command as shown, by a shell that has the engine.
        assert cli.main([*RUN, "--dry-run", "right"]) == 0
        shown = capsys.readouterr().out.partition("s/right: ")[2]
        got.unlink()
        pasted = shown.replace("'{port}'", "0").strip() + " --exit-code 0"
        assert subprocess.run(["bash", "-c", pasted], check=False, timeout=30).returncode == 0
        received = json.loads(got.read_text())
        assert received[start : start + len(given)] == given

    def test_an_open_quote_is_named_with_line_and_position(self, tmp_path: Path) -> None:
        (found,) = errors(tmp_path, BASE + "server_args: >-\n  --a 1\n  --b 'open\n")
        assert (found.line, found.key) == (6, "server_args")
        assert "opened at character 11 is never closed" in found.message


def test_a_list_with_faults_runs_nothing(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    pids = suite.folder / "pids"
    for name in ("a", "b", "c", "sub/d", "sub/e"):
        (suite.root / "s" / "sub").mkdir(exist_ok=True)
        suite.add(name, f"{suite.right()} --pids-file {pids}", num_questions=3)
    (suite.root / "outside.yaml").write_text(BASE)
    path = suite.root / "s" / "config-cpu.txt"
    path.write_bytes(
        b"\xef\xbb\xbfa.yaml\r\n\r\n  # note\nb.yaml  \nb.yaml\nmissing.yaml\nsub/*.yaml\n"
        b"none-*.yaml\nc.yaml # why\n../outside.yaml"
    )
    assert cli.main(RUN) == 4
    said = capsys.readouterr().err
    lines = [int(line) for line in re.findall(r"config-cpu\.txt:(\d+): error", said)]
    assert lines == [5, 6, 8, 10]
    assert not pids.exists()
    # What is left without the faults runs once each, in the order of the list.
    path.write_bytes(b"\xef\xbb\xbfa.yaml\r\n\r\n  # note\nb.yaml  \nsub/*.yaml\nc.yaml # why")
    assert cli.main(RUN) == 0
    ran = re.findall(r"^\[\d/5\] (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert ran == ["s/a", "s/b", "s/sub/d", "s/sub/e", "s/c"]


def test_what_an_engine_refuses_is_placed_in_each_file(
    suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.add("flag", "--max-modl-len 5", engine="moeserve")
    suite.add("same", "--max-modl-len 5", engine="moeserve")
    suite.add("backend", "--moe-backend tritn", engine="moeserve")
    assert cli.main(RUN) == 4
    said = capsys.readouterr().err
    for name, part in (
        ("flag", "moeserve refuses these flags: --max-modl-len: unknown option; did you mean"),
        ("same", "moeserve refuses these flags: --max-modl-len: unknown option; did you mean"),
        ("backend", "moeserve has no MoE backend 'tritn'; did you mean 'triton'?"),
    ):
        path = suite.root / "s" / f"{name}.yaml"
        (line,) = [
            number
            for number, text in enumerate(path.read_text().splitlines(), start=1)
            if "server_args" in text
        ]
        assert f"s/{name}.yaml:{line}: error: server_args: {part}" in said
    assert not suite.results.exists()
