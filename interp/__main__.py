"""The command line: `python -m interp report` and `python -m interp points`."""

import argparse
import dataclasses
import io
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
from jaxtyping import Int
from torch import Tensor

from hooks import HookedRunner, HookError

# Commands import `models` themselves, so that `main` can say what goes wrong there.
if TYPE_CHECKING:
    from interp.report import ReportData
    from models import Transformer

DEFAULT_MODEL = "pydoc-4l"
# A name that is in no text, so only its first occurrence tells how the second ends.
DEFAULT_PROMPT = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
DEFAULT_CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"
INDUCTION_PERIOD = 40
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Paths that are written to directly; other files are replaced.
STREAMS = ("/dev/std", "/dev/fd/")


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
    parser = argparse.ArgumentParser(
        prog="python -m interp", description="Looks inside a language model."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    report = commands.add_parser(
        "report",
        help="run a model on a text and write an HTML page about what happened inside",
        description="Runs a model on a text and writes one HTML page that works offline: loss of each "
        "token, attention patterns, logit lens, head scores and activation patching.",
    )
    default = f"{DEFAULT_PROMPT!r}; if the model cannot read that, what it writes"
    report.add_argument("--prompt", metavar="TEXT", help=f"the text ({default})")
    report.add_argument(
        "--corrupted",
        metavar="TEXT",
        help="for patching, a text of equally many tokens that the model continues differently; by "
        "default one token of the prompt is replaced, and the report says which",
    )
    report.add_argument(
        "--out", default="report.html", metavar="FILE", help="where the page goes (%(default)s)"
    )
    points = commands.add_parser("points", help="list a model's hook points")
    for command, run in ((report, _report), (points, _points)):
        command.set_defaults(command=run)
        command.add_argument(
            "--model",
            default=DEFAULT_MODEL,
            metavar="NAME",
            help="a bundled model, a path, a model on the Hugging Face hub or, for points, a "
            "registered config (%(default)s)",
        )
        command.add_argument(
            "--device", type=_device, metavar="NAME", help="where it runs, such as cuda (cpu)"
        )
        command.add_argument("--dtype", choices=DTYPES, help="of its weights (the file's own)")
    return parser


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()  # fails where there is no such device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(
            f"{name!r} must be a device that is here: {reason}"
        ) from None
    return device


def _points(options: argparse.Namespace) -> None:
    print(HookedRunner(_model(options, trained=False)).table())


def _report(options: argparse.Namespace) -> None:
    from interp.report import build_report, render

    with _replacing(options.out) as page:
        model = _model(options, trained=True)
        model.require_tokenizer()
        clean, corrupted = _prompts(options, model)
        data = build_report(
            model,
            clean,
            corrupted,
            name=options.model,
            facts=dataclasses.asdict(model.config),
            period=min(INDUCTION_PERIOD, model.config.n_ctx // 2),
        )
        html = render(data)
        page.write(html)
    said = f"{_summary(data)}\n\nwrote {options.out} ({len(html.encode()) / 1e6:.1f} MB)"
    # On stdout, the page is alone.
    print(said, file=sys.stderr if options.out.startswith(STREAMS) else sys.stdout)


def _model(options: argparse.Namespace, *, trained: bool) -> "Transformer":
    """A model that can be loaded or, if it need not be trained, one of a registered config."""
    from models import available, build, load
    from models.registry import SIZES

    name, dtype = options.model, options.dtype and getattr(torch, options.dtype)
    # The hub has weights under the names of GPT-2's sizes.
    if name not in available() or os.path.exists(name) or (trained and name in SIZES):
        return load(name, device=options.device, dtype=dtype)
    if trained:
        raise ValueError(
            f"a report needs a trained model; got the config {name!r}: train it, for instance with "
            f"`python examples/tiny_lm.py --model {name}`, and give the directory"
        )
    with torch.device("meta"):  # without memory for the weights
        return build(name)


def _prompts(
    options: argparse.Namespace, model: "Transformer"
) -> tuple[Int[Tensor, "1 pos"], Int[Tensor, "1 other"] | None]:
    """The clean and the corrupted prompt; None if the corrupted one is to be derived.

    If the model lacks a character of the default prompt, or has a short context, it writes the prompt.
    """
    from models import generate

    corrupted = None if options.corrupted is None else model.to_tokens(options.corrupted).tokens
    if options.prompt is not None:
        return model.to_tokens(options.prompt).tokens, corrupted
    n_ctx = model.config.n_ctx
    with suppress(ValueError):  # a character without a token
        clean, other = (model.to_tokens(t).tokens for t in (DEFAULT_PROMPT, DEFAULT_CORRUPTED))
        if clean.shape[1] <= n_ctx:
            # The tokenizer decides whether the two have equally many tokens.
            return clean, other if corrupted is None and other.shape == clean.shape else corrupted
    new = min(n_ctx, len(DEFAULT_PROMPT)) - 1
    # Not as a text, which may be more tokens when it is encoded again.
    written = generate(model, [[0]], max_new_tokens=new, temperature=1.0, stop=())
    return torch.tensor(written, device=options.device), corrupted


@contextmanager
def _replacing(out: str) -> Iterator[TextIO]:
    """A new file that replaces `out`, or the file that it links to, when it is complete.

    What is not a file, such as a pipe, is written to directly.
    """
    path = Path(os.path.realpath(out))
    partial = path.with_name(f".report-{os.getpid()}.partial")
    try:
        replaces = not out.startswith(STREAMS) and (path.is_file() or not path.exists())
        partial = partial if replaces else Path(out)
        file = partial.open("w" if replaces else "a", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ValueError(
            f"--out must be a file that can be written; got {out!r}: {error.strerror}"
        ) from None
    try:
        with file:
            yield file
        if replaces:
            with suppress(FileNotFoundError):
                shutil.copymode(path, partial)
            os.replace(partial, path)
    finally:
        if replaces:
            partial.unlink(missing_ok=True)


def _summary(data: "ReportData") -> str:
    """The report in a few lines."""
    from interp.report import peak, visible

    clean, corrupted = (_shortened(visible("".join(text))) for text in (data.clean, data.corrupted))
    lines = [f"model      {data.name}", f"clean      {clean}", f"corrupted  {corrupted}"]
    if data.derived:
        [pos] = data.changed
        lines.append(
            f"           derived: {data.clean[pos]!r} at position {pos} became {data.corrupted[pos]!r}"
        )
    lines += ["", "next token after the clean prompt"]
    lines += [f"  {text!r:<8} {probability:6.1%}" for text, probability in data.guesses[-1][-1]]
    lines += ["", "strongest heads (mean attention, 0 to 1)"]
    for kind, scores in (("previous-token", data.previous), ("induction", data.induction)):
        layer, head, score = peak(scores)
        lines.append(f"  {kind:<15} layer {layer} head {head}  {score:.2f}")
    lines += [
        "",
        f"log-probability of {data.answer!r}, in nats: {data.target:.2f} clean, "
        f"{data.base:.2f} corrupted",
        "largest share of the difference that one patch restores",
    ]
    for site, shares in data.shares().items():
        layer, place, share = peak(shares)
        where = f"head {place}" if site == "z" else f"position {place} {data.clean[place]!r}"
        lines.append(f"  {site:<10} layer {layer} {where:<17} {share:7.1%}")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:50]} ... {text[-50:]}"


if __name__ == "__main__":
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
    sys.exit(status)
