"""The command `report`: a page about a model on a text."""

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from interp.cli.common import STREAMS, in_format, model_of, replacing_output

if TYPE_CHECKING:
    from models import Transformer

# An invented name. Only its first occurrence tells the model how the second occurrence ends.
DEFAULT_PROMPT = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
DEFAULT_CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"
INDUCTION_PERIOD = 40


def run(options: argparse.Namespace) -> None:
    """Write the page, and print a summary."""
    from interp.report import report

    with replacing_output(options.out) as page:
        model = model_of(options, trained=True)
        model.require_tokenizer()
        clean, corrupted = _prompts(options, model)
        period = min(INDUCTION_PERIOD, model.config.n_ctx // 2)
        result = report(model, clean, corrupted, name=options.model, period=period)
        html = result.view.html()
        page.write(html)
    summary = f"{result.summary}\n\nwrote {options.out} ({len(html.encode()) / 1e6:.1f} MB)"
    output = in_format(summary, result.as_json(), is_json=options.json)
    # If the page goes to standard output, print the summary to standard error.
    print(output, file=sys.stderr if options.out.startswith(STREAMS) else sys.stdout)


def _prompts(
    options: argparse.Namespace, model: "Transformer"
) -> tuple[Int[Tensor, "1 pos"], Int[Tensor, "1 other"] | None]:
    """Return the clean and the corrupted prompt.

    The corrupted prompt is None if it must be derived from the clean prompt. If the default prompt
    is too long for the model, or contains a character without a token, the model generates a
    prompt.
    """
    from models import generate

    corrupted = None if options.corrupted is None else model.to_tokens(options.corrupted).tokens
    if options.prompt is not None:
        return model.to_tokens(options.prompt).tokens, corrupted
    n_ctx = model.config.n_ctx
    # A character without a token raises an error.
    with suppress(ValueError):
        clean = model.to_tokens(DEFAULT_PROMPT).tokens
        default_corrupted = model.to_tokens(DEFAULT_CORRUPTED).tokens
        if clean.shape[1] <= n_ctx:
            # The two prompts may have different numbers of tokens, depending on the tokenizer.
            if corrupted is None and default_corrupted.shape == clean.shape:
                corrupted = default_corrupted
            return clean, corrupted
    new = min(n_ctx, len(DEFAULT_PROMPT)) - 1
    # Return tokens and not their text, because the text may have more tokens when it is encoded
    # again.
    written = generate(model, [[0]], max_new_tokens=new, temperature=1.0, stop=())
    return torch.tensor(written, device=options.device), corrupted
