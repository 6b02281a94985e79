"""Architecture: import order, sizes, the environment, the `kernels` trap, files that must agree."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from evalsuite.validate import survey

ROOT = Path(__file__).parents[1]
SOURCE = {"evalsuite": ROOT / "evalsuite", "moeserve": ROOT / "kernels" / "moeserve"}

# The job line: what stands further left never imports, directly or through helpers, what stands
# further right. A package stands for all its modules; modules that are not named are helpers.
JOB_LINE = (
    ("errors",),
    ("hardware",),
    ("config",),
    ("lists",),
    ("jobs",),
    ("evidence",),  # the level of proof is part of what an engine answers
    ("engines",),
    ("server",),
    ("client",),
    ("tasks",),
    ("ledger",),
    ("evaluators",),
    ("stats",),
    ("verdict",),
    ("baseline",),
    ("gates",),
    ("judge",),
    ("report",),
    ("pipeline",),
    ("executors",),
    ("session",),
    ("cli", "cli_run", "plugin", "pytest_run"),
)
# CI is made from jobs: it needs the numbers of the exit codes, and nothing that runs anything.
NOT_FOR_CI = ("engines", "server", "client", "pipeline", "executors", "session", "report")

TOKEN_LINE = (
    ("errors", "parallel"),
    ("triton_kernels",),
    ("moe",),
    ("layers",),
    ("models",),
    ("runner",),
    ("engine",),
    ("server",),
)
# Contracts of the engine that others hold: values without torch and without the engine.
TOKEN_CONTRACTS = ("engine.request", "engine.client", "engine.config")

# Imports inside functions that look ahead on purpose, with the reason.
LOOKS_AHEAD = {
    ("evalsuite.names", "evalsuite.tasks"): "a task's file names its tasks itself",
    ("evalsuite.config_checks", "evalsuite.tasks"): "a metric is checked against its task",
    ("evalsuite.plugin", "evalsuite.pytest_run"): "other people's pytest runs pay nothing for it",
}

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
}

MAX_LINES = 300
MAX_LINES_OF = {"kernels/moeserve/triton_kernels/": 400, "tests/": 500}
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


def python_files(package: str) -> list[Path]:
    return sorted(SOURCE[package].rglob("*.py"))


def module_name(package: str, path: Path) -> str:
    parts = (package, *path.relative_to(SOURCE[package]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(package: str) -> Mapping[str, ast.Module]:
    return {
        module_name(package, path): ast.parse(path.read_text(encoding="utf-8"))
        for path in python_files(package)
    }


def is_type_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.dump(node.test)


def imports(
    tree: ast.AST, *, is_lazy: bool = False, in_function: bool = False
) -> Iterator[tuple[str, str]]:
    """(module, name or "") of imports at the top of a file, or (`is_lazy`) inside its functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_type_checking(node):
            continue
        if isinstance(node, ast.Import) and in_function == is_lazy:
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and in_function == is_lazy:
            yield from ((node.module or "", alias.name) for alias in node.names)
        else:
            deeper = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(node, is_lazy=is_lazy, in_function=deeper)


@cache
def edges(package: str, *, is_lazy: bool = False) -> dict[str, set[str]]:
    """Module -> modules of the same package that it imports."""
    known = modules(package)
    found: dict[str, set[str]] = {}
    for name, tree in known.items():
        targets = set()
        for module, attribute in imports(tree, is_lazy=is_lazy):
            if module.split(".")[0] != package:
                continue
            whole = f"{module}.{attribute}"
            targets.add(whole if whole in known else module)
        found[name] = targets - {name}
    return found


def reached(graph: Mapping[str, set[str]], start: str) -> Mapping[str, list[str]]:
    """Module -> the way there, for everything that importing `start` imports."""
    ways = {start: [start]}
    queue = [start]
    while queue:
        here = queue.pop()
        for target in sorted(graph.get(here, ())):
            if target not in ways:
                ways[target] = [*ways[here], target]
                queue.append(target)
    return ways


def rank(module: str, package: str, order: tuple[tuple[str, ...], ...]) -> int | None:
    below = module.removeprefix(f"{package}.")
    for position, names in enumerate(order):
        if any(below == name or below.startswith(f"{name}.") for name in names):
            return position
    return None


def against_the_order(
    graph: Mapping[str, set[str]],
    order: tuple[tuple[str, ...], ...],
    contracts: tuple[str, ...] = (),
) -> list[str]:
    package = next(iter(graph)).split(".")[0]
    free = {f"{package}.{name}" for name in contracts}
    faults = []
    for module in graph:
        own = rank(module, package, order)
        if own is None or module in free:
            continue
        for target, way in reached(graph, module).items():
            other = rank(target, package, order)
            if other is not None and other > own and target not in free:
                faults.append(" -> ".join(way))
    return faults


