"""What `ci render` and `ci select` have in common: how the steps of a pipeline are to be made.

Receives the command line as plain values; returns a `PlanRequest`, and the same options as
arguments, because a rendered pipeline calls `evalsuite ci select` with them. The options are
declared in `evalsuite/cli_ci.py`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from evalsuite.ci.plan import PIPELINES, PlanRequest
from evalsuite.errors import ConfigError


@dataclass(frozen=True)
class StepOptions:
    """Options of both commands.

    Attributes:
        configs: `--config` values, () for every `config-<GPU pool>.txt`.
        root: Folder of the suites, "" to find it.
        setup: Commands that install the suite, () for this repository's own.
        run_args: More arguments of `evalsuite run`, as one text.
        retries: Further attempts after an infrastructure error.
        is_accuracy_soft: Whether a missed threshold is shown without failing the pipeline.
        watch: More paths that every job hangs on, for the choice by changed files.
    """

    configs: tuple[str, ...] = ()
    root: str = ""
    setup: tuple[str, ...] = ()
    run_args: str = ""
    retries: int = 1
    is_accuracy_soft: bool = False
    watch: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The options that are not the defaults, as arguments."""
        argv: list[str] = []
        named = (("--config", self.configs), ("--setup", self.setup), ("--watch", self.watch))
        for option, values in named:
            for value in values:
                # Joined where the value could be taken for an option, as `!docs` never is.
                argv += [f"{option}={value}"] if value.startswith("-") else [option, value]
        argv += ["--configs-root", self.root] if self.root else []
        argv += [f"--run-args={self.run_args}"] if self.run_args else []
        argv += ["--retries", str(self.retries)] if self.retries != 1 else []
        argv += ["--soft-fail-accuracy"] if self.is_accuracy_soft else []
        return argv

    def request(
        self, pipelines: tuple[str, ...] = PIPELINES, only: Collection[str] | None = None
    ) -> PlanRequest:
        """What `plan.py` builds steps from.

        Raises:
            ConfigError: A value that cannot be meant.
        """
        if not 0 <= self.retries <= 10:
            raise ConfigError(f"--retries {self.retries}: from 0 to 10, which Buildkite allows")
        try:
            run_args = tuple(shlex.split(self.run_args))
        except ValueError as error:
            raise ConfigError(f"--run-args {self.run_args!r}: {error}") from error
        return PlanRequest(
            configs=self.configs,
            root=Path(self.root) if self.root else None,
            setup=self.setup,
            run_args=run_args,
            num_retries=self.retries,
            is_accuracy_soft=self.is_accuracy_soft,
            pipelines=pipelines,
            only=only,
            select_args=tuple(self.argv()),
        )
