"""What the documents quote exists: commands and their options, lists, jobs, files, headings.

Commands are those of fenced blocks and of inline code. A fenced one is parsed as it stands; of an
inline one, which may be a form (`evalsuite rerun --failed RUN`), the options are looked up.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from evalsuite.cli import app
from evalsuite.names import known

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
# A word that stands for something of the reader's: RUN-A, <time>-<id>, i/n, ...
PLACEHOLDER = re.compile(r"[A-Z0-9/_.\-]*[A-Z][A-Z0-9/_.\-]*|.*[<>…].*|\.\.\.|i/n")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
# Benches that hand what they do not know to the server.
PASSED_ON = (("bench", "engine"), ("bench", "startup"))
PROGRAMS = ("evalsuite", "moeserve", "pytest", "make")


@dataclass(frozen=True)
class Quoted:
    """A command of a document."""

    file: str
    line: int
    words: tuple[str, ...]
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {shlex.join(self.words)}"


@cache
def documents() -> tuple[str, ...]:
    done = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = done.stdout.split()
    if not names:  # not a clone
        found = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
        names = [str(path.relative_to(ROOT)) for path in found]
    return tuple(name for name in sorted(names) if (ROOT / name).is_file())


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def words_of(line: str) -> tuple[str, ...]:
    """Words of a command of ours, () for anything else."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:
        return ()
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    ends = (index for index, word in enumerate(words) if word in ("&", "|", "&&", ">", ";"))
    words = words[: next(ends, len(words))]
    is_module = words[:2] == ["python", "-m"] and len(words) > 2
    if is_module and words[2] == "pytest":
        return tuple(words[2:])
    if is_module and words[2].partition(".")[0] in ("evalsuite", "moeserve"):
        return tuple(words)
    return tuple(words) if words and words[0] in PROGRAMS and len(words) > 1 else ()


def quoted() -> Iterator[Quoted]:
    for name in documents():
        text = text_of(name)
        for fence in FENCE.finditer(text):
            block = fence[2].replace("\\\n", " ".ljust(2))
            start = text.count("\n", 0, fence.start(2)) + 1
            for offset, line in enumerate(block.splitlines()):
                if words := words_of(line):
                    yield Quoted(name, start + offset, words, True)
        prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
        for code in INLINE.finditer(prose):
            if words := words_of(code[1]):
                yield Quoted(name, prose.count("\n", 0, code.start()) + 1, words, False)


ALL = tuple(quoted())


def of(*programs: str) -> list[Quoted]:
    return [command for command in ALL if command.words[0] in programs]


def options_in(words: tuple[str, ...]) -> list[str]:
    return [
        word.partition("=")[0]
        for word in words
        if re.match(r"--?[A-Za-z]", word) and not (word[1] != "-" and len(word) > 3)
    ]


def is_placeholder(word: str) -> bool:
    return PLACEHOLDER.fullmatch(word) is not None


def test_commands_are_found() -> None:
    """The reading itself: a document that quotes nothing would pass everything below."""
    assert len(ALL) > 60
    assert {"README.md", "docs/running.md", "docs/migration.md"} <= {c.file for c in ALL}
    assert {c.words[0] for c in ALL} == {*PROGRAMS, "python"}
    assert words_of("A=1 evalsuite run x  # why") == ("evalsuite", "run", "x")
    assert words_of("moeserve bench moe &") == ("moeserve", "bench", "moe")
    assert words_of("evalsuite/") == words_of("pip install x") == ()


