"""`configs/hardware.yaml` -> `Pool`: what a pool of machines has and how CI reaches it.

Receives the folder that holds the configs, returns frozen pools by name. What this machine
is, is `machine.py`; what a job needs of a pool is `jobs.py` and `capacity.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator

from evalsuite.ci.templates import providers
from evalsuite.config_faults import describe_all
from evalsuite.config_types import Strict, between
from evalsuite.errors import ConfigError, Problem
from evalsuite.yaml_loader import Document, load_document

FILE_NAME = "hardware.yaml"
# No dash: list names are split at dashes to find the pool.
_POOL_NAME = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True)
class Pool:
    """One pool of equal machines.

    Attributes:
        name: "b200", "h100", "cpu", ... as in `config-<name>.txt`.
        arch: "sm100", "sm90", "gfx942", "cpu", ...
        num_gpus: Accelerators per node; 0 for a CPU pool.
        memory_gib: Memory of one accelerator in GiB (of the host for a CPU pool).
        vendor: "nvidia", "amd", "intel", "google" or "cpu".
        ci: Provider -> its routing: {"buildkite": {"queue": ...}, "github": {"runs_on": [...]}}.
        timeout_minutes: Upper limit of one CI step on this pool.
        aliases: Other names that a list may use.
        device_names: Words by which the driver names the accelerator ("H100").
    """

    name: str
    arch: str
    num_gpus: int
    memory_gib: float
    vendor: str
    ci: dict[str, dict[str, object]]
    timeout_minutes: int
    aliases: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()


def _known_providers(ci: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    known = providers()
    for provider in ci:
        if provider not in known:
            raise ValueError(f"{provider!r} is no CI provider; known: {', '.join(known)}")
    return ci


class _Stanza(Strict):
    """One pool as the file writes it."""

    arch: Annotated[str, Field(min_length=1)]
    gpus_per_node: Annotated[int, between(0, 1024)]
    memory_gib: Annotated[float, between(1, 1_000_000)]
    vendor: Literal["nvidia", "amd", "intel", "google", "cpu"]
    timeout_minutes: Annotated[int, between(1, 7 * 24 * 60)]
    ci: Annotated[dict[str, dict[str, object]], AfterValidator(_known_providers)] = Field(
        default_factory=dict
    )
    aliases: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()

    @field_validator("aliases", "device_names", mode="before")
    @classmethod
    def _read_names(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Hardware:
    """Pools by name, in file order, and what is wrong with the file."""

    pools: dict[str, Pool] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def find(self, name: str) -> Pool | None:
        """The pool of this name or alias."""
        for pool in self.pools.values():
            if name == pool.name or name in pool.aliases:
                return pool
        return None

    def pool_of_list(self, file_name: str) -> Pool | None:
        """The first known pool name after `config-` in a list's name, None if there is none."""
        stem = file_name.removesuffix(".txt")
        if not stem.startswith("config-"):
            return None
        for word in stem.removeprefix("config-").split("-"):
            pool = self.find(word)
            if pool is not None:
                return pool
        return None


def read_hardware(path: Path, display: str = "") -> Hardware:
    """Read and check a hardware file; faults are returned, never raised."""
    document = load_document(path, display)
    problems = list(document.problems)
    if not isinstance(document.value, dict):
        if not problems:
            problems.append(Problem("error", "holds no pools", document.file, 1))
        return Hardware({}, problems)
    pools: dict[str, Pool] = {}
    owners: dict[str, str] = {}
    for name, stanza in document.value.items():
        pool, faults = _read_stanza(name, stanza, document)
        problems += faults
        if pool is None:
            continue
        pools[name] = pool
        for word in (name, *pool.aliases):
            if word in owners:
                message = f"{word!r} already names pool {owners[word]!r}; a name has one pool"
                problems.append(_at(document, name, message))
            owners[word] = name
    return Hardware(pools, problems)


def load_hardware(path: Path) -> Hardware:
    """Read and check a hardware file.

    Raises:
        ConfigError: With every problem of the file.
    """
    hardware = read_hardware(path)
    if hardware.problems:
        raise ConfigError(hardware.problems)
    return hardware


def _at(document: Document, name: str, message: str) -> Problem:
    return Problem("error", message, document.file, document.line((name,)), name)


def _read_stanza(
    name: str, stanza: object, document: Document
) -> tuple[Pool | None, list[Problem]]:
    if name.startswith("x-") or name in document.holders:
        return None, []
    if not _POOL_NAME.fullmatch(name):
        message = f"{name!r} is no pool name; use small letters, digits and _"
        return None, [_at(document, name, message)]
    if not isinstance(stanza, dict):
        return None, [_at(document, name, "a pool is a mapping: arch, gpus_per_node, ...")]
    try:
        read = _Stanza.model_validate(stanza)
    except ValidationError as error:
        fields = list(_Stanza.model_fields)
        return None, describe_all(error.errors(), document, fields, (name,))
    if (read.vendor == "cpu") != (read.gpus_per_node == 0):
        message = f"vendor {read.vendor} with gpus_per_node {read.gpus_per_node} cannot be meant"
        return None, [_at(document, name, message)]
    return Pool(
        name=name,
        arch=read.arch,
        num_gpus=read.gpus_per_node,
        memory_gib=read.memory_gib,
        vendor=read.vendor,
        ci=read.ci,
        timeout_minutes=read.timeout_minutes,
        aliases=read.aliases,
        device_names=read.device_names,
    ), []