def test_the_job_line_is_imported_in_one_direction() -> None:
    assert against_the_order(edges("evalsuite"), JOB_LINE) == []


def test_the_token_line_is_imported_in_one_direction() -> None:
    assert against_the_order(edges("moeserve"), TOKEN_LINE, TOKEN_CONTRACTS) == []


def test_a_step_back_is_found_through_a_helper() -> None:
    order = (("a",), ("b",))
    graph = {"p.a": {"p.helper"}, "p.helper": {"p.b.inner"}, "p.b.inner": set(), "p.b": {"p.a"}}
    assert against_the_order(graph, order) == ["p.a -> p.helper -> p.b.inner"]
    assert against_the_order(graph, order, ("b.inner",)) == []
    assert sorted(edges("evalsuite")["evalsuite.errors"]) == []
    assert "evalsuite.errors" in edges("evalsuite")["evalsuite.jobs"]


@pytest.mark.parametrize("package", sorted(SOURCE))
def test_the_named_steps_exist(package: str) -> None:
    order = JOB_LINE if package == "evalsuite" else TOKEN_LINE
    for names in order:
        for name in names:
            assert f"{package}.{name}" in modules(package)


@pytest.mark.parametrize("package", sorted(SOURCE))
def test_no_two_modules_import_each_other(package: str) -> None:
    graph = edges(package)
    circles = [
        f"{module} <-> {target}"
        for module in graph
        for target in reached(graph, module)
        if target != module and module in reached(graph, target)
    ]
    assert circles == []


def test_imports_that_look_ahead_are_known_ones() -> None:
    lazy = edges("evalsuite", is_lazy=True)
    users: dict[str, set[int]] = {}
    for other in modules("evalsuite"):
        position = rank(other, "evalsuite", JOB_LINE)
        if position is not None:
            for module in reached(edges("evalsuite"), other):
                users.setdefault(module, set()).add(position)
    found = set()
    for module, targets in lazy.items():
        own = rank(module, "evalsuite", JOB_LINE)
        # Helpers count by the first step that they serve.
        if own is None:
            own = min(users.get(module, ()), default=len(JOB_LINE))
        for target in targets:
            other_rank = rank(target, "evalsuite", JOB_LINE)
            if other_rank is not None and other_rank > own:
                found.add((module, target))
    assert found - set(LOOKS_AHEAD) == set()


def test_ci_reads_jobs_and_runs_nothing() -> None:
    graph = edges("evalsuite")
    for module in graph:
        if module.startswith("evalsuite.ci.") or module == "evalsuite.cli_ci":
            for target, way in reached(graph, module).items():
                below = target.removeprefix("evalsuite.").split(".")[0]
                assert below not in NOT_FOR_CI, " -> ".join(way)


@pytest.mark.parametrize("name", TOKEN_CONTRACTS)
def test_contracts_hold_no_torch(name: str) -> None:
    graph = edges("moeserve")
    for module, way in reached(graph, f"moeserve.{name}").items():
        outside = {imported.split(".")[0] for imported, _ in imports(modules("moeserve")[module])}
        assert outside.isdisjoint({"torch", "triton", "transformers"}), " -> ".join(way)


def test_the_front_imports_no_torch_and_no_transformers() -> None:
    graph = edges("moeserve")
    for module in [name for name in graph if name.startswith("moeserve.server")]:
        for target, way in reached(graph, module).items():
            outside = {name.split(".")[0] for name, _ in imports(modules("moeserve")[target])}
            assert outside.isdisjoint({"torch", "triton", "transformers"}), " -> ".join(way)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "names",
    [
        "evalsuite",
        "evalsuite.cli, evalsuite.cli_config, evalsuite.validate, evalsuite.plugin",
        "evalsuite.session, evalsuite.pytest_run, evalsuite.executors.local",
        "moeserve.server.app, moeserve.server.launch, moeserve.args",
    ],
)
def test_these_import_no_torch_and_no_transformers(names: str) -> None:
    code = f"import sys, {names}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    assert run_python(code, PYTHONPATH=str(ROOT / "kernels")) == "[]"


def test_kernels_is_no_package() -> None:
    for folder in ("kernels", "ci", "tests", "configs"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_kernels_resolves_to_no_regular_package_of_ours() -> None:
    code = (
        "import importlib.util as u; s = u.find_spec('kernels');"
        "print('none' if s is None else s.origin or 'namespace')"
    )
    for path in ("", str(ROOT)):
        found = run_python(code, PYTHONPATH=path)
        assert found in ("none", "namespace") or "site-packages" in found


def test_transformers_models_import_with_the_root_first_on_the_path() -> None:
    assert importlib.metadata.version("transformers")
    code = (
        "import sys; from transformers import PreTrainedModel;"
        "print(sys.path[1], PreTrainedModel.__name__)"
    )
    assert run_python(code, PYTHONPATH=str(ROOT)) == f"{ROOT} PreTrainedModel"


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