def resolve(words: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The (sub)command of `evalsuite ...`, and what is left for it."""
    command: Any = typer.main.get_command(app)
    rest = list(words[1:])
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"no such command: {name}"
        command = command.commands[name]
    return command, rest


@pytest.mark.parametrize("command", of("evalsuite"), ids=str)
def test_commands_of_the_suite_parse(command: Quoted) -> None:
    found, rest = resolve(command.words)
    if command.is_whole:
        found.make_context("x", [word for word in rest if word != "..."])
        return
    names = {"--help", "-h"} | {name for option in found.params for name in option.opts}
    names |= {name for option in found.params for name in option.secondary_opts}
    assert [option for option in options_in(tuple(rest)) if option not in names] == []


def test_an_option_that_is_not_there_would_be_found() -> None:
    found, rest = resolve(("evalsuite", "run", "--no-such-option", "x"))
    with pytest.raises(Exception, match="no-such-option"):
        found.make_context("x", rest)


def values_of(words: tuple[str, ...], option: str) -> list[str]:
    return [value for at, value in enumerate(words[1:]) if words[at] == option]


@pytest.mark.parametrize(
    "command", [c for c in of("evalsuite", "pytest") if "--configs-root" not in c.words], ids=str
)
def test_lists_jobs_engines_and_pools_exist(command: Quoted) -> None:
    words = command.words
    for value in values_of(words, "--config"):
        if not is_placeholder(value) and "/" not in value:
            assert list(ROOT.glob(f"configs/*/{value}")), value
    for value in values_of(words, "--engine"):
        assert is_placeholder(value) or value in known("engine")
    if words[:2] == ("evalsuite", "run") and len(words) > 2 and not words[2].startswith("-"):
        job = words[2].removesuffix(".yaml").removeprefix("configs/")
        assert is_placeholder(job) or list(ROOT.glob(f"configs/**/{job}.yaml")), job
    if words[0] == "pytest":
        paths = [word for word in words[1:] if "/" in word and not word.startswith("-")]
        assert all((ROOT / path.partition("::")[0]).exists() for path in paths)


@cache
def help_of(*words: str) -> frozenset[str]:
    """Options that a command's own help names; run in this process, torch is imported once."""
    if words[0] == "pytest":
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "evalsuite", "--help"],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        return frozenset(OPTION.findall(done.stdout))
    module, argv = ("moeserve", words[1:]) if words[0] == "moeserve" else (words[2], ())
    out = io.StringIO()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # runpy: the module was imported before
        patch.setattr(sys, "argv", [module, *argv, "--help"])
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    found = frozenset(OPTION.findall(out.getvalue()))
    assert len(found) > 2, f"{shlex.join(words)} --help prints no help"
    return found


def head_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """The part that says which command it is."""
    if words[0] == "python":
        return words[:3]
    if words[0] == "moeserve":
        return {"bench": words[:3], "backends": words[:2], "repro": words[:2]}.get(
            words[1], words[:1]
        )
    return words[:1]


@pytest.mark.parametrize("command", of("moeserve", "python", "pytest"), ids=str)
def test_options_of_the_other_commands_are_in_their_help(command: Quoted) -> None:
    head = head_of(command.words)
    if command.words[:2] == ("moeserve", "bench") and is_placeholder(head[-1]):
        pytest.skip("a form of any bench")
    asked = options_in(command.words[len(head) :])
    known_options = help_of(*head)
    if head[1:] in PASSED_ON:
        known_options |= help_of("moeserve")
    assert [option for option in asked if option not in known_options] == []


@pytest.mark.parametrize("command", of("make"), ids=str)
def test_verbs_of_make_exist(command: Quoted) -> None:
    verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    assert [verb for verb in asked if verb not in verbs] == []


def slugs(text: str) -> set[str]:
    """Anchors of a document's headings, as the forges make them."""
    prose = FENCE.sub("", text)
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?) *#* *$", prose, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 1
        while (numbered := slug if number == 1 else f"{slug}-{number - 1}") in found:
            number += 1
        found.add(numbered)
    return found


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name: str) -> None:
    dead = []
    for target in LINK.findall(FENCE.sub("", text_of(name))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        is_there = file.exists()
        if is_there and anchor:
            is_there = anchor in slugs(file.read_text(encoding="utf-8"))
        if not is_there:
            dead.append(target)
    assert dead == []
