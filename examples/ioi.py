"""Find the components that name the indirect object, with activation patching on many pairs of
texts.

In "When Mary and John went to the shop, John gave a ring to", the next word is Mary, the indirect
object (IO). The corrupted text has Mary instead of the second John (S2), and its answer is John.
The steps follow Wang et al. 2022, "Interpretability in the Wild", and Heimersheim & Nanda 2024,
"How to use and interpret activation patching": the logit difference, then the share that patching
restores, by layer and word, by head, and by the values (v) and the attention (pattern) of a head.

A model of characters copies a part number instead: its last digit differs between the two texts.
On the bundled model it takes half a minute, on GPT-2 small with 40 pairs some minutes.

    python examples/ioi.py --out out/ioi
    python examples/ioi.py --model gpt2 --pairs 40 --out out/ioi-gpt2
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import NamedTuple

import torch
from commands import attempt, figures_parser, require_least, require_matplotlib, save_figure

from interp import Pairs, Result, activation_patching
from models import CharTokenizer, Tokenizer, load, load_tokenizer

TEMPLATES = (
    "Then, {both} went to the {place}. {S2} gave a {thing} to",
    "When {both} got a {thing} at the {place}, {S2} decided to give it to",
    "After {both} had a long talk about the {thing} at the {place}, {S2} sent it to",
    "While {both} were working at the {place}, {S2} handed a {thing} to",
)
ORDERS = {"ABBA": "{IO} and {S1}", "BABA": "{S1} and {IO}"}
NAMES = """
    Mary John Michael David James Robert Daniel Sarah Thomas Kevin Laura Richard Emily Mark
    Paul Amy Scott Lisa Kelly Rachel Jason Adam Eric Ryan
