"""List files -> which YAMLs are run, in order.

Receives a `--config` value and the folder of the suites, returns `ConfigList`s whose entries
are paths; faults are kept as `Problem`s with the line of the list. What a YAML holds is
`config.py`; which list stands for which pool is `hardware.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from evalsuite.errors import ConfigError, Problem
from evalsuite.hardware import FILE_NAME
from evalsuite.names import closest
from evalsuite.yaml_loader import NO_FILE, absence, read_text

YAML_SUFFIXES = (".yaml", ".yml")
# How lists are named; any other text file of a suite is none of ours.
LIST_PATTERNS = ("config*.txt", "models*.txt")
_GLOB = re.compile(r"[*?\[]")
_COMMENT = re.compile(r"(?:^|\s)#.*$")


@dataclass(frozen=True)
class Entry:
    """One YAML of a list.

    Attributes:
        path: The file; it exists.
        line: Line of the list that names it, 0 for a YAML given by itself.
    """

    path: Path
    line: int = 0


@dataclass(frozen=True)
class ConfigList:
    """One list as read.

    Attributes:
        path: The list file (or the YAML given by itself).
        suite: Folder name below `configs/`, the prefix of job ids.
        entries: In the order of the list, each file once.
        problems: What is wrong with the list.
    """

    path: Path
    suite: str
    entries: tuple[Entry, ...] = ()
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_bare(self) -> bool:
        """Whether this stands for a single YAML and no list."""
        return self.path.suffix in YAML_SUFFIXES


def configs_root(option: str | Path | None = None, cwd: Path | None = None) -> Path:
    """The folder of the suites: the option, else ./configs, else the one that was installed.

    Raises:
        ConfigError: The option names no folder, or there is none at all.
    """
    if option is not None:
        root = Path(option)
        if not root.is_dir():
            raise ConfigError(Problem("error", "--configs-root names no folder", str(root)))
        return root
    package = Path(__file__).resolve().parent
    here = (cwd or Path.cwd()) / "configs"
    # In a wheel the configs lie inside the package, in a checkout beside it.
    for root in (here, package / "configs", package.parent / "configs"):
        if (root / FILE_NAME).is_file() or (root == here and _has_lists(root)):
            return Path(os.path.relpath(root)) if root == here and cwd is None else root
    raise ConfigError("no folder of configs; name one with --configs-root")


def own_root(option: str | Path | None = None) -> Path:
    """The folder of the suites to write into: `configs_root`, but ./configs for the installed one.

    What is written among installed files is gone with the next version.

    Raises:
        ConfigError: As `configs_root`.
    """
    root = configs_root(option)
    return Path("configs") if option is None and is_installed(root) else root


def is_installed(path: Path) -> bool:
    """Whether a file or folder is a part of the installed package."""
    return path.resolve().is_relative_to(Path(__file__).resolve().parent)


def list_files(folder: Path) -> list[Path]:
    """The lists of one folder, by name."""
    return sorted({path for pattern in LIST_PATTERNS for path in folder.glob(pattern)})


def _has_lists(root: Path) -> bool:
    return root.is_dir() and bool(suite_folders(root))


def hardware_file(root: Path) -> Path:
    """`hardware.yaml` of the suites, else the installed one (a folder of others has none)."""
    own = root / FILE_NAME
    if own.is_file():
        return own
    package = Path(__file__).resolve().parent
    inside = package / "configs" / FILE_NAME
    return inside if inside.is_file() else package.parent / "configs" / FILE_NAME


def suite_folders(root: Path) -> list[Path]:
    """Folders below the root (and the root itself) that hold a list."""
    folders = [root, *(path for path in root.iterdir() if path.is_dir())]
    return sorted(path for path in folders if list_files(path))


def suite_name(folder: Path, root: Path) -> str:
    """Name of a suite: its path below the root, or the folder's name outside of it."""
    full, full_root = folder.resolve(), root.resolve()
    if full != full_root and full.is_relative_to(full_root):
        return full.relative_to(full_root).as_posix()
    return full.name


def resolve_lists(value: str, root: Path) -> list[ConfigList]:
    """Find what a `--config` value means.

    Args:
        value: A path (anything with a slash, or an existing file) of a list or a YAML; or a
            bare name, which means the file of that name in every suite that has it.
        root: Folder of the suites.

    Raises:
        ConfigError: Nothing of that name; names close ones.
    """
    if not value.strip():
        raise ConfigError("--config is empty; name a list such as config-cpu.txt")
    if "/" in value or os.sep in value or Path(value).is_file():
        for path in (Path(value), root / value, root.parent / value):
            if path.exists() and not path.is_dir():
                return [_read_any(path, root)]
        raise ConfigError(Problem("error", _nothing_named(Path(value)), value))
    found_paths = [f / value for f in suite_folders(root) if (f / value).exists()]
    if found_paths:
        return [_read_any(path, root) for path in found_paths]
    known = sorted({path.name for f in suite_folders(root) for path in list_files(f)})
    known_yamls = {path.name for f in suite_folders(root) for path in f.glob("*.yaml")}
    here = {path.name for path in Path().iterdir() if path.suffix == Path(value).suffix}
    near = closest(value, [*known, *known_yamls, *here])
    if Path(value).is_dir():
        raise ConfigError(Problem("error", _nothing_named(Path(value)), value))
    if (slashed := Path(value.replace("\\", "/"))).is_file():
        near = str(slashed)  # the way another system writes a path
    elsewhere = [f / value for f in sorted(root.iterdir()) if (f / value).is_file()]
    if elsewhere:
        near = str(elsewhere[0])  # its folder has no list by the name of one, and is no suite
    raise ConfigError(
        Problem(
            "error",
            f"no file {value!r} here, and no suite under {root} has it; "
            + (f"did you mean {near!r}? " if near else "")
            + f"lists: {_names(known)}",
        )
    )


