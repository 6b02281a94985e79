"""Lists: which YAMLs are run; a line that names nothing is an error, never a green run."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalsuite.errors import ConfigError
from evalsuite.hardware import Hardware, load_hardware, read_hardware
from evalsuite.lists import (
    ConfigList,
    configs_root,
    hardware_file,
    orphans,
    read_list,
    resolve_lists,
    suite_name,
)

CONFIG = "model_name: m/x\naccuracy_threshold: 0.88\nnum_questions: 1319\nnum_fewshot: 5\n"


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CONFIG)


def listed(found: ConfigList) -> list[str]:
    folder = found.path.parent
    return [entry.path.relative_to(folder).as_posix() for entry in found.entries]


def messages(found: ConfigList) -> list[tuple[int, str]]:
    return [(problem.line, problem.message) for problem in found.problems]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "configs" / "moe"
    touch(folder, "a.yaml", "b.yaml", "c.yaml", "sub/d.yaml", "sub/e.yaml")
    touch(folder.parent, "outside.yaml")
    return folder


def test_the_bytes_of_real_list_files(suite: Path) -> None:
    path = suite / "config-b200.txt"
    path.write_bytes(
        b"\xef\xbb\xbfa.yaml\r\n\r\n  # note\nb.yaml  \nb.yaml\nmissing.yaml\nsub/*.yaml\n"
        b"none-*.yaml\nc.yaml # why\n../outside.yaml"
    )
    found = read_list(path, suite.parent)
    assert found.suite == "moe"
    assert listed(found) == ["a.yaml", "b.yaml", "sub/d.yaml", "sub/e.yaml", "c.yaml"]
    assert [entry.line for entry in found.entries] == [1, 4, 7, 7, 9]
    problems = messages(found)
    assert [line for line, _ in problems] == [5, 6, 8, 10]
    assert "listed twice, first on line 4" in problems[0][1]
    assert "no file 'missing.yaml'" in problems[1][1]
    assert "matches no YAML file" in problems[2][1]
    assert "leaves the folder of the list" in problems[3][1]
    assert all(problem.severity == "error" for problem in found.problems)


def test_a_glob_adds_what_is_not_listed_yet(suite: Path) -> None:
    path = suite / "config-b200.txt"
    path.write_text("c.yaml\n*.yaml\n")
    found = read_list(path, suite.parent)
    assert listed(found) == ["c.yaml", "a.yaml", "b.yaml"]
    assert not found.problems


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/etc/passwd", "leaves the folder"),
        ("..\\outside.yaml", "leaves the folder"),
        ("sub/../../outside.yaml", "leaves the folder"),
        ("~/x.yaml", "leaves the folder"),
        ("C:\\x.yaml", "absolute path"),
        ("../*.yaml", "leaves the folder"),
        ("a", "did you mean 'a.yaml'"),
        ("aa.yaml", "did you mean 'a.yaml'"),
        ("notes.md", "is no YAML file"),
        ("sub", "is no YAML file"),
        ('"a.yaml"', "is no YAML file; write a.yaml without quotes"),
        ("a.yaml, b.yaml", "one file name a line, and nothing after 'a.yaml'"),
        ("a.yaml --limit 5", "one file name a line, and nothing after 'a.yaml'"),
        ("x\0.yaml", "leaves the folder"),
    ],
)
def test_a_line_that_names_nothing_usable(suite: Path, line: str, part: str) -> None:
    path = suite / "config-b200.txt"
    path.write_text(f"a.yaml\n{line}\n")
    found = read_list(path, suite.parent)
    assert listed(found) == ["a.yaml"]
    assert [number for number, _ in messages(found)] == [2]
    assert part in found.problems[0].message


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"", "lists no config"), (b"# only\n\n", "lists no config"), (b"\xff\xfe", "not UTF-8")],
)
def test_an_empty_or_unreadable_list_is_an_error(suite: Path, content: bytes, part: str) -> None:
    path = suite / "config-b200.txt"
    path.write_bytes(content)
    found = read_list(path, suite.parent)
    assert part in found.problems[0].message


class TestResolve:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "configs"
        for name in ("one", "two"):
            touch(root / name, "a.yaml")
            (root / name / "config-b200.txt").write_text("a.yaml\n")
        (root / "one" / "config-cpu.txt").write_text("a.yaml\n")
        return root

    def test_a_bare_name_is_that_list_in_every_suite(self, root: Path) -> None:
        assert [found.suite for found in resolve_lists("config-b200.txt", root)] == ["one", "two"]
        assert [found.suite for found in resolve_lists("config-cpu.txt", root)] == ["one"]

    def test_a_path_is_one_list(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for value in (str(root / "two/config-b200.txt"), "two/config-b200.txt"):
            assert [found.suite for found in resolve_lists(value, root)] == ["two"]
        monkeypatch.chdir(root.parent)
        assert resolve_lists("configs/two/config-b200.txt", Path("configs"))[0].suite == "two"

    def test_an_existing_file_needs_no_slash(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(root / "one")
        found = resolve_lists("config-b200.txt", root)
        assert [one.path for one in found] == [Path("config-b200.txt")]
        assert found[0].suite == "one"

    def test_a_list_in_a_folder_without_a_list_by_name_is_pointed_at(self, root: Path) -> None:
        (root / "three").mkdir()
        (root / "three" / "list.txt").write_text("a.yaml\n")
        with pytest.raises(ConfigError, match=rf"did you mean '{root}/three/list.txt'\?"):
            resolve_lists("list.txt", root)

    def test_a_single_yaml(self, root: Path) -> None:
        found = resolve_lists(str(root / "one/a.yaml"), root)
        assert listed(found[0]) == ["a.yaml"]
        assert found[0].is_bare
        assert [one.suite for one in resolve_lists("a.yaml", root)] == ["one", "two"]

    @pytest.mark.parametrize(
        ("value", "part"),
        [
            ("config-b20.txt", "did you mean 'config-b200.txt'"),
            ("nothing.txt", "lists: config-b200.txt, config-cpu.txt"),
            ("one/config-b20.txt", "no such file"),
            ("", "is empty"),
        ],
    )
    def test_no_match_is_an_error_with_close_names(self, root: Path, value: str, part: str) -> None:
        with pytest.raises(ConfigError, match="error") as caught:
            resolve_lists(value, root)
        assert part in str(caught.value)

    def test_a_folder_is_no_list(self, root: Path) -> None:
        with pytest.raises(ConfigError, match=r"is a folder; .*config-cpu\.txt"):
            resolve_lists(str(root / "one"), root)

    def test_orphans(self, root: Path) -> None:
        touch(root / "one", "lost.yaml", "deep/lost.yaml")
        found = [read_list(root / "one" / "config-b200.txt", root)]
        assert [
            path.relative_to(root / "one").as_posix() for path in orphans(root / "one", found)
        ] == [
            "deep/lost.yaml",
            "lost.yaml",
        ]


class TestRoot:
    def test_working_directory_first_then_the_installed_one(self, tmp_path: Path) -> None:
        shipped = configs_root(cwd=tmp_path)
        assert (shipped / "hardware.yaml").is_file()
        (tmp_path / "configs").mkdir()
        assert configs_root(cwd=tmp_path) == shipped
        touch(tmp_path / "configs/s", "a.yaml")
        (tmp_path / "configs/s/config-b200.txt").write_text("a.yaml\n")
        assert configs_root(cwd=tmp_path) == tmp_path / "configs"
        assert hardware_file(tmp_path / "configs") == shipped / "hardware.yaml"

    def test_the_option_wins_and_must_exist(self, tmp_path: Path) -> None:
        assert configs_root(tmp_path) == tmp_path
        with pytest.raises(ConfigError, match="names no folder"):
            configs_root(tmp_path / "no")

    def test_suite_names(self, tmp_path: Path) -> None:
        (tmp_path / "a/b").mkdir(parents=True)
        assert suite_name(tmp_path / "a/b", tmp_path) == "a/b"
        assert suite_name(tmp_path / "a", tmp_path / "a") == "a"
        assert suite_name(tmp_path, tmp_path / "a") == tmp_path.name


POOL = (
    "arch: sm100\n  vendor: nvidia\n  gpus_per_node: 8\n  memory_gib: 179\n  timeout_minutes: 60\n"
)


class TestHardware:
    @pytest.mark.parametrize(
        ("name", "pool"),
        [
            ("config-b200.txt", "b200"),
            ("config-b200-shard-0.txt", "b200"),
            ("config-upstream-b200-qwen.txt", "b200"),
            ("config-rocm-shard-3.txt", "mi300x"),
            ("config-gfx950.txt", "mi355x"),
            ("config-cpu.txt", "cpu"),
            ("config-spark.txt", ""),
            ("models-b200.txt", ""),
            ("config-b2000.txt", ""),
        ],
    )
    def test_pool_of_a_list(self, hardware: Hardware, name: str, pool: str) -> None:
        found = hardware.pool_of_list(name)
        assert (found.name if found else "") == pool

    @pytest.fixture
    def hardware(self) -> Hardware:
        return load_hardware(hardware_file(configs_root()))

    @pytest.mark.parametrize(
        ("text", "line", "part"),
        [
            (f"b200:\n  {POOL}  archh: x\n", 7, "did you mean 'arch'"),
            (f"b200:\n  {POOL.replace('8', 'eight')}", 4, "must be a whole number"),
            (f"b200:\n  {POOL.replace('nvidia', 'nvida')}", 3, "did you mean 'nvidia'"),
            (f"b200:\n  {POOL.replace('nvidia', 'cpu')}", 1, "cannot be meant"),
            (f"b-200:\n  {POOL}", 1, "no pool name"),
            (f"b200:\n  {POOL}b200:\n  {POOL}", 7, "given twice"),
            (f"b200:\n  {POOL}x1:\n  {POOL}  aliases: [b200]\n", 7, "already names pool 'b200'"),
            (f"b200:\n  {POOL}  ci: {{jenkins: {{}}}}\n", 7, "is no CI provider"),
            ("b200: 8\n", 1, "a pool is a mapping"),
            ("- a\n", 1, "holds no pools"),
            ("b200:\n  vendor: cpu\n", 1, "required key is missing"),
        ],
    )
    def test_faults(self, tmp_path: Path, text: str, line: int, part: str) -> None:
        path = tmp_path / "hardware.yaml"
        path.write_text(text)
        found = read_hardware(path)
        places = [(problem.line, problem.message) for problem in found.problems]
        assert any(part in message and at == line for at, message in places), places
        with pytest.raises(ConfigError):
            load_hardware(path)

    @pytest.mark.parametrize(
        ("right", "wrong"),
        [("gpus_per_node", "gpus_per_nod"), ("memory_gib", "memory"), ("arch", "archs")],
    )
    def test_a_misspelt_required_key_is_one_fault(
        self, tmp_path: Path, right: str, wrong: str
    ) -> None:
        path = tmp_path / "hardware.yaml"
        path.write_text(f"b200:\n  {POOL.replace(f'{right}:', f'{wrong}:')}")
        (problem,) = read_hardware(path).problems
        assert problem.key == f"b200.{wrong}"
        assert problem.message == f"unknown key; did you mean {right!r}?"