"""
PLACES = ("school", "office", "station", "restaurant", "hospital", "house", "garden", "store")
THINGS = ("ring", "book", "drink", "letter", "basketball", "computer")
PARTS = (
    "The part {name}{digit} is sold out; please ask for {name}",
    "Part {name}{digit} of the list is missing. Order another {name}",
)
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
SITES = {
    "resid_pre": "the residual stream entering a layer, by word",
    "attn_out": "what a layer's attention adds to the stream, by word",
    "mlp_out": "what a layer's MLP adds to the stream, by word",
    "z": "what a head has read, at all positions",
    "v": "what a head reads, its values",
    "pattern": "where a head looks, its attention pattern",
}


class Prompt(NamedTuple):
    """A template with its words for the clean and the corrupted text, and both answers.

    The first answer is right, and the second is wrong.
    """

    template: str
    clean: Mapping[str, str]
    corrupted: Mapping[str, str]
    answers: tuple[str, str]


def names(tokenizer: Tokenizer, n: int, draw: random.Random) -> list[Prompt]:
    """Return sentences with an indirect object, in both orders of the names.

    A name is one token.
    """
    before = len(tokenizer.encode("The"))
    known = [name for name in NAMES.split() if len(tokenizer.encode(f"The {name}")) == before + 1]
    if len(known) < 2:
        raise ValueError(f"two names must be one token each of {NAMES.split()}; got {known}")
    prompts = []
    for i in range(n):
        io, subject = draw.sample(known, 2)
        words = {
            "IO": io,
            "S1": subject,
            "place": draw.choice(PLACES),
            "thing": draw.choice(THINGS),
        }
        order = list(ORDERS.values())[i % len(ORDERS)]
        template = draw.choice(TEMPLATES).replace("{both}", order)
        clean, corrupted = words | {"S2": subject}, words | {"S2": io}
        prompts.append(Prompt(template, clean, corrupted, (f" {io}", f" {subject}")))
    return prompts


def parts(tokenizer: Tokenizer, n: int, draw: random.Random) -> list[Prompt]:
    """Return sentences that name a part twice, the second time without its last digit."""
    prompts = []
    for _ in range(n):
        start, end = draw.sample(LETTERS, 4), draw.sample(LETTERS, 2)
        name = f"{''.join(start)}-{''.join(end)}{draw.randrange(10)}"
        right, wrong = draw.sample("0123456789", 2)
        clean, corrupted = ({"name": name, "digit": digit} for digit in (right, wrong))
        prompts.append(Prompt(draw.choice(PARTS), clean, corrupted, (right, wrong)))
    return prompts


def filled(
    tokenizer: Tokenizer, template: str, words: Mapping[str, str]
) -> tuple[list[int], dict[str, int]]:
    """Return the tokens of a filled template, and the position of each of its words.

    If a word occurs several times, its position is the last token of the first occurrence. `end` is
    the position of the last token of the text.
    """
    text, ends = "", {}
    for literal, field, _, _ in Formatter().parse(template):
        text += literal
        if field:
            text += words[field]
            ends.setdefault(field, len(text))
    tokens, start = tokenizer.encode(text), [*tokenizer.bos_token_ids]
    spans = {}
    for field, end in ends.items():
        read = tokenizer.encode(text[:end])
        if tokens[: len(read)] != read:
            raise ValueError(
                f"a token must end where {text[:end]!r} ends; in {text!r} it continues"
            )
        spans[field] = len(start) + len(read) - 1
    return start + tokens, spans | {"end": len(start) + len(tokens) - 1}


def paired(tokenizer: Tokenizer, prompts: list[Prompt], spans: tuple[str, ...]) -> Pairs:
    """Return the prompts as pairs of tokens, padded on the right, with the words in `spans`."""
    rows = [
        [filled(tokenizer, prompt.template, words) for words in (prompt.clean, prompt.corrupted)]
        for prompt in prompts
    ]
    length = max(len(tokens) for row in rows for tokens, _ in row)
    (clean, mask), (corrupted, other) = (
        (
            torch.tensor([row[i][0] + [0] * (length - len(row[i][0])) for row in rows]),
            torch.tensor([[k < len(row[i][0]) for k in range(length)] for row in rows]),
        )
        for i in range(2)
    )
    own, others = ({name: [[row[i][1][name]] for row in rows] for name in spans} for i in range(2))
    answers = torch.tensor([[tokenizer.encode(text)[-1] for text in p.answers] for p in prompts])
    texts, changed = (
        {"input_ids": tokens, "attention_mask": real}
        for tokens, real in ((clean, mask), (corrupted, other))
    )
    return Pairs(texts, changed, answers, spans=own, corrupted_spans=others)


def run(options: argparse.Namespace) -> None:
    """Make the pairs, keep the pairs that the model answers rightly, and patch them."""
    require_least(options, {"pairs": 2})
    if options.out:
        require_matplotlib(options.out)
    model, tokenizer = load(options.model), load_tokenizer(options.model)
    draw = random.Random(options.seed)
    if isinstance(tokenizer, CharTokenizer):
        prompts, spans = parts(tokenizer, options.pairs, draw), ("name", "digit", "end")
    else:
        prompts, spans = names(tokenizer, options.pairs, draw), ("IO", "S1", "S2", "end")
    pairs = paired(tokenizer, prompts, spans).solved(model)
    for kind in ("clean", "corrupted"):
        print(f"{kind}: {prompts[0].template.format_map(getattr(prompts[0], kind))}")
    print(pairs)

    def show(name: str, what: str, result: Result) -> None:
        print(f"\n{name}: {what}\n{result.top(5)}")
        if options.out:
            save_figure(result, options.out / f"{name}.png", f"{name}: {what}")

    for site, what in SITES.items():
        over = ("layer", "span" if site in ("resid_pre", "attn_out", "mlp_out") else "head")
        found = activation_patching(model, pairs, site=site, over=over)
        if site == "resid_pre":
            runs = torch.stack([found.target, found.base])
            texts = {"text": ("clean", "corrupted")}
            logits = Result(runs, ("text", "example"), labels=texts, unit="logits")
            show("logits", "of the right answer minus that of the wrong one", logits)
            print("\nBelow: the share of that difference which one patch restores [95% interval]")
        show(site, what, found.normalized())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    parser = figures_parser(__doc__)
    parser.add_argument("--model", default="pydoc-4l", help="a name or a path (%(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of texts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    return attempt(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
