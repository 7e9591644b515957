"""Read the bundled model: roles of heads, and contributions of components to the next character.

The texts name a part twice, the second time without its last digit, which the model copies. A tuned
lens and a Jacobian lens are fitted on a short text. The example takes half a minute. The table of
lenses in the guide comes from larger fits, which take a few minutes:

    python examples/reading.py --out out
    python examples/reading.py --lens-steps 250 --lens-rows 50
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from commands import (
    attempt,
    figures_parser,
    pydoc_text,
    require_least,
    require_matplotlib,
    save_figure,
)

from interp import (
    Result,
    accumulated_logits,
    direct_logit_attribution,
    head_scores,
    jacobian_lens,
    logit_lens,
    repeated_tokens,
    run_with_cache,
    tuned_lens,
)
from models import load, train_test_split

TEXT = "The part ZQXJ-KV8{} is sold out; please ask for ZQXJ-KV8"
RIGHT, WRONG = "01234567", "34567012"
KINDS = {
    "previous_token": "attention to the character before",
    "first_token": "attention to the first character",
    "duplicate_token": "attention to the earlier copy of the character",
    "induction": "attention to what followed the earlier copy",
    "entropy": "how widely a head looks",
    "distance": "how far back a head looks",
}


def run(options: argparse.Namespace) -> None:
    """Print tables, and draw them in the folder of `--out`."""
    require_least(options, {"lens_steps": 1, "lens_rows": 1})
    if options.out:
        require_matplotlib(options.out)
    model = load("pydoc-4l")
    figures: dict[str, tuple[Result, str]] = {}

    print("Heads, on random characters that are repeated once: the three largest of each kind,")
    print("with 95% intervals over texts.")
    repeated = repeated_tokens(model.config.vocab_size, period=40, batch=16)
    _, cache = run_with_cache(model, repeated, names="*.pattern")
    for kind, what in KINDS.items():
        scores = head_scores(model, cache, kind)
        print(f"{kind}, in {scores.unit}: {what}\n{scores.top(3)}")
        figures[f"heads_{kind}"] = scores, f"{kind}: {what}"

    texts = model.to_tokens([TEXT.format(digit) for digit in RIGHT]).tokens
    right, wrong = (model.to_tokens(digits).tokens[0] for digits in (RIGHT, WRONG))
    logits, cache = run_with_cache(model, texts)
    rows, last = torch.arange(len(texts)), logits[:, -1]
    difference = last[rows, right] - last[rows, wrong]
    print(
        f"\n{TEXT!r} is continued by the digit in {int((difference > 0).sum())} of {len(texts)} "
        "texts."
    )

    parts = direct_logit_attribution(model, cache, right=right, wrong=wrong, pos=-1)
    print(
        f"The logit of the digit minus that of another one is {difference.mean():+.2f}: the sum of"
    )
    print(parts.top(8))
    adds = "to the logit of the right digit minus that of another"
    figures["parts"] = parts, f"What each part adds {adds}"
    streams = accumulated_logits(model, cache, right=right, wrong=wrong, pos=-1)
    figures["streams"] = streams, f"What all parts up to each place add together {adds}"
    print(
        f"\nFitting lenses: {options.lens_steps} steps, {options.lens_rows} Jacobians.", flush=True
    )
    text = model.to_tokens(pydoc_text()).tokens[0]
    trained_on, held_out = (
        part[: len(part) // 128 * 128].view(-1, 128) for part in train_test_split(text)
    )
    # These texts are shorter, because each one needs 128 backward passes.
    spread = trained_on[:3000, :64]
    lenses = {
        "logit": None,
        "tuned": tuned_lens(model, trained_on, steps=options.lens_steps),
        "Jacobian": jacobian_lens(
            model, spread[:: len(spread) // options.lens_rows][: options.lens_rows]
        ),
    }
    targets = right[:, None].expand_as(texts)
    readouts = [logit_lens(model, cache, lens=lens, targets=targets) for lens in lenses.values()]
    shares = [readout.target_probabilities[..., -1].mean(1).tolist() for readout in readouts]
    names = [f"{layer}_pre" for layer in range(len(shares[0]) - 1)] + ["final_post"]
    heading = "".join(f"{name:>9}" for name in lenses)
    print("The difference up to each layer, and the probability of the digit by three lenses:")
    print(f"  {'stream':<10} {'logits':>6}{heading}")
    for name, *each in zip(names, *shares, strict=True):
        difference = streams.select(stream=name).mean().item()
        print(f"  {name:<10} {difference:+6.2f}" + "".join(f" {share:8.1%}" for share in each))
    print(
        "KL(final ‖ lens) in nats, on 32 rows of 128 characters that the model was not trained on:"
    )
    print(f"  {'stream':<10}       {heading}")
    _, unseen = run_with_cache(model, held_out[::11][:32], names=["*.resid_pre", "*.resid_post"])
    losses = [logit_lens(model, unseen, lens=lens).kl.mean((1, 2)) for lens in lenses.values()]
    for name, *each in zip(names[:-1], *losses, strict=False):
        print(f"  {name:<10}       " + "".join(f" {loss:8.2f}" for loss in each))

    print("\nThe characters that each part raises most above the others there, with their logits:")
    every = [
        direct_logit_attribution(model, cache, right=token, pos=-1).select(example=[0])
        for token in range(model.config.vocab_size)
    ]
    said = torch.stack([one.values[:, 0] for one in every], -1)
    said = said - said.mean(-1, keepdim=True)
    for name, row in zip(every[0].labels["component"], said, strict=True):
        best = row.topk(4)
        characters = model.to_pieces(best.indices)
        named = zip(characters, best.values.tolist(), strict=True)
        print(f"  {name:<14}", *(f"{text!r} {logit:+.1f}" for text, logit in named))

    # The next character of each position, minus the mean of all characters.
    columns = model.W_U.detach() - model.W_U.detach().mean(1, keepdim=True)
    following = torch.cat([texts[:, 1:], right[:, None]], 1)
    whole = direct_logit_attribution(model, cache, vector=columns.T[following])
    title = "What each part adds, at each character, to the logit of the next one (mean logit: 0)"
    figures["text"] = whole.select(example=0), title

    if options.out:
        for name, (result, title) in figures.items():
            text = TEXT.format(RIGHT[0]) if "pos" in result.axes else ""
            save_figure(result, options.out / f"{name}.png", title, text)
        print(f"\n{options.out} has figures of heads, parts, streams, and a text")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    parser = figures_parser(__doc__)
    parser.add_argument(
        "--lens-steps", type=int, default=60, help="steps of the tuned lens (%(default)s)"
    )
    parser.add_argument(
        "--lens-rows", type=int, default=10, help="texts of the Jacobian lens (%(default)s)"
    )
    return attempt(partial(run, parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
