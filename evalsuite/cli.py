"""The command line: `evalsuite ls | validate | run | rerun | new | data | doctor`.

Receives argv and the environment, returns the exit code; every command's work is in the module
it imports when it is called, so that `validate` starts in a moment. Exit codes are those of
`verdict.py`; a wrong option is 4, like any other thing the user must mend.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from evalsuite import __version__, cli_ci, cli_gate, cli_run, os_faults
from evalsuite.errors import ConfigError, EvalsuiteError, ServerError
from evalsuite.names import suggestion
from evalsuite.verdict import EXIT_INFRASTRUCTURE, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Accuracy evaluation of MoE servers: a YAML becomes a verdict.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SIGINT_STATUS = 130
# Older typer takes click's exceptions, newer brings its own; both derive from this one's base.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_EXIT_CODES = """Exit codes: 0 passed, 1 an accuracy failure, 2 interrupted, 4 usage or config,
5 nothing could run here, 75 only infrastructure errors (safe to retry), 76 inconclusive."""


@app.callback(invoke_without_command=True, epilog=_EXIT_CODES)
def _main(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> int:
    if version:
        print(f"evalsuite {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)
    return 0


@app.command()
def validate(
    paths: list[str] = typer.Argument(None, help="Folders, lists or YAMLs; default: all configs."),
    strict: bool = typer.Option(False, "--strict", help="Orphans and missing provenance too."),
    engine: str = typer.Option(None, "--engine", help="Check for this engine."),
    explain: str = typer.Option(None, "--explain", metavar="NAME", help="Print one resolved job."),
    configs_root: str = typer.Option(None, "--configs-root", help="Folder of the suites."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Repeat equal warnings."),
) -> int:
    """Check configs; exit 0 (notes and warnings allowed) or 4."""
    from evalsuite import cli_config

    return cli_config.validate(
        paths or [],
        strict=strict,
        engine=engine,
        explain=explain,
        root=configs_root,
        verbose=verbose,
    )


@app.command(name="ls")
def list_jobs(
    configs: list[str] = typer.Argument(None, help="Lists or YAMLs; default: all lists."),
    config: list[str] = typer.Option(None, "--config", help="The same, as for run."),
    engine: str = typer.Option(None, "--engine", help="List for this engine."),
    configs_root: str = typer.Option(None, "--configs-root", help="Folder of the suites."),
) -> int:
    """List jobs with their pools and needs."""
    from evalsuite import cli_config

    return cli_config.list_jobs(
        [*(config or []), *(configs or [])], root=configs_root, engine=engine
    )


@app.command(name="new")
def new_config(
    model: str = typer.Argument(help="Model id or folder."),
    backend: str = typer.Option(..., "--backend", help="MoE backend."),
    layout: str = typer.Option(..., "--layout", help="tp2, tp2-ep, dp2, dp2-ep, ..."),
    pool: str = typer.Option(..., "--pool", help="Pool whose list gets the line."),
    threshold: float = typer.Option(..., "--threshold", help="Expected accuracy."),
    suite: str = typer.Option("", "--suite", help="Folder below the configs."),
    provenance: str = typer.Option("", "--provenance", help="Where the threshold comes from."),
    engine: str = typer.Option("moeserve", "--engine", help="Engine."),
    task: str = typer.Option("gsm8k", "--task", help="Task; its shots and metric are written too."),
    tolerance: float = typer.Option(0.02, "--tolerance", help="What may be lost."),
    extra_args: str = typer.Option("", "--server-args", help="More server arguments."),
    name: str = typer.Option("", "--name", help="File name; built from the parts by default."),
    quant: str = typer.Option("BF16", "--quant", help="Number format in the file's name."),
    configs_root: str = typer.Option(None, "--configs-root", help="Folder of the suites."),
) -> int:
    """Write a valid YAML and add it to its list."""
    from evalsuite import cli_config
    from evalsuite.new_config import NewConfig

    asked = NewConfig(
        model=model,
        backend=backend,
        layout=layout,
        pool=pool,
        threshold=threshold,
        suite=suite,
        provenance=provenance,
        engine=engine,
        task=task,
        tolerance=tolerance,
        extra_args=extra_args,
        name=name,
        quant=quant,
    )
    return cli_config.new_config(asked, configs_root)


@app.command()
def data(
    action: str = typer.Argument(help="get"),
    name: str = typer.Argument(help="gsm8k"),
    data_dir: str = typer.Option(None, "--data-dir", help="Folder to put the files into."),
) -> int:
    """Fetch a data set's files, check their sha256 and cache them."""
    from pathlib import Path

    from evalsuite.cli_data import data_get
    from evalsuite.tasks.data import source_from

    if action != "get":
        raise ConfigError(f"data {action!r}; known: get")
    data_get(name, source_from(os.environ, Path(data_dir) if data_dir else None), say=print)
    return 0


@app.command()
def doctor() -> int:
    """Say what this machine can run and what is missing."""
    from evalsuite.doctor import report

    print("\n".join(report(os.environ)))
    return 0


cli_run.add_commands(app)
cli_gate.add_commands(app)
app.add_typer(cli_ci.app, name="ci")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process boundary, where exceptions become exit codes."""
    command = typer.main.get_command(app)
    try:
        code = command.main(
            args=list(sys.argv[1:] if argv is None else argv),
            prog_name="evalsuite",
            standalone_mode=False,
        )
        if code == _SIGINT_STATUS:
            # Some versions of typer turn Ctrl-C into a shell's status; ours is 2.
            print("interrupted", file=sys.stderr)
            return EXIT_INTERRUPTED
        return code if isinstance(code, int) else 0
    except _UsageError as error:
        return _usage(error)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return EXIT_USAGE
    except EvalsuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        is_config_fault = isinstance(error, ServerError) and error.is_config_fault
        return EXIT_USAGE if is_config_fault else EXIT_INFRASTRUCTURE
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os_faults.forget_stdout()
        return EXIT_INFRASTRUCTURE
    except OSError as error:
        explained = os_faults.explain(error)
        if explained is None:
            traceback.print_exc()
            return EXIT_INTERNAL
        print(explained[0], file=sys.stderr)
        return explained[1]
    except Exception:  # noqa: BLE001 - the process boundary
        traceback.print_exc()
        return EXIT_INTERNAL


def _usage(error: Exception) -> int:
    """Print a wrong option or command with the closest right one."""
    message = getattr(error, "format_message", lambda: str(error))()
    if possible := getattr(error, "possibilities", None):
        wrong = str(getattr(error, "option_name", ""))
        message = f"no such option: {wrong}{suggestion(wrong, possible)}"
    # What is missing cannot be guessed; where it is described can be said.
    place = getattr(getattr(error, "ctx", None), "command_path", "")
    if message.startswith("Missing") and place:
        message = f"{message.rstrip('.')}; see: {place} --help"
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
