"""The command line `hookscope`, or `python -m interp`.

The commands are `report`, `points`, `lens`, `patch`, `features`, `trace`, `generate`, `harvest` and
`verify`.
"""

import argparse
import contextlib
import io
import itertools
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

import torch

from hooks import HookError, __version__
from hooks.base import strict_json, unknown_name
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
    arguments = sys.argv[1:] if arguments is None else arguments
    parser, commands = _parsers()
    _require_known_options(arguments, parser, commands)
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


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parser of each command by its name."""
    parser = argparse.ArgumentParser(prog="hookscope", description="Looks inside a language model.")
    parser.add_argument(
        "--version", action="store_true", help="show the versions that a report of an error needs"
    )
    parser.add_argument("--json", action="store_true", help="show them as JSON")
    subparsers = parser.add_subparsers(metavar="command", dest="command")
    commands = {}
    for name, about in OPTIONS["commands"].items():
        command = subparsers.add_parser(
            name,
            help=about["help"],
            description=about["description"],
            epilog=f"example: hookscope {about['example']}",
        )
        if "text" in about:
            text = command.add_mutually_exclusive_group(required=True)
            text.add_argument("--prompt", metavar="TEXT", help=about["text"])
            add_options(text, OPTIONS["text"])
        for table in _tables_of(name):
            add_options(command, table)
        commands[name] = command
    return parser, commands


def _tables_of(command: str) -> list[Mapping[str, Any]]:
    """Return the tables with the options of a command, except the options of its text."""
    about = OPTIONS["commands"][command]
    of_results = OPTIONS["result"] if "prints_result" in about else {}
    return [about["options"], OPTIONS["model"], of_results]


def _require_known_options(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser,
    commands: Mapping[str, argparse.ArgumentParser],
) -> None:
    """Check that all options exist.

    `argparse` itself checks first whether a required option is missing, and then stops. If the user
    misspelt the option, this message would hide the mistake.

    Args:
        arguments: the arguments of the command line.
        parser: the parser of the command line.
        commands: the parser of each command.

    Raises:
        SystemExit: if an option is unknown, with status 2. The error names close matches.
    """
    known = ["-h", "--help", "--version", "--json"]
    what = "option"
    before = ""
    for argument in itertools.takewhile(lambda part: part != "--", arguments):
        name = argument.partition("=")[0]
        if name in commands and what == "option":
            parser = commands[name]
            what = f"option of hookscope {name}"
            of_text = ["--prompt", *OPTIONS["text"]] if "text" in OPTIONS["commands"][name] else []
            known = ["-h", "--help", *of_text, *itertools.chain.from_iterable(_tables_of(name))]
        # `argparse` accepts the first letters of an option. After an option, it reads a text with a
        # space as the value of the option, even if the text begins with `-`.
        is_value = " " in name or (" " in argument and before.startswith("-"))
        is_option = re.match("--?[a-zA-Z]", name) is not None and not is_value
        if is_option and not any(option.startswith(name) for option in known):
            parser.error(str(unknown_name(name, known, what)))
        before = argument


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
