"""`features`: which features of a dictionary are active in a text, and what they write."""

import argparse
from typing import Any

from interp.cli.common import model_of, print_or_write, text_of
from interp.features import feature_cards, load_sae, splice

HELP = "list the features of a sparse autoencoder or a transcoder that are active in a text"
EXAMPLE = 'features --prompt "part AB1 and part AB"'
TEXT = "the text"
PRINTS = True


def add(features: argparse.ArgumentParser) -> None:
    """Add the options."""
    features.description = (
        "Shows the features with the largest activations in a text, or those that are named: where each is largest, and "
        "the tokens whose logits it raises."
    )
    features.add_argument(
        "--dictionary",
        default="pydoc-4l/resid_post",
        metavar="PATH",
        help="a folder or a file of a dictionary, or a bundled one (%(default)s)",
    )
    features.add_argument(
        "--at",
        metavar="POINT",
        help="where it stands, such as blocks.2.resid_post (its config says)",
    )
    features.add_argument(
        "--reads", metavar="POINT", help="what a transcoder reads (its config says)"
    )
    features.add_argument(
        "--feature", type=int, action="append", metavar="N", help="this one; may be repeated"
    )
    features.add_argument(
        "--top", type=int, default=5, metavar="N", help="else how many features (%(default)s)"
    )


def run(options: argparse.Namespace) -> None:
    """Print cards of features."""
    model, text = model_of(options, trained=True), text_of(options)
    loaded = load_sae(options.dictionary)
    placed: Any = loaded if options.at is None else {options.at: loaded}
    if isinstance(loaded, dict):
        if options.at not in loaded:
            raise ValueError(
                f"--at must say which dictionary, of {', '.join(loaded)}; got {options.at}"
            )
        placed = {options.at: loaded[options.at]}
    chosen = options.feature
    if chosen is None:
        if options.top < 1:
            raise ValueError(f"--top must be at least 1; got {options.top}")
        with splice(model, placed, reads=options.reads) as runner:
            (values,) = runner.capture(text, names="*.features").values()
        chosen = (
            values.flatten(0, 1).amax(0).topk(min(options.top, values.shape[-1])).indices.tolist()
        )
    cards = feature_cards(model, placed, [text], chosen, reads=options.reads)
    print_or_write(options, repr(cards), [card.to_neuronpedia() for card in cards])
