"""Find where two models keep a variable, by distributed alignment search with its controls.

The first model adds two numbers modulo 5. It keeps both numbers in a rotated space, so the right
result of the search is known: a subspace of five dimensions carries the first number, and all other
dimensions carry nothing of it.

The second model is the bundled model. Its texts name a part and ask for it again, and the model
copies the last digit of the part number. The search takes a part of the activation from a text with
another part number. The model should then answer with the last digit of that other part number.

The example takes about fifteen seconds.

    python examples/interchange.py --out out
"""

import itertools
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from commands import attempt, figures_parser
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import HookPoint
from interp import Pairs
from interp.alignment import align, counterfactual
from models import load

N, LETTERS = 5, "BCDFGHJKLMNPQRSTVWXZ"


class Adder(nn.Module):
    """A model that computes (a + b) mod 5.

    Its hidden vector contains the one-hot vectors of a and b side by side, and is then rotated.
    """

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(2 * N, 2 * N, generator=draw)).Q)
        self.numbers = HookPoint("batch pos d_model")

    def forward(self, tokens: Int[Tensor, "batch 2"]) -> Float[Tensor, "batch 2 answer"]:
        """Return the logits of the five sums, equal at both positions."""
        one_hot = nn.functional.one_hot(tokens, N).float().flatten(1)
        numbers = self.numbers((one_hot @ self.rotation.mT)[:, None].expand(-1, 2, -1))
        a, b = (numbers @ self.rotation).split(N, -1)
        shifted = torch.stack([b.roll(n, -1) for n in range(N)], -2)  # [..., a, sum]
        return 10 * torch.einsum("...a,...as->...s", a, shifted)


def add(a: int, b: int, first: int | None = None) -> Mapping[str, int]:
    """Return the variable and the answer of the sum: the causal model of `Adder`."""
    first = a if first is None else first
    return {"first": first, "answer": (first + b) % N}


def sums() -> tuple[Pairs, Pairs]:
    """Return pairs of inputs with different first numbers, for the fit and for the test."""
    rows = [row for row in itertools.product(range(N), repeat=4) if row[0] != row[2]]
    random.Random(0).shuffle(rows)
    answers = [
        counterfactual(add, {"a": a, "b": b}, {"a": c, "b": d}, "first")["answer"]
        for a, b, c, d in rows
    ]
    table = torch.tensor(rows)
    pairs = Pairs(table[:, 2:], table[:, :2], torch.tensor(answers))
    return pairs[:350], pairs[350:]


def parts(count: int, seed: int) -> Pairs:
    """Return pairs of texts with two part numbers that end in different digits.

    The right answer is the last digit of the part number in the clean text.
    """
    draw, texts, answers = random.Random(seed), [], []
    for _ in range(count):
        numbers = [
            "".join(draw.sample(LETTERS, 4))
            + "-"
            + "".join(draw.sample(LETTERS, 2))
            + str(draw.randrange(10))
            for _ in range(2)
        ]
        digits = draw.sample("123456789", 2)
        texts.append(
            [f"part {n}{d} is sold out; ask for {n}" for n, d in zip(numbers, digits, strict=True)]
        )
        answers.append((digits[0], digits[1]))
    clean, corrupted = zip(*texts, strict=True)
    return Pairs(clean, corrupted, answers)


@torch.no_grad()
def run(out: Path | None) -> None:
    """Print the alignments of both models."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
    train, test = sums()
    planted = align(Adder().eval(), train, "numbers", N, test=test, epochs=8)
    print(f"Two numbers added\n{planted}")

    model = load("pydoc-4l")
    train, test = (parts(count, seed).read_by(model) for count, seed in ((160, 0), (60, 1)))
    copied = align(model, train, "resid_pre", 8, test=test, layers=[0, 3], pos=[13, -1], epochs=6)
    print(f"\nA digit copied: it stands at position 13, and is asked for at the last\n{copied}")
    if out:
        for name, found in (("added", planted), ("copied", copied)):
            (out / f"{name}.html").write_text(found._repr_html_(), "utf-8")
        print(f"{out} holds two pictures")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    options = figures_parser(__doc__).parse_args(arguments)
    return attempt(partial(run, options.out))


if __name__ == "__main__":
    sys.exit(main())
