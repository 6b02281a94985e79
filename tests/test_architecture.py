"""Architecture: the order of imports, what imports no torch, the `kernels` trap."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from source_tree import ROOT, SOURCE, modules

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
