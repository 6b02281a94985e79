"""Pipelines -> the files of each provider, and whether those on disk are up to date.

Receives `Pipeline`s, returns `Rendered` texts. The templates use delimiters that neither a
provider nor a shell has (`[= value =]`, `[% block %]`, `[# comment #]`), and an undefined name
in one is an error. What is rendered is `plan.py`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2
import yaml

from evalsuite.ci.model import GRACE_S, SETUP_LIMIT_S, Pipeline, Step
from evalsuite.ci.templates import output_path, template_folder, template_name
from evalsuite.errors import ConfigError

# What would be filled in by a provider if it came from a name that somebody chose.
_FOREIGN = ("${{", "{{")


@dataclass(frozen=True)
class Rendered:
    """One file.

    Attributes:
        path: Relative to the repository.
        text: Its whole content.
    """

    path: str
    text: str


def generated_header(command: str) -> str:
    """The first lines of a file that stays, with the command that renders it again."""
    return "\n".join(
        [
            "# Generated from configs/ and ci/providers/ by:",
            f"#   {command}",
            "# Do not edit: `evalsuite ci render --check` fails where this file differs.",
        ]
    )


def render(provider: str, pipeline: Pipeline, header: str) -> Rendered:
    """Write one pipeline in a provider's words.

    Args:
        provider: A file of `ci/providers/`.
        pipeline: What to write.
        header: Comment lines for its top.

    Raises:
        ConfigError: Unknown provider, a pool that it cannot reach, a text that it would expand,
            or a template that does not give YAML.
    """
    environment = _environment(provider)
    for step in pipeline.steps:
        _refuse_foreign(step)
    try:
        text = environment.get_template(template_name(provider)).render(
            pipeline=pipeline, header=header
        )
    except jinja2.TemplateError as error:
        raise ConfigError(f"ci/providers/{template_name(provider)}: {error}") from error
    path = output_path(provider, pipeline.name)
    try:
        yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{template_name(provider)} gives no YAML: {error}") from error
    return Rendered(path, text)


def matrix(provider: str, pipeline: Pipeline) -> list[dict[str, object]]:
    """Rows for a provider that makes jobs from data while it runs, by `<provider>.matrix.j2`.

    Raises:
        ConfigError: As `render`.
    """
    environment = _environment(provider)
    for step in pipeline.steps:
        _refuse_foreign(step)
    name = f"{provider}.matrix.j2"
    try:
        text = environment.get_template(name).render(pipeline=pipeline)
    except jinja2.TemplateError as error:
        raise ConfigError(f"ci/providers/{name}: {error}") from error
    rows: list[dict[str, object]] = json.loads(text)
    return rows


def _environment(provider: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        block_start_string="[%",
        block_end_string="%]",
        variable_start_string="[=",
        variable_end_string="=]",
        comment_start_string="[#",
        comment_end_string="#]",
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # the output is YAML; every text goes through `quoted`
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )

    def script(step: Step, attempts: int = 1, after: str = "", soften: str = "") -> str:
        return (
            environment.get_template("step.sh.j2")
            .render(
                step=step,
                attempts=attempts,
                after=after,
                soften=soften,
                setup_limit_s=SETUP_LIMIT_S,
                grace_s=GRACE_S,
            )
            .rstrip()
        )

    def routing(step: Step) -> Mapping[str, object]:
        found = step.pool.ci.get(provider)
        if not found:
            raise ConfigError(
                f"hardware.yaml: pool {step.pool.name} has no ci.{provider}; say how it is reached"
            )
        return found

    environment.globals.update(script=script, routing=routing)
    environment.filters.update(quoted=quoted, dollars=lambda text: text.replace("$", "$$"))
    return environment


def quoted(value: object) -> str:
    """A value as YAML flow text: JSON, which every YAML reader reads as the same value."""
    return json.dumps(value, ensure_ascii=False)


def _refuse_foreign(step: Step) -> None:
    """Names of files and pools end up in commands; none may hold a provider's own syntax."""
    for text in (step.command, step.label, *step.setup, *step.env.values()):
        for mark in _FOREIGN:
            if mark in text:
                raise ConfigError(f"step {step.key}: {text!r} holds {mark!r}, which CI expands")
        if not text.isprintable():
            raise ConfigError(f"step {step.key}: {text!r} holds a control character")


def write(rendered: Iterable[Rendered], out: Path) -> list[Path]:
    """Write the files below `out`; those that are right already are left alone."""
    written = []
    for item in rendered:
        path = out / item.path
        if not path.is_file() or path.read_text(encoding="utf-8") != item.text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(item.text, encoding="utf-8", newline="\n")
            written.append(path)
    return written


def stale(rendered: Iterable[Rendered], out: Path) -> list[str]:
    """A unified diff, from the disk to what should be there, for each file that differs."""
    diffs = []
    for item in rendered:
        path = out / item.path
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if old != item.text:
            name = item.path if path.is_file() else f"{item.path} (absent)"
            lines = difflib.unified_diff(
                old.splitlines(), item.text.splitlines(), name, "rendered now", lineterm=""
            )
            diffs.append("\n".join(lines))
    return diffs
