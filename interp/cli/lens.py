"""The command `lens`: the prediction of each layer."""

import argparse

from hooks import HookedRunner
from hooks.base import require_integer
from interp.cli.common import model_of, print_or_write, text_of_options
from interp.inputs.texts import text_for
from interp.protocol import of
from interp.reading.lens import logit_lens


def run(options: argparse.Namespace) -> None:
    """Print the last positions as a table, or all positions as JSON."""
    require_integer("--last", options.last, least=1)
    model = model_of(options, trained=True)
    language = of(model, "unembed")
    text = text_of_options(options)
    read = text_for(model, text)
    _, cache = HookedRunner(model).run_with_cache(read.tokens, lazy=True, **read.arguments(model))
    readout = logit_lens(model, cache, top_k=options.top)
    pieces = language.to_pieces(language.to_tokens(text).tokens[0])
    best = language.to_pieces(readout.tokens[:, 0])
    chances = readout.probabilities[:, 0]
    names = [*(f"entering {layer}" for layer in range(len(best) - 1)), "final"]
    columns = range(max(0, len(pieces) - options.last), len(pieces))
    width = 4
    for tokens in best:
        for pos in columns:
            width = max(width, 1 + len(repr(tokens[pos][0])))
    rows = ["stream".ljust(12) + "".join(repr(pieces[pos]).rjust(width + 5) for pos in columns)]
    for name, tokens, of_layer in zip(names, best, chances, strict=True):
        cells = (f"{tokens[pos][0]!r:>{width}} {float(of_layer[pos, 0]):4.2f}" for pos in columns)
        rows.append(name.ljust(12) + "".join(cells))
    print_or_write(options, "\n".join(rows) + "\nnumbers are probabilities", readout.as_json())
