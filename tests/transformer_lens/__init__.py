"""Small random models of TransformerLens 2.16.1: weights, logits and caches.

`make.py` made them.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

FILE = Path(__file__).with_name("models.npz")
# The weights of the models are multiples of 1 / STEP, except where other weights were folded into
# them.
STEP = 16


def names():
    """Return the names of all models."""
    with np.load(FILE) as file:
        return list(json.loads(str(file["index"])))


def read(name):
    """Return one model in float64, as an object with these attributes.

    `config` is its `HookedTransformerConfig` as a dict. `state` is its state dict with buffers.
    `logits` [batch pos vocab] are the logits of `tokens` [batch pos]. `points` are the names of all
    points. `cache` contains the values of block 1 and of the points outside of blocks. For most
    models, it is empty.
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
    """Return the tensors that are joined in `flat`, by name, in float64."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    pieces = np.split(flat, np.cumsum(sizes)[:-1]) if sizes else []
    return {
        name: torch.tensor(piece, dtype=torch.float64).reshape(shape)
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
