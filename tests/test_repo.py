"""The tree: sizes, who reads the environment, files that must agree, what no text says."""

from __future__ import annotations

import ast
import re
import subprocess
import tokenize
from collections.abc import Iterator

import pytest
from source_tree import ROOT, SOURCE, modules, python_files

from evalsuite.validate import survey

# Who may read the environment: what a process starts with. All others get a mapping.
ENTRY_FILES = {
    "evalsuite/cli.py",
    "evalsuite/cli_config.py",
    "evalsuite/cli_gate.py",
    "evalsuite/cli_run.py",
    "evalsuite/pytest_run.py",
    "evalsuite/evaluators/lm_eval_worker.py",  # a process of its own
    "kernels/moeserve/__main__.py",
    "kernels/moeserve/args.py",
    "kernels/moeserve/backends_command.py",
    "kernels/moeserve/engine/spawn.py",  # hands all of it on to the process that it starts
    "kernels/moeserve/runner/compile_process.py",  # the same
}

MAX_LINES = 300
MAX_LINES_OF = {"kernels/moeserve/triton_kernels/": 400, "tests/": 400}
LONGER = {
    # A table with a row for each of the field's flags; cut in two, nobody would find the half.
    "kernels/moeserve/flags.py": 340,
}


def tracked() -> list[str]:
    """Files that git has, or would add; those of an unpacked archive where there is no git."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and its index to tell the project's files from what lies beside")
    names = done.stdout.decode("utf-8", "surrogateescape").split("\0")
    return sorted({name for name in names if name and (ROOT / name).is_file()})


def limit_of(name: str) -> int:
    for prefix, limit in MAX_LINES_OF.items():
        if name.startswith(prefix):
            return limit
    return LONGER.get(name, MAX_LINES)


def test_files_can_be_read_in_one_sitting() -> None:
    long = {}
    for name in tracked():
        if name.endswith((".py", ".j2")):
            count = len((ROOT / name).read_text(encoding="utf-8").splitlines())
            if count > limit_of(name):
                long[name] = count
    assert long == {}


@pytest.mark.parametrize("package", sorted(SOURCE))
def test_functions_are_under_sixty_lines(package: str) -> None:
    long = {}
    for path in python_files(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count >= 60 and "triton_kernels" not in path.parts:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = count
    assert long == {}


def test_only_entry_files_read_the_environment() -> None:
    readers = set()
    for package in SOURCE:
        for path in python_files(package):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_os = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
                if is_os and isinstance(node.value, ast.Name) and node.value.id == "os":
                    readers.add(str(path.relative_to(ROOT)))
    assert readers - ENTRY_FILES == set()
    assert {name for name in ENTRY_FILES if not (ROOT / name).is_file()} == set()


def test_every_yaml_validates_and_is_listed() -> None:
    found = survey([str(ROOT / "configs")], ROOT / "configs", is_strict=True)
    assert [str(problem) for problem in found.problems if problem.severity == "error"] == []
    listed = {entry.path.resolve() for one in found.lists for entry in one.entries}
    yamls = {path.resolve() for path in (ROOT / "configs").glob("*/*.yaml")}
    assert yamls == listed == set(found.configs)


@pytest.mark.parametrize("package", sorted(SOURCE))
def test_every_module_says_what_it_does(package: str) -> None:
    for name, tree in modules(package).items():
        assert ast.get_docstring(tree), name


TREE_LINE = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>[\w.\-/{},*]+)(?:\s{2,}(?P<what>.+))?$")


def readme_tree() -> list[str]:
    """Paths of the annotated tree: the fenced block of README.md that begins with a folder."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = [line for line in block.splitlines() if line.strip()]
        if lines and re.match(r"^[\w.\-]+/(\s|$)", lines[0]):
            return list(tree_paths(lines))
    return []


def tree_paths(lines: list[str]) -> Iterator[str]:
    """Paths of a tree that is drawn by indentation; a continued remark is no path."""
    open_folders: list[tuple[int, str]] = []
    for line in lines:
        match = TREE_LINE.match(line)
        if match is None:
            continue
        depth = len(match["indent"])
        while open_folders and open_folders[-1][0] >= depth:
            open_folders.pop()
        parent = open_folders[-1][1] if open_folders else ""
        name = match["name"]
        yield parent + name
        if name.endswith("/"):
            open_folders.append((depth, parent + name))


def test_the_tree_of_the_readme_is_the_tree_on_the_disk() -> None:
    paths = readme_tree()
    assert paths, "README.md has no tree: a fenced block whose first line is a folder, `name/`"
    missing = [path for path in paths if not (ROOT / path.rstrip("/")).exists()]
    assert missing == []
    files_as_folders = [p for p in paths if p.endswith("/") and not (ROOT / p).is_dir()]
    assert files_as_folders == []
    top = {name.split("/")[0] for name in tracked() if "/" in name}
    drawn = {path.split("/")[0] for path in paths}
    assert {name for name in top if not name.startswith(".")} - drawn == set()


# Folders that exist on some machine and not on the reader's; `/tmp` is everyone's.
OF_A_MACHINE = re.compile(r"(?<![\w./~-])/(?:work|root|home|Users|mnt|scratch)/[\w.-]+")
EXAMPLES = ("/home/u",)


def test_no_file_names_a_folder_of_a_developers_machine() -> None:
    found = []
    for name in tracked():
        path = ROOT / name
        if path.suffix in (".safetensors", ".bin", ".gz", ".png") or name == "tests/test_repo.py":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for match in OF_A_MACHINE.finditer(text):
            if match[0] not in EXAMPLES:
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: {match[0]}")
    assert found == []


def test_no_comment_puts_work_off() -> None:
    """A marker of unfinished work in a comment is a stub that nobody will find again."""
    found = []
    for package in SOURCE:
        for path in python_files(package):
            with path.open("rb") as file:
                for token in tokenize.tokenize(file.readline):
                    if token.type == tokenize.COMMENT and re.search(
                        r"\b(TODO|FIXME|XXX|HACK)\b", token.string
                    ):
                        found.append(f"{path.relative_to(ROOT)}:{token.start[0]}")
    assert found == []
