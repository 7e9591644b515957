"""Compare attribution patching with exact patching, to see how accurate the estimate is.

The texts name a part twice, and the model copies its last digit. A patch copies one value from the
run with another digit. Exact patching runs the model once for each place. Attribution estimates all
places with one backward pass, and integrated gradients use several. The example takes half a
minute.

    python examples/attribution.py --out out
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from commands import attempt, figures_parser, require_matplotlib

from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    compare_effects,
    integrated_gradients,
    patch_top_k,
)
from models import load

TEXT = "The part ZQXJ-KV8{} is sold out; please ask for ZQXJ-KV8"
RIGHT, WRONG = "01234567", "34567012"


def run(out: Path | None) -> None:
    """Estimate the effects of all places of two sites, and measure them by exact patching."""
    if out:
        require_matplotlib(out)
    model = load("pydoc-4l")
    clean, corrupted = ([TEXT.format(digit) for digit in digits] for digits in (RIGHT, WRONG))
    pairs = Pairs(clean, corrupted, [*zip(RIGHT, WRONG, strict=True)]).solved(model)
    print(pairs)

    for site in ("resid_pre", "z"):
        exact = activation_patching(model, pairs, site=site)
        for estimate in (
            attribution_patching(model, pairs, site=site),
            integrated_gradients(model, pairs, site=site),
        ):
            found = compare_effects(exact, estimate)
            size = (found.estimate.abs().sum() / found.exact.abs().sum()).item()
            print(f"\n{site}, {estimate.about['estimate']}: {found}")
            print(
                f"It {verdict(found.rank_correlation)} of the places, and its effects are "
                f"{size:.0%} of the exact ones."
            )
            if out:
                name = f"{site} {estimate.about['estimate']}.png".replace(" ", "_")
                found.plot().savefig(out / name, dpi=120)

    at = TEXT.index("{")
    print(f"\nWithout exact effects of all places (the digit is at position {at}):")
    print(patch_top_k(model, pairs, estimate=attribution_patching(model, pairs), k=5, budget=60))


def verdict(rank_correlation: float) -> str:
    """Describe a rank correlation in words."""
    if rank_correlation > 0.95:
        return "can be trusted for the order"
    return "finds some" if rank_correlation > 0.7 else "cannot be trusted for the order"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    return attempt(partial(run, figures_parser(__doc__).parse_args(arguments).out))


if __name__ == "__main__":
    sys.exit(main())
