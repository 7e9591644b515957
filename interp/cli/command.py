"""The command line `hookscope`, or `python -m interp`.

The commands are `report`, `points`, `lens`, `patch`, `features`, `trace`, `generate`, `harvest` and
`verify`.
"""

import argparse
import contextlib
import io
import platform
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

import torch

from hooks import HookError, __version__
from hooks.base import strict_json
from interp.cli.common import OPTIONS, add_options, require_one_format
from interp.json_form import form
from interp.shadowed import require_own


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C.

    The command `verify` also returns 1 or 3 if the claim does not hold.

    Raises:
        SystemExit: with status 2 if the arguments are wrong.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        print(_versions(options.json))
        return 0
    if options.command is None:
        parser.error("a command is needed: " + ", ".join(OPTIONS["commands"]))
    try:
        require_own("models")
        require_one_format(options)
        status = import_module(f"interp.cli.{options.command}").run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The program that reads the output has ended, for example `head` in `hookscope ... | head`.
        return 1
    except (OSError, ValueError, TypeError, ImportError, HookError) as error:
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return status or 0


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="hookscope", description="Looks inside a language model.")
    parser.add_argument(
        "--version", action="store_true", help="show the versions that a report of an error needs"
    )
    parser.add_argument("--json", action="store_true", help="show them as JSON")
    commands = parser.add_subparsers(metavar="command", dest="command")
    for name, about in OPTIONS["commands"].items():
        command = commands.add_parser(
            name,
            help=about["help"],
            description=about["description"],
            epilog=f"example: hookscope {about['example']}",
        )
        if "text" in about:
            text = command.add_mutually_exclusive_group(required=True)
            text.add_argument("--prompt", metavar="TEXT", help=about["text"])
            add_options(text, OPTIONS["text"])
        of_results = OPTIONS["result"] if "prints_result" in about else {}
        for table in (about["options"], OPTIONS["model"], of_results):
            add_options(command, table)
    return parser


def _versions(as_json: bool) -> str:
    """Return the versions of this package, of Python and of the libraries that numbers depend on,
    and the device.
    """
    versions = {"hookscope": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "numpy", "safetensors"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    is_cuda = torch.cuda.is_available()
    versions["device"] = torch.cuda.get_device_name() if is_cuda else "cpu"
    versions["system"] = platform.platform()
    if as_json:
        return strict_json.dumps(form("Versions", {}, versions), indent=2)
    return ", ".join(f"{name} {version}" for name, version in versions.items())
