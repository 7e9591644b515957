"""Gradients of readers before their norms, compared with autograd through each norm alone."""

import torch
from torch import nn

from hooks import HookPoint, Identity
from interp.effects.reader_gradients import Pullbacks, StreamReaders
from models.norm import LayerNorm, RMSNorm

BATCH, POS, D_MODEL, D_HEAD, HEADS = 2, 3, 7, 4, 5


class Power(nn.Module):
    """A norm of a user, whose scale depends on a buffer."""

    centres = False

    def __init__(self, power):
        super().__init__()
        self.scale = HookPoint("batch pos 1")
        self.weight = nn.Parameter(torch.ones(D_MODEL))
        self.register_buffer("power", torch.tensor(power, dtype=torch.float64))

    def forward(self, x):
        return x / self.scale(x.abs().pow(self.power).sum(-1, keepdim=True) + 1) * self.weight


def norms():
    """Return norms with equal and with different settings."""
    kinds = [LayerNorm(D_MODEL), LayerNorm(D_MODEL, eps=0.5), RMSNorm(D_MODEL), Identity()]
    kinds += [LayerNorm(D_MODEL), RMSNorm(D_MODEL, eps=0.5), Power(2.0), Power(3.0)]
    return [kind.double() for kind in kinds]


def test_each_reader_has_the_gradient_through_its_own_norm():
    torch.manual_seed(0)
    readings, streams, gradients, expected = [], {}, [], []
    for n, norm in enumerate(norms()):
        for weight in norm.parameters():
            nn.init.normal_(weight)
        # Every second norm is read by heads, and the others directly.
        heads = torch.randn(HEADS, D_HEAD, D_MODEL).double() if n % 2 else None
        width = D_MODEL if heads is None else HEADS * D_HEAD
        readings.append(StreamReaders("", norm, at="", weight=heads, readers=slice(0, 1)))
        stream = torch.randn(BATCH, POS, D_MODEL).double().requires_grad_()
        gradient = torch.randn(BATCH, POS, width).double()
        normed = norm(stream)
        by_reader = [(normed, gradient)]
        if heads is not None:
            parts = gradient.split(D_HEAD, -1)
            by_reader = [(normed @ head.T, part) for head, part in zip(heads, parts, strict=True)]
        expected.append(
            torch.stack(
                [
                    torch.autograd.grad((read * part).sum(), stream, retain_graph=True)[0]
                    for read, part in by_reader
                ]
            )
        )
        streams[n] = stream.detach()
        gradients.append(gradient)
    pullbacks = Pullbacks(readings, D_MODEL, torch.device("cpu"))
    scales = pullbacks.scales(streams)
    for n, reading in enumerate(readings):
        out = torch.full_like(expected[n], torch.nan)
        pullbacks.put(n, streams[n], gradient=gradients[n], scale=scales.get(n), out=out)
        torch.testing.assert_close(
            out, expected[n], msg=lambda text, r=reading: f"{r.norm}: {text}"
        )
