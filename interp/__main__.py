"""The command line: `python -m interp report` and `python -m interp points`."""

import argparse
import dataclasses
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch
from jaxtyping import Int
from torch import Tensor

import models
from hooks import HookedRunner, HookError
from models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from interp.report import ReportData

DEFAULT_MODEL = "pydoc-4l"
# A name that is in no text, so only its first occurrence tells how the second ends.
DEFAULT_PROMPT = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
DEFAULT_CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"
INDUCTION_PERIOD = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 for an error, 130 for Ctrl-C.

    Raises:
        SystemExit: with status 2 if the arguments are wrong.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
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
    report.add_argument(
        "--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="the text (%(default)r)"
    )
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
            help="a bundled model, a path, or a model on the Hugging Face hub (%(default)s)",
        )
    return parser


def _points(options: argparse.Namespace) -> None:
    print(HookedRunner(models.load(options.model)).table())


def _report(options: argparse.Namespace) -> None:
    from interp.report import build_report, render

    with _replacing(options.out) as page:
        model, tokenizer = models.load(options.model), models.load_tokenizer(options.model)

        def encoded(text: str) -> Int[Tensor, "1 pos"]:
            return torch.tensor([tokenizer.encode(text)], dtype=torch.int64)

        clean = encoded(options.prompt)
        corrupted = None if options.corrupted is None else encoded(options.corrupted)
        if options.prompt == DEFAULT_PROMPT and corrupted is None:
            # The tokenizer decides whether the two have equally many tokens.
            default = encoded(DEFAULT_CORRUPTED)
            corrupted = default if default.shape == clean.shape else None
        data = build_report(
            model,
            clean,
            corrupted,
            lambda tokens: [_text(tokenizer, token) for token in tokens],
            name=options.model,
            facts=dataclasses.asdict(model.config),
            period=min(INDUCTION_PERIOD, model.config.n_ctx // 2),
        )
        page.write(render(data))
    print(_summary(data))
    print(f"\nwrote {options.out} ({os.path.getsize(options.out) / 1e6:.1f} MB)")


@contextmanager
def _replacing(out: str) -> Iterator[TextIO]:
    """A new file that replaces `out`, or the file that it links to, when it is complete."""
    path = Path(os.path.realpath(out))
    partial = path.with_name(f".report-{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            raise OSError(None, "it is not a file")
        file = partial.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ValueError(
            f"--out must be a file that can be written; got {out!r}: {error.strerror}"
        ) from None
    try:
        with file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, or its number if the tokenizer does not know it.

    A model may have more tokens than its tokenizer: many vocabularies are padded to a round number.
    """
    try:
        return tokenizer.tokens_as_text([token])[0]
    except ValueError:
        return f"<token {token}>"


def _summary(data: "ReportData") -> str:
    """The report in a few lines."""
    from interp.report import peak, visible

    result = data.patches["resid_pre"]
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
        f"log-probability of {data.answer!r}, in nats: {result.clean:.2f} clean, "
        f"{result.corrupted:.2f} corrupted",
        "largest share of the difference that one patch restores",
    ]
    for site, patches in data.patches.items():
        layer, place, share = peak(patches.normalized())
        by_head = patches.axes[1] == "head"
        where = f"head {place}" if by_head else f"position {place} {data.clean[place]!r}"
        lines.append(f"  {site:<10} layer {layer} {where:<17} {share:7.1%}")
    return "\n".join(lines)


def _shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


if __name__ == "__main__":
    sys.exit(main())
