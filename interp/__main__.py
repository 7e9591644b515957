"""The command line: `python -m interp report` and `python -m interp points`."""

import argparse
import dataclasses
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

import models
from hooks import HookedRunner, HookError
from models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from interp.report import ReportData

DEFAULT_MODEL = "pydoc-4l"
# A name that no text holds, so that only the first occurrence can tell how the second ends.
DEFAULT_PROMPT = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
DEFAULT_CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"
INDUCTION_PERIOD = 40


class Refusal(Exception):
    """What was asked for cannot be done; the text says why in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 for a refusal, 2 for usage, 130 for Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        if options.command == "points":
            print(HookedRunner(_model(options.model)).table(), flush=True)
        else:
            _report(options)
    except Refusal as refusal:
        print("error:", " ".join(str(refusal).splitlines()), file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Python flushes stdout once more on its way out, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m interp", description="Looks inside a language model."
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    report = commands.add_parser(
        "report",
        help="run a model on a text and write one HTML page of what happened inside",
        description="Runs a model on a text and writes one HTML page, which works offline: loss of each "
        "token, attention patterns, logit lens, head scores and activation patching.",
    )
    report.add_argument("--prompt", metavar="TEXT", help="the text; by default a short example")
    report.add_argument(
        "--corrupted",
        metavar="TEXT",
        help="a text with equally many tokens that the model continues otherwise, for patching; by "
        "default one token of the prompt is replaced, and the report says which",
    )
    report.add_argument(
        "--out", default="report.html", metavar="FILE", help="where the page goes (%(default)s)"
    )
    points = commands.add_parser(
        "points", help="list a model's hook points", description="Lists a model's hook points."
    )
    for command in (report, points):
        command.add_argument(
            "--model",
            default=DEFAULT_MODEL,
            metavar="NAME",
            help="name of a bundled model, or path of a saved one (%(default)s)",
        )
    return parser


def _report(options: argparse.Namespace) -> None:
    with _refusing(OSError, RuntimeError, prefix=f"--out {options.out!r} cannot be written: "):
        out = _destination(options.out)
    try:
        from interp.report import ReportError, build_report, derive_corruption, render
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise Refusal('the report needs Jinja2: pip install "hookscope[report]"') from None
    model = _model(options.model)
    with _refusing(OSError, ValueError, ImportError):
        tokenizer = models.load_tokenizer(options.model)
    n_ctx, vocab_size = model.config.n_ctx, model.config.vocab_size
    if n_ctx < 4:
        raise Refusal(f"a report needs a model with a context of at least 4 tokens, not {n_ctx}")

    def tokens(option: str, text: str) -> Int[Tensor, "1 pos"]:
        with _refusing(ValueError, prefix=f"{option}: "):
            row = tokenizer.encode(text)
        if not 2 <= len(row) <= n_ctx:
            raise Refusal(
                f"{option} has {len(row)} token{'s' * (len(row) != 1)}, and must have 2 to {n_ctx}, "
                "the model's context"
            )
        if outside := [token for token in row if token >= vocab_size]:
            raise Refusal(
                f"{option} has token {outside[0]}, {tokenizer.tokens_as_text(outside[:1])[0]!r}, and the "
                f"model knows {vocab_size} tokens, 0 to {vocab_size - 1}: the tokenizer is another model's"
            )
        return torch.tensor([row])

    if options.prompt is not None:
        clean = tokens("--prompt", options.prompt)
    else:
        clean = tokens("the default prompt", DEFAULT_PROMPT)
    corrupted = None
    if options.corrupted is not None:
        corrupted = tokens("--corrupted", options.corrupted)
    elif options.prompt is None:
        default = tokens("the default corrupted prompt", DEFAULT_CORRUPTED)
        # It depends on the tokenizer whether the two have equally many tokens.
        corrupted = default if default.shape == clean.shape else None
    derived = corrupted is None
    with _refusing(ReportError, HookError):
        data = build_report(
            model,
            clean,
            derive_corruption(model, clean) if corrupted is None else corrupted,
            lambda row: _texts(tokenizer, row),
            name=options.model,
            facts=dataclasses.asdict(model.config),
            derived=derived,
            period=min(INDUCTION_PERIOD, n_ctx // 2),
        )
    page = render(data)
    with _refusing(OSError, prefix=f"--out {options.out!r} could not be written: "):
        _write(out, page)
    print(_summary(data))
    print(f"\nwrote {options.out} ({out.stat().st_size / 1e6:.1f} MB)", flush=True)


def _model(name: str) -> models.Transformer:
    with _refusing(OSError, ValueError, ImportError):
        return models.load(name)


def _texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token, or its number where only the model knows it.

    A model may know more tokens than its tokenizer: many vocabularies are padded to a round number.
    """

    def text(token: int) -> str:
        try:
            return tokenizer.tokens_as_text([token])[0]
        except ValueError:
            return f"<token {token}>"

    return [text(token) for token in tokens]


@contextmanager
def _refusing(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Turns errors of these kinds, which are about what the user gave, into refusals."""
    try:
        yield
    except kinds as error:
        what = error.strerror if prefix and isinstance(error, OSError) else None
        raise Refusal(f"{prefix}{what or error}") from None


def _destination(out: str) -> Path:
    """The file that `out` names, links followed, once it is sure that it can be written."""
    path = Path(out).resolve()
    if path.is_dir():
        raise IsADirectoryError(None, "it is a directory, and a file is expected")
    if path.exists() and not path.is_file():
        raise OSError(None, "it is not a regular file")
    if not path.parent.is_dir():
        raise FileNotFoundError(None, f"there is no directory {str(path.parent)!r}")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(None, "it is write-protected")
    partial = _partial(path)
    try:
        partial.touch(exist_ok=False)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _write(path: Path, page: str) -> None:
    """Replaces the file at `path` by the page, whole or not at all."""
    partial = _partial(path)
    try:
        partial.write_text(page, encoding="utf-8", newline="\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".report-{os.getpid()}.partial")


def _summary(data: "ReportData") -> str:
    """The report in a few lines."""
    from interp.report import peak, visible

    guesses = data.guesses[-1][-1]
    result = next(iter(data.patches.values()))
    heads = {"previous-token": peak(data.previous), "induction": peak(data.induction)}
    lines = [
        f"model      {data.name}",
        f"clean      {_shortened(visible(''.join(data.clean)))}",
        f"corrupted  {_shortened(visible(''.join(data.corrupted)))}",
    ]
    if data.derived:
        pos = data.changed[0]
        lines.append(
            f"           derived: {data.clean[pos]!r} at position {pos} became "
            f"{data.corrupted[pos]!r}"
        )
    lines += ["", "next token after the clean prompt"]
    lines += [f"  {text!r:<8} {probability:6.1%}" for text, probability in guesses]
    lines += ["", "strongest heads (mean attention, 0 to 1)"]
    lines += [
        f"  {kind:<15} layer {head.layer} head {head.place}  {head.value:.2f}"
        for kind, head in heads.items()
    ]
    lines += [
        "",
        f"log-probability of {data.answer!r}, in nats: {result.clean:.2f} clean, "
        f"{result.corrupted:.2f} corrupted",
        "largest share of the difference that one patch brings back",
    ]
    for site, patched in data.patches.items():
        layer, place, share = peak(patched.normalized())
        where = (
            f"head {place}"
            if patched.axes[1] == "head"
            else f"position {place} {data.clean[place]!r}"
        )
        lines.append(f"  {site:<10} layer {layer} {where:<17} {share:7.1%}")
    return "\n".join(lines)


def _shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


if __name__ == "__main__":
    sys.exit(main())
