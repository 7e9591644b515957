"""Inspect a sparse autoencoder of the bundled model, ablate its features and steer with one.

The text names a part twice, the second time without its last digit, which the model copies. The
autoencoder reads the residual stream after block 2. It has 1,024 features, of which 32 are active
at a position. The example takes about ten seconds.

    python examples/features.py --out out
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from commands import attempt, figures_parser, pydoc_text

from interp import (
    Pairs,
    activation_patching,
    edits,
    evaluate_sae,
    load_sae,
    measure,
    plots,
    splice,
)
from interp.features import feature_cards
from models import generate_text, load

CLEAN, CORRUPTED = (f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ-KV8" for digit in "14")
POINT = "blocks.2.resid_post"


@torch.no_grad()
def run(out: Path | None) -> None:
    """Score the autoencoder, find the features that carry the digit, ablate them and steer with
    one.
    """
    if out:
        out.mkdir(parents=True, exist_ok=True)
    model, autoencoder = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
    pairs = Pairs(CLEAN, CORRUPTED, ("1", "4")).read_by(model)
    documentation = pydoc_text()
    # The model was not trained on the last tenth of the documentation.
    held_out = documentation[len(documentation) * 9 // 10 :]
    texts = [held_out[start : start + 200] for start in range(0, 20_000, 200)]
    print(evaluate_sae(model, autoencoder, texts[:20]))

    with splice(model, autoencoder) as runner:
        effects = activation_patching(model, pairs, site="features")
        print(
            "\nThe share of the answer that one feature of the clean text brings "
            f"back\n{effects.normalized().top(4)}"
        )
        order = effects.mean()[0].argsort(descending=True)
        best = [effects.labels["feature"][n] for n in order[:8].tolist()]

        before = measure(pairs.metric, model(CLEAN)).item()
        print(f"\nlogit of '1' less that of '4', after the clean text: {before:.2f}")
        for n in (1, 8):
            without = {f"{POINT}.features": edits.zero(feature=best[:n])}
            after = measure(pairs.metric, runner.run_with_hooks(CLEAN, hooks=without)).item()
            print(f"without the first {n} of these features: {after:.2f}")

        # Increase one feature at every position, also at the positions that are generated.
        start = "The "
        print(
            f"\n{start!r} goes on: "
            f"{generate_text(model, start, max_new_tokens=40, temperature=0.0)!r}"
        )
        more = {f"{POINT}.features": edits.add(torch.tensor(12.0), feature=7)}
        with runner.hooks(more):
            steered = generate_text(model, start, max_new_tokens=40, temperature=0.0)
        print(f"with 12 more of feature 7: {steered!r}")

    cards = feature_cards(model, autoencoder, [*texts, CLEAN, CORRUPTED], best[:3], k=4)
    print(f"\nWhere the first of them are active\n{cards}")
    if out:
        plots.features(cards).save(out / "features.html")
        print(f"{out / 'features.html'} shows the features")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    options = figures_parser(__doc__).parse_args(arguments)
    return attempt(partial(run, options.out))


if __name__ == "__main__":
    sys.exit(main())
