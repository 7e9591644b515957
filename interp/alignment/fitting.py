"""Fit a part of a value to pairs: an orthonormal basis of columns, or a mask of given features.

1. Make the part from trainable parameters. For columns, the parameters are the columns of an
   orthogonal matrix. For a mask, there is a number b for each feature, and the mask is
   sigmoid(b / temperature), which becomes sharper as the temperature falls.
2. In each step, interchange the part in a batch of pairs, and descend the gradient of the
   cross-entropy of the right answers.
3. At the end, the part is the basis of columns, or the features whose b is above 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from hooks.base import at_least_float32, require_integer
from interp.alignment.featurizers import Featurizer, coordinates, subspace
from interp.alignment.runs import InterchangeRuns

_COLDEST = 0.01

Learner = tuple[nn.Module, Callable[[float | None], Featurizer]]
"""A module to train, and a function from a temperature to the part.

For the temperature None, the function returns the final part.
"""


@dataclass(frozen=True)
class Fit:
    """Settings of a fit, which learns a part from pairs at a site.

    Attributes:
        k: the number of columns.
        features: the features of which a mask is learned, in place of columns; see
            `alignment.featurizers`. `k` is then ignored.
        sparsity: the cost of a mask with all features, in nats. The cost of a smaller mask is
            proportional to its share of the features.
        epochs, rate, batch: the number of epochs, the learning rate and the batch size of Adam.
        seed: the seed of the initial columns, of the order of the pairs and of the controls.

    >>> Fit(k=2, epochs=5, batch=32).steps(n_pairs=70)  # 3 batches in each epoch
    15
    """

    k: int
    features: Featurizer | None = None
    sparsity: float = 0.0
    epochs: int = 3
    rate: float = 1e-2
    batch: int = 32
    seed: int = 0

    def steps(self, n_pairs: int) -> int:
        """Return the number of steps of a fit to `n_pairs` pairs."""
        return self.epochs * -(-n_pairs // self.batch)

    def __call__(
        self, pairs: InterchangeRuns, done: Callable[[], object] = lambda: None
    ) -> tuple[Featurizer, tuple[float, ...]]:
        """Fit a part to pairs, and return the part and the mean loss of each epoch, in nats.

        Args:
            pairs: the pairs at a site.
            done: a function to call after each step. Default: no function.
        """
        module, part_at = self._learner(pairs.source)
        parameters = [*module.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=self.rate)
        draw = torch.Generator().manual_seed(self.seed)
        n = len(pairs)
        last_step = max(1, self.steps(n) - 1)
        step = 0
        losses = []
        for _ in range(self.epochs):
            total = 0.0
            for rows in torch.randperm(n, generator=draw).split(self.batch):
                with torch.enable_grad():
                    part = part_at(_COLDEST ** (step / last_step))
                    loss = pairs.loss(part, rows)
                    cost = self.sparsity * part.mask.mean() if self.features else 0.0
                    gradients = torch.autograd.grad(loss + cost, parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                total += float(loss.detach()) * len(rows)
                step += 1
                done()
            losses.append(total / n)
        return part_at(None), tuple(losses)

    def _learner(self, like: Tensor) -> Learner:
        """Return the rotation or the mask to train, for values of the same form as `like`."""
        size = like.shape[-1]
        options: dict[str, Any] = {"device": like.device, "dtype": at_least_float32(like).dtype}
        if self.features is not None:
            return _mask(self.features, options)
        require_integer("k", self.k, most=size)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            columns = nn.Linear(self.k, size, bias=False)
            orthogonal(columns)
        return _columns(columns.to(**options), options)

    def random(self, size: int, part: Featurizer) -> Featurizer:
        """Return a random part with `k` columns, or with as many features as `part`.

        Args:
            size: the size of a value.
            part: the learned part.
        """
        draw = torch.Generator().manual_seed(self.seed)
        if self.features is None:
            return subspace(torch.randn(size, self.k, generator=draw))
        return part.only(part.mask[torch.randperm(len(part.mask), generator=draw)])


def _mask(features: Featurizer, options: dict[str, Any]) -> Learner:
    """Return a learner of a mask of features.

    The mask is sigmoid(boundary / temperature). The final mask contains the features whose boundary
    is above 0.
    """
    boundaries = nn.ParameterList([torch.zeros(len(features.mask), **options)])

    def part_at(temperature: float | None) -> Featurizer:
        boundary = boundaries[0]
        if temperature is None:
            return features.only((boundary > 0).to(boundary).detach())
        return features.only(torch.sigmoid(boundary / temperature))

    return boundaries, part_at


def _columns(columns: nn.Linear, options: dict[str, Any]) -> Learner:
    """Return a learner of columns, which stay orthonormal."""
    identity = torch.eye(columns.in_features, **options)

    def part_at(temperature: float | None) -> Featurizer:
        basis = columns(identity).mT
        return coordinates(basis.detach() if temperature is None else basis)

    return columns, part_at
