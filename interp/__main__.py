"""The command line: `hookscope report`, `points`, `lens`, `patch`, `features`, `trace`, `generate` and `harvest`, or `python -m interp report`."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hooks import HookError
from interp.cli import common, features, generate, harvest, lens, patch, points, report, trace

COMMANDS = {
    "report": report,
    "points": points,
    "lens": lens,
    "patch": patch,
    "features": features,
    "trace": trace,
    "generate": generate,
    "harvest": harvest,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 for an error, 130 for Ctrl-C.

    Raises:
        SystemExit: with status 2 if the arguments are wrong.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        _require_own_models()
        options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has stopped, as `head` does
        return 1
    except (OSError, ValueError, ImportError, HookError) as error:
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _require_own_models() -> None:
    origin = getattr(find_spec("models"), "origin", None)
    if not origin or Path(origin).parents[1] != Path(__file__).parents[1]:
        raise ImportError(
            f"the package `models` must be hookscope's; got {origin}: "
            "rename or move that one, or put hookscope before it on sys.path"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hookscope", description="Looks inside a language model.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, epilog=f"example: hookscope {module.EXAMPLE}"
        )
        if hasattr(module, "TEXT"):  # what its text is
            common.add_text(command, module.TEXT)
        module.add(command)
        common.add_model(command)
        if hasattr(module, "PRINTS"):  # its result, as text or JSON
            common.add_output(command)
        command.set_defaults(command=module.run)
    return parser


def _version() -> str:
    try:
        return f"hookscope {metadata.version('hookscope')}"
    except metadata.PackageNotFoundError:
        return "hookscope, not installed"


def script() -> int:
    """The installed command `hookscope`."""
    try:
        # See `interp/__init__.py`. A shell may also have told its background processes to ignore Ctrl-C.
        if ends := signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
        if ends:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        status = 130
    if status:  # at exit, Python would try again to write what it could not
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    sys.exit(script())
