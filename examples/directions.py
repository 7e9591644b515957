"""Find, test, erase and steer along the direction "inside a part number" in the bundled model.

Texts of the first kind end inside a part number, and texts of the second kind inside a word. A
probe measures where the two kinds can be separated. Its baseline is a probe of `embed`: here a
single letter tells the two kinds apart, so the probe alone does not show that the model knows part
numbers. The erasure is fitted on some texts and tested on other texts. Then the direction is added
to texts of the second kind: how much does the probability of a capital letter rise, and what is the
cost on other texts? The example takes about twenty seconds.

    python examples/directions.py --out out
"""

import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from commands import attempt, figures_parser, pydoc_text
from jaxtyping import Float
from torch import Tensor

from hooks import HookedRunner
from interp.directions import Contrast, difference_of_means, erasure, probe, steering_curve
from models import load

POINT, CAPITALS = "blocks.2.resid_post", "BCDFGHJKLMNPQRSTVWXZ"


def texts(words: list[str], count: int, seed: int) -> tuple[list[str], list[str]]:
    """Return texts that end inside a part number, and texts that end inside a word."""
    draw = random.Random(seed)
    starts = [" ".join(draw.sample(words, 5)) for _ in range(2 * count)]
    numbers = ["".join(draw.sample(CAPITALS, 4)) + f"-{draw.choice('KQVX')}" for _ in range(count)]
    inside = [f"{start} {number}" for start, number in zip(starts, numbers, strict=False)]
    outside = [f"{start} {draw.choice(words)[:3]}" for start in starts[count:]]
    return inside, outside


@torch.no_grad()
def run(out: Path | None) -> None:
    """Print the scores of the direction, of the erasure and of steering."""
    if out:
        out.mkdir(parents=True, exist_ok=True)
    model = load("pydoc-4l")
    runner = HookedRunner(model)
    documentation = pydoc_text()
    # The model was not trained on the last tenth of the documentation.
    held_out = documentation[len(documentation) * 9 // 10 :]
    words = sorted({word for word in held_out.split() if word.isalpha() and len(word) > 4})
    (inside, outside), (others_inside, others_outside) = (
        texts(words, count, seed) for count, seed in ((200, 0), (60, 1))
    )

    kinds = Contrast(inside[:60], outside[:60], pos=[-4, -2, -1])
    found = probe(model, kinds, ["embed", "resid_post"], over="pos")
    print(f"Where the two kinds can be told apart\n{found}")

    erased = erasure(model, (inside, outside), POINT)
    before = difference_of_means(model, (others_inside, others_outside), POINT)
    with runner.hooks({POINT: erased.edit(pos=-1)}):
        after = difference_of_means(model, (others_inside, others_outside), POINT)
        left = probe(model, (others_inside, others_outside), POINT)
    print("\nAfter it was erased, on texts that it was not fitted on")
    print(
        f"  difference of the means: {before[POINT].norm():.2f} before, {after[POINT].norm():.2f} "
        "after"
    )
    print(f"  {left}")

    capitals = [model.to_id(letter) for letter in CAPITALS]

    def capital(logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        return logits[:, -1].log_softmax(-1)[:, capitals].logsumexp(-1)

    # The metric reads the last real token of each text.
    capital.last = 1  # type: ignore[attr-defined]
    v = difference_of_means(model, (inside, outside), POINT)
    plain = [held_out[start : start + 60] for start in range(0, 1200, 60)]
    strengths = [0.0, 0.25, 0.5, 0.75, 1.0]
    curve = steering_curve(model, v, others_outside, strengths, capital, others=plain)
    print(f"\nlog P(a capital letter is next), in nats\n{curve}")
    print(f"the best strength that costs at most 0.5 nats elsewhere: {curve.within(0.5)}")
    if out:
        v.save(out / "inside_a_part_number.safetensors")
        for name, shown in (("probe", found), ("steering", curve)):
            (out / f"{name}.html").write_text(shown._repr_html_(), "utf-8")
        print(f"{out} holds the direction and two pictures")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    options = figures_parser(__doc__).parse_args(arguments)
    return attempt(partial(run, options.out))


if __name__ == "__main__":
    sys.exit(main())
