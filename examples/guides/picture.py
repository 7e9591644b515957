"""Draw the README's picture: the share of the answer that each head of the bundled model brings back."""

from pathlib import Path

from interp import Pairs, activation_patching
from models import load


def main() -> None:
    """Write `patched.png` beside this file."""
    model = load("pydoc-4l")
    texts = [f"part ZQXJ-KV8{digit} is sold out; ask for ZQXJ-KV8" for digit in "14"]
    patched = activation_patching(model, Pairs(*texts, ("1", "4")), site="z").normalized()
    figure = patched.plot()
    figure.set_size_inches(5, 3)
    figure.savefig(Path(__file__).with_name("patched.png"), dpi=110)


if __name__ == "__main__":
    main()
