"""The figures of `tiny_lm.py`: losses by step, and attention patterns."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from commands import VISIBLE
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from hooks import HookedRunner
from models import Evaluation, Tokenizer, Transformer

# The most layers and heads to draw.
MAPS = 6


def loss_figure(losses: Sequence[float], validation: Mapping[int, Evaluation]) -> Figure:
    """Training and validation loss by step, in nats per token and, on the right, in bits per
    character.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    window = max(1, len(losses) // 100)
    if window > 1:
        axes.plot(steps, losses, color="#c9d7e8", linewidth=0.6)
    smooth = torch.tensor(losses, dtype=torch.float64).unfold(0, window, 1).mean(1)
    label = f"training, mean of {window} steps" if window > 1 else "training"
    axes.plot(steps[window - 1 :], smooth.numpy(), color="#1f5fa8", label=label)
    nats = [found.nats for found in validation.values()]
    axes.plot(list(validation), nats, "o-", color="#c4501b", label="validation")
    length = next(iter(validation.values())).characters_per_token
    axes.set(xlabel="step", ylabel=f"loss in nats per {'character' if length == 1 else 'token'}")
    factor = math.log(2) * length
    to_bits, to_nats = partial(np.multiply, 1 / factor), partial(np.multiply, factor)
    bits = axes.secondary_yaxis("right", functions=(to_bits, to_nats))
    bits.set_ylabel("bits per character")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def attention_figure(model: Transformer, tokenizer: Tokenizer, tokens: Sequence[int]) -> Figure:
    """Attention patterns on a text, one map for each of the first layers and heads."""
    names, rows = "blocks.*.attn.pattern", torch.tensor([tokens])
    _, cache = HookedRunner(model).run_with_cache(rows, names=names)
    layers, heads = min(model.config.n_layers, MAPS), min(model.config.n_heads, MAPS)
    labels = labels_of(tokenizer.tokens_as_text(tokens))
    # Horizontal code points and words would overlap.
    rotation = "vertical" if max(map(len, labels)) > 1 else "horizontal"
    style: dict[str, Any] = {"fontsize": 5, "parse_math": False}  # $ must not begin a formula
    figure = Figure(figsize=(2.4 * heads + 0.6, 2.5 * layers + 0.4), layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    # The square root makes weights of a tenth visible too.
    shades = PowerNorm(0.5, vmin=0, vmax=1)
    for layer in range(layers):
        for head, axes in enumerate(grid[layer]):
            pattern = cache["pattern", layer][0, head].numpy()
            image = axes.imshow(pattern, norm=shades, cmap="Blues")
            axes.set_title(f"layer {layer}, head {head}", fontsize=8)
            axes.set_xticks(range(len(labels)), labels, **style, rotation=rotation)
            axes.set_yticks(range(len(labels)), labels, **style)
            axes.tick_params(length=0)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    return figure


def labels_of(pieces: Sequence[str]) -> list[str]:
    """Return a label for each token: its characters.

    A character that the font of Matplotlib does not have is shown by its code point.
    """
    font = get_font(findfont(FontProperties()))

    def label(character: str) -> str:
        mark = VISIBLE.get(character, character)
        known = mark.isprintable() and font.get_char_index(ord(mark))
        return mark if known else f"{ord(character):04X}"

    return ["".join(map(label, piece)) for piece in pieces]
