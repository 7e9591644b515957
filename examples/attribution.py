"""Compares attribution patching with exact patching, and says how far to trust it.

python examples/attribution.py --out out
"""

import argparse
from pathlib import Path

import torch

from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    compare,
    integrated_gradients,
    verified_top,
)
from models import load, load_tokenizer

TEXT = "The part ZQXJ-KV8{} is sold out; please ask for ZQXJ-KV8"
RIGHT, WRONG = "01234567", "34567012"


def main() -> None:
    """Estimates the effects of all places of two sites, and patches them exactly."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a directory for figures; without it, none")
    options = parser.parse_args()

    model, tokenizer = load("pydoc-4l"), load_tokenizer("pydoc-4l")
    clean, corrupted = (
        torch.tensor([tokenizer.encode(TEXT.format(digit)) for digit in digits])
        for digits in (RIGHT, WRONG)
    )
    answers = torch.tensor(
        [tokenizer.encode(right + wrong) for right, wrong in zip(RIGHT, WRONG, strict=True)]
    )
    pairs = Pairs(clean, corrupted, answers).solved(model)
    print(pairs)

    for site in ("resid_pre", "z"):
        exact = activation_patching(model, pairs, site=site)
        for estimate in (
            attribution_patching(model, pairs, site=site),
            integrated_gradients(model, pairs, site=site, tolerance=0.05),
        ):
            found = compare(exact, estimate)
            size = (found.estimate.abs().sum() / found.exact.abs().sum()).item()
            print(f"\n{site}, {estimate.about['estimate']}: {found}")
            print(
                f"It {verdict(found.rank_correlation)} of the places, and its effects are {size:.0%} of the exact ones."
            )
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                name = f"{site} {estimate.about['estimate']}.png".replace(" ", "_")
                found.plot().savefig(options.out / name, dpi=150)

    print("\nWithout exact effects of all places:")
    print(verified_top(model, pairs, estimate=attribution_patching(model, pairs), k=5, budget=60))


def verdict(rank_correlation: float) -> str:
    """What a rank correlation says in words."""
    if rank_correlation > 0.95:
        return "can be trusted for the order"
    return "finds some" if rank_correlation > 0.7 else "cannot be trusted for the order"


if __name__ == "__main__":
    main()
