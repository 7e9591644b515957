"""Small random models of TransformerLens 2.16.1: weights, logits and caches, made by `make.py`."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

FILE = Path(__file__).with_name("models.npz")
STEP = 16  # weights are whole numbers of this part of one, where nothing was folded


def names():
    """The names of all models."""
    with np.load(FILE) as file:
        return list(json.loads(str(file["index"])))


def read(name):
    """One model, in float64.

    `config` is its `HookedTransformerConfig` as a dict of JSON, `state` its state dict with
    buffers, `logits` [batch pos vocab] those of `tokens` [batch pos]. `points` are the names of all
    its points, and `cache` has what those outside the blocks and those of block 1 gave. It is empty
    for most models.
    """
    with np.load(FILE) as file:
        entry = json.loads(str(file["index"]))[name]
        arrays = {kind: file[f"{name}/{kind}"] for kind in ("state", "buffers", "logits", "cache")}
        tokens = torch.tensor(file["tokens"])
    whole = arrays["state"].dtype == np.int8
    arrays["state"] = arrays["state"] / np.float64(STEP if whole else 1)
    parts = {kind: cut(array, entry[kind]) for kind, array in arrays.items()}
    masks = {n: mask.bool() for n, mask in parts["buffers"].items() if n.endswith("mask")}
    return SimpleNamespace(
        name=name,
        config=entry["config"],
        points=entry["points"],
        state=parts["state"] | parts["buffers"] | masks,
        tokens=tokens,
        logits=parts["logits"]["logits"],
        cache=parts["cache"],
    )


def cut(flat, shapes):
    """The tensors that lie one after the other in `flat`, by name, in float64."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    pieces = np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []
    return {
        name: torch.tensor(piece, dtype=torch.float64).reshape(shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