def _nothing_named(path: Path) -> str:
    if path.is_dir():
        lists = [found.relative_to(path) for found in sorted(path.rglob("config*.txt"))]
        return f"is a folder; name one of its lists: {_names(map(str, lists))}"
    why = absence(path)
    if why != NO_FILE:
        return why
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = closest(path.name, siblings)
    return why + (f"; did you mean {path.parent / near}?" if near else "")


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _read_any(path: Path, root: Path) -> ConfigList:
    if path.name == FILE_NAME:
        raise ConfigError(Problem("error", "describes pools and is no job; name a list", str(path)))
    if path.suffix in YAML_SUFFIXES:
        return ConfigList(path, suite_name(path.parent, root), (Entry(path),))
    return read_list(path, root)


def read_list(path: Path, root: Path) -> ConfigList:
    """Read one list; faults are returned, never raised."""
    suite = suite_name(path.parent, root)
    text, problem = read_text(path, str(path))
    if problem is not None:
        return ConfigList(path, suite, problems=[problem])
    entries: dict[Path, Entry] = {}
    literal_lines: dict[Path, int] = {}
    problems: list[Problem] = []
    for line, raw in enumerate(text.splitlines(), start=1):
        name = _COMMENT.sub("", raw).strip()
        if not name:
            continue
        paths, fault = _expand(name, path.parent)
        for found in paths:
            if found in literal_lines and not _GLOB.search(name):
                fault = f"{name!r} is listed twice, first on line {literal_lines[found]}; remove it"
            if not _GLOB.search(name):
                literal_lines.setdefault(found, line)
            entries.setdefault(found, Entry(found, line))
        if fault:
            problems.append(Problem("error", fault, str(path), line))
    if not entries and not problems:
        message = "lists no config; a run of it would be green with nothing tested"
        problems.append(Problem("error", message, str(path), 1))
    return ConfigList(path, suite, tuple(entries.values()), problems)


def _expand(name: str, folder: Path) -> tuple[list[Path], str]:
    """Files that one line names, or the fault of the line."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if "\0" in name or ".." in parts or (parts and parts[0].startswith(("/", "~"))):
        return [], f"{name!r} leaves the folder of the list; name files below {folder}"
    if re.match(r"[A-Za-z]:", name):
        return [], f"{name!r} is an absolute path; name files below {folder}"
    if _GLOB.search(name):
        try:
            found = sorted(path for path in folder.glob("/".join(parts)) if path.is_file())
        except ValueError as error:
            return [], f"{name!r} is no pattern: {error}"
        yamls = [path for path in found if path.suffix in YAML_SUFFIXES]
        return yamls, "" if yamls else f"pattern {name!r} matches no YAML file"
    path = folder.joinpath(*parts)
    if path.suffix not in YAML_SUFFIXES:
        with_suffix = path.with_name(path.name + ".yaml")
        hint = f"; did you mean {name + '.yaml'!r}?" if with_suffix.is_file() else ""
        return [], f"{name!r} is no YAML file{hint or _one_name(name, folder)}"
    if not path.is_file() and (why := absence(path)) != NO_FILE:
        return [], f"{name!r} {why}"
    if not path.is_file():
        near = closest(name, [p.name for p in folder.glob("*.yaml")], cutoff=0.7)
        hint = f"; did you mean {near!r}?" if near else _one_name(name, folder)
        return [], f"no file {name!r} here{hint}"
    return [path], ""


def _one_name(name: str, folder: Path) -> str:
    """What to say of a line that holds more than one bare name, "" where it does not."""
    if name[0] in "\"'" and folder.joinpath(bare := name.strip("\"'")).is_file():
        return f"; write {bare} without quotes"
    words = [word for word in re.split(r"[\s,]+", name) if word]
    if len(words) > 1 and folder.joinpath(words[0]).is_file():
        return f"; one file name a line, and nothing after {words[0]!r}"
    return ""


def orphans(folder: Path, lists: Iterable[ConfigList]) -> list[Path]:
    """YAMLs of a suite's folder that none of its lists names."""
    listed = {entry.path.resolve() for found in lists for entry in found.entries}
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in YAML_SUFFIXES and path.name != FILE_NAME and path.resolve() not in listed
    )
