"""The command `generate`: a continuation of a text, also under edits."""

import argparse

import torch

from hooks import HookedRunner
from interp import edits
from interp.cli.common import model_of, print_or_write, text_of_options
from interp.cli.edits import parsed
from interp.directions import Direction
from interp.edits.edit import Edit
from interp.json_form import Table, form
from interp.protocol import of


def run(options: argparse.Namespace) -> None:
    """Print the text with its continuation."""
    changes = [parsed(text) for text in options.edit]
    for text in options.steer:
        changes += _steering(text)
    model = model_of(options, trained=True)
    prompt = text_of_options(options)
    with HookedRunner(model).hooks(changes):
        if isinstance(language := of(model), type(model)):
            from models import generate_text

            text = generate_text(
                model,
                prompt,
                max_new_tokens=options.tokens,
                temperature=options.temperature,
                seed=options.seed,
            )
        else:
            tokens = language.to_tokens(prompt).tokens
            settings = {"do_sample": options.temperature > 0}
            if options.temperature > 0:
                settings["temperature"] = options.temperature
            # `transformers` draws from PyTorch's global generators, which are restored afterwards.
            devices = [model.device] if model.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                torch.manual_seed(options.seed)
                rows = model.generate(tokens, max_new_tokens=options.tokens, **settings)
            text = language.to_text(rows[0])
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
