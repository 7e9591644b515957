"""Find the activations that carry a digit that the model copies, by patching between two prompts.

The clean text names a part twice, the second time without its last digit, and the model copies the
digit. The corrupted text has another digit. Each patch takes one value from the run on the clean
text, and puts it into the run on the corrupted text. If the model then answers with the digit of
the clean text, the value carried this digit. The example takes some seconds.

    python examples/patching.py --out out
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from commands import attempt, figures_parser, require_matplotlib, save_figure

from hooks import HookedRunner
from interp import Pairs, activation_patching, edits, logit_diff
from models import load

CLEAN = "The part ZQXJ-KV81 is sold out; please ask for ZQXJ-KV8"
CORRUPTED = "The part ZQXJ-KV84 is sold out; please ask for ZQXJ-KV8"
SITES = {
    "resid_pre": "the residual stream entering a layer",
    "attn_out": "what a layer's attention adds to the stream",
    "mlp_out": "what a layer's MLP adds to the stream",
    "z": "what one head has read, at all positions",
}


@torch.no_grad()
def run(out: Path | None) -> None:
    """Patch one place by hand, then every place of several sites, and draw the results."""
    if out:
        require_matplotlib(out)
    model = load("pydoc-4l")
    pairs, metric = Pairs(CLEAN, CORRUPTED, ("1", "4")), logit_diff(*map(model.to_id, "14"))

    runner = HookedRunner(model)
    logits, cache = runner.run_with_cache(CLEAN, names="blocks.0.resid_pre")
    restore = {"blocks.0.resid_pre": edits.replace(cache, pos=CLEAN.index("1"))}
    patched = runner.run_with_hooks(CORRUPTED, hooks=restore)
    print(f"clean:     {CLEAN!r}\ncorrupted: {CORRUPTED!r}")
    print("\nThe logit of '1' minus the logit of '4' as the next character")
    print(f"clean: {metric(logits).item():.2f}")
    print(f"corrupted: {metric(model(CORRUPTED)).item():.2f}")
    print(f"corrupted, with the one changed embedding restored: {metric(patched).item():.2f}")

    print("\nThe share of that difference which one patch restores, at the three largest places")
    for site, what in SITES.items():
        result = activation_patching(model, pairs, site).normalized()
        print(f"{site}, {what}\n{result.top(3)}")
        if out:
            title = f"Share of the difference restored by {site}, {what}"
            save_figure(result, out / f"{site}.png", title, CLEAN if "pos" in result.axes else "")
    if out:
        print(f"{out} has a figure for each")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    return attempt(partial(run, figures_parser(__doc__).parse_args(arguments).out))


if __name__ == "__main__":
    sys.exit(main())
