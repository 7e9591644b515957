"""A pair of texts with a metric, and helpers that compute values and gradients with PyTorch's own
hooks.
"""

import contextlib

import torch

from interp import Pairs, logit_diff
from tests.reference import BATCH, POS, some_tokens

RIGHT, WRONG = torch.tensor([3, 0, 7, 22, 5]), torch.tensor([1, 4, 2, 9, 8])
METRIC = logit_diff(RIGHT, WRONG)
BASE, TARGET = some_tokens(1), some_tokens(2)
FULL = torch.ones(BATCH, POS).bool()
LEFT, RIGHT_PADDED = FULL.clone(), FULL.clone()
LEFT[0, :3], LEFT[2, :1] = False, False
RIGHT_PADDED[0, 4:], RIGHT_PADDED[3, 6:] = False, False


def paired(mask=None, metric=METRIC):
    """Return pairs of texts: values of `TARGET` are patched into the run of `BASE`."""
    return Pairs(TARGET, BASE, attention_mask=mask, metric=metric)


PAIRS = paired()


def measured(model, tokens, mask=None):
    """Return the metric by hand: the difference of two logits at the last real token of each
    text.
    """
    rows, mask = torch.arange(BATCH), torch.ones_like(tokens) if mask is None else mask
    last = model(tokens, attention_mask=mask)[
        rows, tokens.shape[1] - 1 - mask.flip(1).int().argmax(1)
    ]
    return last[rows, RIGHT] - last[rows, WRONG]


@contextlib.contextmanager
def changed(model, changes):
    """Change the outputs of modules in a `with`, by PyTorch's own hooks."""
    with contextlib.ExitStack() as stack:
        for name, change in changes.items():
            hook = model.get_submodule(name).register_forward_hook(
                lambda module, args, output, change=change: change(output)
            )
            stack.callback(hook.remove)
        yield


def values_and_gradients(model, names, tokens, mask=None):
    """Return the value of each module, and the gradient of the summed metric with respect to it."""
    nodes = {}

    def keep(name, output):
        nodes[name] = output.clone().requires_grad_()
        nodes[name].retain_grad()
        return nodes[name]

    with changed(model, {n: lambda output, n=n: keep(n, output) for n in names}):
        measured(model, tokens, mask).sum().backward()
    return {
        n: (v.detach(), torch.zeros_like(v) if v.grad is None else v.grad) for n, v in nodes.items()
    }


def close(ours, theirs, tolerance=1e-11):
    scale = theirs.abs().max().clamp(min=1e-3).item()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)
