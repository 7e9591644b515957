"""The command `generate`: a continuation of a text, also under edits."""

import argparse

from hooks import HookedRunner
from interp import edits
from interp.cli.common import model_of, print_or_write, text_of_options
from interp.cli.edits import parsed
from interp.directions import Direction
from interp.edits.edit import Edit
from interp.json_form import Table, form


def run(options: argparse.Namespace) -> None:
    """Print the text with its continuation."""
    from models import generate_text

    changes = [parsed(text) for text in options.edit]
    for text in options.steer:
        changes += _steering(text)
    model = model_of(options, trained=True)
    prompt = text_of_options(options)
    with HookedRunner(model).hooks(changes):
        text = generate_text(
            model,
            prompt,
            max_new_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    about = {"edits": options.edit, "steered by": options.steer}
    texts = {"prompt": Table(prompt), "text": Table(text)}
    print_or_write(options, text, form("Generated", texts, about))


def _steering(text: str) -> list[tuple[str, Edit]]:
    """Return the edits that add the direction in a file."""
    path, _, scale = text.rpartition(":") if ":" in text else (text, "", "1")
    try:
        factor = float(scale)
    except ValueError:
        raise ValueError(
            f"--steer must be a file, or a file and a number such as v.gguf:2; got {text!r}"
        ) from None
    direction = Direction.load(path)
    return [(name, edits.add(direction, factor)) for name in direction.vectors]
