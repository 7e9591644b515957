"""The command `features`: active features of a dictionary in a text, and their promoted tokens."""

import argparse
import warnings
from typing import Any

from hooks.base import require_integer
from interp.cli.common import model_of, print_or_write, text_of_options
from interp.features import TranscoderSet, feature_cards, splice
from interp.features.loading import load_any
from interp.inputs.texts import text_for


def run(options: argparse.Namespace) -> None:
    """Print cards of features."""
    model = model_of(options, trained=True)
    text = text_of_options(options)
    loaded = load_any(options.dictionary)
    placed: Any = loaded if options.at is None else {options.at: loaded}
    if isinstance(loaded, TranscoderSet):
        if options.at not in loaded:
            raise ValueError(
                f"--at must name one of the dictionaries at {', '.join(loaded)}; got {options.at}"
            )
        placed = {options.at: loaded[options.at]}
    chosen = options.feature
    if chosen is None:
        require_integer("--top", options.top)
        with warnings.catch_warnings():
            # Hide warnings here, because `feature_cards` gives the same warnings below.
            warnings.simplefilter("ignore")
            with splice(model, placed, reads=options.reads) as runner:
                read = text_for(model, text)
                arguments = read.arguments(model)
                cache = runner.capture(read.tokens, names="*.features", **arguments)
            (values,) = cache.values()
        largest = values.flatten(0, 1).amax(0)
        chosen = largest.topk(min(options.top, len(largest))).indices.tolist()
    cards = feature_cards(model, placed, texts=[text], features=chosen, reads=options.reads)
    print_or_write(options, repr(cards), cards.as_json())
