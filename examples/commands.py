"""What the examples that train share: options checked, texts read, errors of one line."""

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from hooks import UnknownNameError
from models.training.run import CHECKPOINT


def parser(description: str | None, out: str | None, steps: int) -> argparse.ArgumentParser:
    """The options that all examples that train have; `out` and `steps` are defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=out and Path(out), metavar="DIRECTORY", help="of this run alone"
    )
    parser.add_argument("--steps", type=int, default=steps, help="of training (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def attempt(work: Callable[[], None]) -> int:
    """The exit status: 0, 1 for what cannot be done, said in one line, or 130 for Ctrl-C."""
    try:
        work()
    except UnknownNameError as error:
        return refuse(error.args[0])
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        return refuse(str(error))
    except KeyboardInterrupt as error:
        print("\n" + as_option(str(error) or "interrupted"), file=sys.stderr)
        return 130
    return 0


def refuse(reason: str) -> int:
    """Says why in one line; the exit status."""
    print("error:", as_option(" ".join(reason.split())), file=sys.stderr)
    return 1


def as_option(reason: str) -> str:
    """Training says in Python how to go on."""
    return reason.replace("resume=True", "--resume")


def require_matplotlib() -> None:
    """Raises ModuleNotFoundError now rather than after the training."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError('figures need Matplotlib: pip install "hookscope[report]"')


def require_least(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Raises ValueError naming each option that is given and below its least value."""
    given = {name: getattr(options, name) for name in least}
    wrong = [
        f"--{name.replace('_', '-')} must be at least {least[name]}; got {value}"
        for name, value in given.items()
        if value is not None and value < least[name]
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


def require_own(directory: Path, *, resume: bool) -> None:
    """Refuses a directory that a run cannot begin in or, with `resume`, continue in.

    Training does too, but only once there is a model.

    Raises:
        OSError: saying what to do instead.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"--out must be a directory; got the file {directory}")
    has_run = (directory / CHECKPOINT).exists()
    if has_run and not resume:
        raise FileExistsError(
            f"{directory} has the checkpoint of a run already: --resume goes on with it, --out "
            "chooses another directory"
        )
    if (directory / "config.json").exists() and not has_run:
        raise FileExistsError(
            f"{directory} has a model already, but no run to resume: --out chooses another directory"
        )
    if resume and not has_run:
        raise FileNotFoundError(f"{directory} has no {CHECKPOINT} to resume from")


def text_at(path: Path) -> str:
    """The text in a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: naming the file, if it is empty or not in UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be in UTF-8: {error}") from None
    if not text:
        raise ValueError(f"{path} must have some text; it is empty")
    return text


def pydoc_text() -> str:
    """Python's own documentation."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())
