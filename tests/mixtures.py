"""Mixtures of experts among the tiny models, and what raw hooks and calls of one expert at a time say of them."""

import torch

from hooks import HookedRunner
from tests.attachable import BATCH, LAYERS, MODELS, POS, VOCAB, transformers

N = 5
MIXTURES = [
    name
    for name in MODELS
    if {"moe_topk", "kv_channels"} & {*MODELS[name]} and name in transformers.CONFIG_MAPPING
]
# Those whose experts are not called with numbers and weights.
KINDS = [name for name in MIXTURES if name not in ("jetmoe", "llama4_text")]
NORMED = ("afmoe", "axk1", "flex_olmo", "kolibri1")  # a norm comes after
MLP = f"blocks.{LAYERS - 1}.mlp"
TOKENS = torch.randint(3, VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(4))


def logits(model):
    """Those of `TOKENS`."""
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def experts_of(model):
    """The last block's experts."""
    return [m for n, m in model.named_modules() if n.endswith(".experts")][-1]


def alone_of(experts, x):
    """What each expert gives, each by a call of its own, [row expert d_model]."""
    weight = torch.ones(len(x), 1, dtype=x.dtype)
    with torch.no_grad():
        given = [experts(x, torch.full((len(x), 1), n), weight) for n in range(N)]
    return torch.stack(given, 1)


def call_of(twin, change=None):
    """The arguments and the output of the last block's experts, the first maybe changed, and the logits."""
    seen, experts = [], experts_of(twin)
    handles = [experts.register_forward_hook(lambda module, *call: seen.append(call))]
    if change is not None:
        handles.append(experts.register_forward_pre_hook(lambda module, args: change(*args)))
    found = logits(twin)
    for handle in handles:
        handle.remove()
    return *seen[0], found


def edited(model, hooks):
    """The logits under hooks."""
    with torch.no_grad():
        return HookedRunner(model).run_with_hooks(TOKENS, hooks=hooks, use_cache=False).logits
