"""Reads the bundled model: which heads do what, and what each part says about the next character.

python examples/reading.py --out out
"""

import argparse
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import torch

from interp import (
    accumulated,
    direct_logit_attribution,
    head_scores,
    jacobian_lens,
    logit_lens,
    repeated_tokens,
    run_with_cache,
    tuned_lens,
)
from models import load, load_tokenizer

TEXT = "The part ZQXJ-KV8{} is sold out; please ask for ZQXJ-KV8"
RIGHT, WRONG = "01234567", "34567012"
KINDS = ("previous_token", "first_token", "duplicate_token", "induction", "entropy", "distance")


def main() -> None:
    """Prints tables, and draws them where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a directory for figures; without it, none")
    options = parser.parse_args()
    model, tokenizer = load("pydoc-4l"), load_tokenizer("pydoc-4l")
    figures = {}

    print("Heads, on random characters that are repeated once:")
    repeated = repeated_tokens(model.config.vocab_size, period=40, batch=16)
    _, cache = run_with_cache(model, repeated, names="*.pattern")
    for kind in KINDS:
        scores = head_scores(model, cache, repeated, kind)
        print(f"{kind}, in {scores.unit}\n{scores.top(3)}")
        figures[f"heads_{kind}"] = scores

    texts = torch.tensor([tokenizer.encode(TEXT.format(digit)) for digit in RIGHT])
    right, wrong = (torch.tensor(tokenizer.encode(digits)) for digits in (RIGHT, WRONG))
    logits, cache = run_with_cache(model, texts)
    rows, last = torch.arange(len(texts)), logits[:, -1]
    difference = last[rows, right] - last[rows, wrong]
    print(
        f"\n{TEXT!r} is continued by the digit in {int((difference > 0).sum())} of {len(texts)} texts."
    )

    parts = direct_logit_attribution(model, cache, right=right, wrong=wrong, pos=-1)
    print(
        f"The logit of the digit minus that of another one is {difference.mean():+.2f}: the sum of"
    )
    print(parts.top(8))
    figures["parts"] = parts
    streams = accumulated(model, cache, right=right, wrong=wrong, pos=-1)
    figures["streams"] = streams
    trained_on = torch.tensor(tokenizer.encode("\n".join(topics.values()))[: 500 * 128])
    rows = trained_on.view(-1, 128)
    lenses = None, tuned_lens(model, rows, steps=60), jacobian_lens(model, rows[::25, :64])
    print(
        "up to each layer, beside the probability of the digit by the logit, tuned and Jacobian lens:"
    )
    targets = right[:, None].expand_as(texts)
    found = [logit_lens(model, cache, lens=lens, targets=targets) for lens in lenses]
    shares = [lens.target_probabilities[..., -1].mean(1).tolist() for lens in found]
    names = [f"{layer}_pre" for layer in range(len(shares[0]) - 1)] + ["final_post"]
    for name, *each in zip(names, *shares, strict=True):
        difference = streams.select(stream=name).mean().item()
        print(f"  {name:<10} {difference:+6.2f}" + "".join(f" {share:6.1%}" for share in each))

    print("\nThe characters that each part raises most above the others there, with their logits:")
    every = [
        direct_logit_attribution(model, cache, right=token, pos=-1).select(example=[0])
        for token in range(model.config.vocab_size)
    ]
    said = torch.stack([one.values[:, 0] for one in every], -1)
    said = said - said.mean(-1, keepdim=True)
    for name, row in zip(every[0].labels["component"], said, strict=True):
        best = row.topk(4)
        characters = tokenizer.tokens_as_text(best.indices.tolist())
        named = zip(characters, best.values.tolist(), strict=True)
        print(f"  {name:<14}", *(f"{text!r} {logit:+.1f}" for text, logit in named))

    # The next character of each position, against the mean of all characters.
    columns = model.W_U.detach() - model.W_U.detach().mean(1, keepdim=True)
    following = torch.cat([texts[:, 1:], right[:, None]], 1)
    whole = direct_logit_attribution(model, cache, direction=columns.T[following])
    shown = TEXT.format(RIGHT[0])
    labels = {**whole.labels, "pos": [f"{n} {text}" for n, text in enumerate(shown)]}
    figures["text"] = replace(whole, labels=labels).select(example=0)

    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, result in figures.items():
            result.plot().savefig(options.out / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()
