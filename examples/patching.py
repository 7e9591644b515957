"""Finds the activations that carry a copied name, by patching between two prompts.

python examples/patching.py --out out
"""

import argparse
from pathlib import Path

import torch

from hooks import HookedRunner
from interp import activation_patching, logit_diff
from models import load, load_tokenizer

CLEAN = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"


def main() -> None:
    """Patches one place by hand, then every place of every site, and draws the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a directory for figures; without it, none")
    options = parser.parse_args()

    model, tokenizer = load("pydoc-4l"), load_tokenizer("pydoc-4l")
    clean, corrupted = (torch.tensor([tokenizer.encode(text)]) for text in (CLEAN, CORRUPTED))
    right, wrong = tokenizer.encode("14")
    metric = logit_diff(right, wrong)
    changed = int((clean != corrupted).nonzero()[0, 1])

    runner = HookedRunner(model)
    with torch.no_grad():
        logits, cache = runner.run_with_cache(clean, names="blocks.0.resid_pre")

        def restore(resid: torch.Tensor, point: object) -> torch.Tensor:
            resid[:, changed] = cache["resid_pre", 0][:, changed]
            return resid

        patched = runner.run_with_hooks(corrupted, hooks={"blocks.0.resid_pre": restore})
        print(f"logit of '1' minus logit of '4', clean: {metric(logits).item():.2f}")
        print(f"corrupted: {metric(model(corrupted)).item():.2f}")
        print(f"corrupted, with the one changed embedding restored: {metric(patched).item():.2f}")

    for site in ("resid_pre", "attn_out", "mlp_out", "z"):
        result = activation_patching(model, clean, corrupted, metric, site)
        share = result.normalized()
        layer, place = divmod(int(share.argmax()), share.shape[1])
        best = f"layer {layer}, {result.axes[1]} {place}"
        print(f"{site:>9}: {best} restores {share.max():.0%} of the difference")
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            result.plot().savefig(options.out / f"{site}.png", dpi=150)


if __name__ == "__main__":
    main()
