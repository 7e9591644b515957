"""Texts and a metric for graphs of the models in attachable.json."""

import torch

from interp import Pairs
from tests.attachable import VOCAB

CLEAN, OTHER = torch.randint(2, VOCAB, (2, 3, 7), generator=torch.Generator().manual_seed(3))


def metric(logits):
    return logits[:, -1, 3] - logits[:, -1, 5]


PAIRS = Pairs(CLEAN, OTHER, metric=metric)
