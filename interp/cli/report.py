"""`report`: a page about what happens inside a model on a text."""

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from interp.cli.common import STREAMS, model_of, replacing

if TYPE_CHECKING:
    from models import Transformer

# A name that is in no text, so only its first occurrence tells how the second ends.
DEFAULT_PROMPT = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
DEFAULT_CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"
INDUCTION_PERIOD = 40


def run(options: argparse.Namespace) -> None:
    """Write the page, and print what it shows in a few lines."""
    from interp.report import report

    with replacing(options.out) as page:
        model = model_of(options, trained=True)
        model.require_tokenizer()
        clean, corrupted = _prompts(options, model)
        period = min(INDUCTION_PERIOD, model.config.n_ctx // 2)
        made = report(model, clean, corrupted, name=options.model, period=period)
        html = made.view.html()
        page.write(html)
    said = f"{made.summary}\n\nwrote {options.out} ({len(html.encode()) / 1e6:.1f} MB)"
    # On stdout, the page is alone.
    print(said, file=sys.stderr if options.out.startswith(STREAMS) else sys.stdout)


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
