"""Functions that the examples share: options and their checks, texts, figures, and errors."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from hooks import UnknownNameError
from hooks.base import install_command
from interp import Result
from models.training.run import CHECKPOINT

VISIBLE = {"\n": "↵", " ": "·"}


class Parser(argparse.ArgumentParser):
    """A parser that prints the whole docstring as help, and errors of options in one line."""

    def __init__(self, description: str | None) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=kind)

    def error(self, message: str) -> NoReturn:
        """Print the message in one line, and end the program with the status 2."""
        self.exit(2, f"error: {message}; --help lists the options\n")


def figures_parser(description: str | None) -> Parser:
    """Return a parser with the option `--out` for a directory of figures."""
    parser = Parser(description)
    parser.add_argument("--out", type=Path, help="a directory for figures; without it, none")
    return parser


def parser(description: str | None, out: str | None, steps: int) -> Parser:
    """Return a parser with the options that all training scripts have.

    `out` and `steps` are the default values of `--out` and `--steps`.
    """
    parser = Parser(description)
    parser.add_argument(
        "--out", type=Path, default=out and Path(out), metavar="DIRECTORY", help="for one run only"
    )
    parser.add_argument("--steps", type=int, default=steps, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def attempt(work: Callable[[], None]) -> int:
    """Run `work`, and return the exit status: 0, 1 after an error, or 130 after Ctrl-C.

    Errors are printed in one line.
    """
    try:
        work()
    except (
        UnknownNameError,
        ValueError,
        OSError,
        FloatingPointError,
        ModuleNotFoundError,
    ) as error:
        return refuse(str(error))
    except KeyboardInterrupt as error:
        print("\n" + as_option(str(error) or "interrupted"), file=sys.stderr)
        return 130
    return 0


def refuse(reason: str) -> int:
    """Print the reason in one line, and return the exit status 1."""
    print("error:", as_option(" ".join(reason.split())), file=sys.stderr)
    return 1


def as_option(reason: str) -> str:
    """Return a message of `train` with the option `--resume` instead of `resume=True`."""
    return reason.replace("resume=True", "--resume")


def require_matplotlib(out: Path | None = None) -> None:
    """Check that Matplotlib is installed, and create the directory for figures.

    A script calls this function first, so that it does not fail after its work.

    Raises:
        ModuleNotFoundError: if Matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(f"figures need Matplotlib: {install_command('plots')}")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)


class Pace:
    """The progress of a training run in words, with an estimate of the remaining time.

    The estimate uses the steps since the first call.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.first = steps, (0, 0.0)

    def __call__(self, step: int) -> str:
        """Return the number of the step and the remaining time. Call it after every step."""
        now = time.monotonic()
        if self.first == (0, 0.0):
            self.first = step, now
        done, since = step - self.first[0], now - self.first[1]
        minutes = since / max(1, done) * (self.steps - step) / 60
        left = f", about {minutes:.0f} min left" if done and minutes >= 0.5 else ""
        return f"step {step} of {self.steps}{left}"


def save_figure(result: Result, path: Path, title: str, text: Sequence[str] = ()) -> None:
    """Draw a result with a title, and save the figure.

    If `text` is given, its characters are the labels of the positions.
    """
    figure = result.plot()
    figure.suptitle(title, wrap=True)
    if text:
        marks = [VISIBLE.get(character, character) for character in text]
        figure.axes[0].set_xticks(range(len(marks)), marks, rotation=0)
        figure.axes[0].set_xlabel("character (· is a space)")
    figure.savefig(path, dpi=120)


def require_least(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Check that no option is below its minimum.

    Raises:
        ValueError: if options are too small. The message names all of them.
    """
    given = {name: getattr(options, name) for name in least}
    wrong = [
        f"--{name.replace('_', '-')} must be at least {least[name]}; got {value}"
        for name, value in given.items()
        if value is not None and value < least[name]
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def require_own(directory: Path, *, resume: bool) -> None:
    """Check that a run can start in a directory, or that `resume` can continue a run there.

    `train` checks the same, but only after the model is built.

    Raises:
        OSError: if the run cannot start or continue. The message says what the user can do.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out must be a directory; got the file {directory}")
    has_run = (directory / CHECKPOINT).exists()
    if has_run and not resume:
        raise FileExistsError(
            f"{directory} already has a checkpoint of a run: --resume continues it, --out "
            "chooses another directory"
        )
    if (directory / "config.json").exists() and not has_run:
        raise FileExistsError(
            f"{directory} already has a model, but no run to resume: --out chooses another "
            "directory"
        )
    if resume and not has_run:
        raise FileNotFoundError(f"{directory} must have a {CHECKPOINT} to resume from; it has none")


def text_at(path: Path) -> str:
    """Return the text in a file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is empty or not in UTF-8. The message names the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be in UTF-8: {error}") from None
    if not text:
        raise ValueError(f"{path} must have some text; it is empty")
    return text


def pydoc_text() -> str:
    """Return Python's own documentation as one text."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())
