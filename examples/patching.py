"""Finds the activations that carry a copied name, by patching between two prompts.

python examples/patching.py --out out
"""

import argparse
from pathlib import Path

import torch

from hooks import HookedRunner
from interp import Pairs, activation_patching, edits, logit_diff
from models import load, load_tokenizer

CLEAN = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"


@torch.no_grad()
def main() -> None:
    """Patches one place by hand, then every place of every site, and draws the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a directory for figures; without it, none")
    options = parser.parse_args()

    model, tokenizer = load("pydoc-4l"), load_tokenizer("pydoc-4l")
    clean, corrupted = (torch.tensor([tokenizer.encode(text)]) for text in (CLEAN, CORRUPTED))
    metric = logit_diff(*tokenizer.encode("14"))
    pairs = Pairs(clean, corrupted, metric=metric)
    changed = int((clean != corrupted).nonzero()[0, 1])

    runner = HookedRunner(model)
    logits, cache = runner.run_with_cache(clean, names="blocks.0.resid_pre")
    restore = {"blocks.0.resid_pre": edits.replace(cache, pos=changed)}
    patched = runner.run_with_hooks(corrupted, hooks=restore)
    print(f"logit of '1' minus logit of '4', clean: {metric(logits).item():.2f}")
    print(f"corrupted: {metric(model(corrupted)).item():.2f}")
    print(f"corrupted, with the one changed embedding restored: {metric(patched).item():.2f}")

    print("\nshare of the difference that one patch restores")
    for site in ("resid_pre", "attn_out", "mlp_out", "z"):
        result = activation_patching(model, pairs, site).normalized()
        print(f"{site}\n{result.top(3)}")
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            result.plot().savefig(options.out / f"{site}.png", dpi=150)


if __name__ == "__main__":
    main()
