"""The tuned lens: an affine translator for each layer, fitted to the model's own predictions.

1. Run a batch of texts, and cache the stream entering each block and the final stream at real
   positions; or read rows of a store.
2. Translate each layer's stream, unembed it, and compute KL(final ‖ lens), a few positions at a
   time.
3. Add up the gradients of the translators over all positions. Then Adam takes a step.
4. Repeat with a learning rate that falls linearly to 0 (Belrose et al. 2023).
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import CacheError, HookedRunner
from hooks.base import (
    Texts,
    at_least_float32,
    config_hash,
    each_text,
    number_of,
    progress_of,
    require_integer,
    require_kind,
    seeded,
    shows_progress,
    stacked,
    storage,
    to_device,
    wide_dtype,
    without_gradients,
)
from interp.inputs.texts import padded, require_edits_of_all_texts
from interp.json_form import Table
from interp.numbers.precision import divergence, finite
from interp.protocol import n_logits, of
from interp.reading.affine import AffineLens, for_fit, split_rows


@dataclass(frozen=True, eq=False, repr=False)
class TunedLens(AffineLens):
    """Translators, fitted by `tuned_lens`.

    The lens maps a stream x entering block l to `weight[l] @ x + bias[l]`.

    Attributes:
        weight: one matrix for each block. Row i computes entry i of the result.
        bias: one vector for each block.
        config_hash: the config hash of the model that the lens belongs to; empty if it is unknown.
        losses: the mean KL(final ‖ lens) of each step of the fit, in nats.
        rows: the number of positions that the steps read. If the fit read a text twice, its
            positions count twice.

    >>> losses = torch.tensor([[2.0], [1.5]])
    >>> lens = TunedLens(torch.eye(2)[None], torch.zeros(1, 2), "", losses, rows=600)
    >>> print(repr(lens).replace("; ", chr(10)))
    TunedLens [layer 1, d_model 2], fitted in 2 steps on 600 positions for 6 numbers a layer
    mean KL 2.000 to 1.500 nats
    """

    losses: Float[Tensor, "step layer"]
    rows: int = 0

    _format: ClassVar[str] = "hookscope-tuned-lens-1"

    def _tables(self) -> dict[str, Table]:
        """Return the losses of the fit, and the number of positions that it read."""
        losses = Table(self.losses, "step layer", "nats")
        return {"losses": losses, "rows": Table(self.rows, unit="positions")}

    def __repr__(self) -> str:
        """Return the sizes, the data of the fit, and the mean loss over layers in the first and the
        last step.
        """
        if not len(self.losses):
            return super().__repr__()
        first, last = (f"{step.mean():.3f}" for step in self.losses[[0, -1]])
        size = self.bias.shape[1]
        return (
            f"{super().__repr__()}, fitted in {number_of(len(self.losses), 'step')} "
            f"on {self.rows:,} positions for {size * (size + 1):,} numbers a layer; "
            f"mean KL {first} to {last} nats"
        )

    @classmethod
    def from_params(cls, path: str | os.PathLike[str]) -> "TunedLens":
        """Load a published lens from a file `params.pt` of the package tuned-lens.

        The package is from Belrose et al. 2023. The file does not name its model. Only the sizes
        are checked when the lens is used.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file contains anything else than the translators.
        """
        with storage.one_error(path, "hold the translators of a tuned lens", CacheError):
            parameters = storage.read_saved(Path(path))
            count = len(parameters) // 2
            residuals = [parameters.pop(f"{layer}.weight") for layer in range(count)]
            biases = [parameters.pop(f"{layer}.bias") for layer in range(count)]
            if parameters:
                raise KeyError(*parameters)
            residual = torch.stack(residuals).float()
            bias = torch.stack(biases).float()
            weight = residual + torch.eye(residual.shape[-1])
            return cls(weight, bias, config_hash="", losses=bias.new_zeros(0, count))


@runtime_checkable
class Stored(Protocol):
    """Rows of streams that were saved before by `harvest`: `interp.store.Activations`."""

    def require_weights_of(self, model: nn.Module) -> None:
        """Check that the store is of this model."""

    def batches(
        self, size: int, seed: int | None, names: Sequence[str], *, epochs: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield rows [row, d_model] of each point, in batches."""


@shows_progress
def tuned_lens(
    model: nn.Module,
    texts: Texts | Stored,
    *,
    steps: int = 250,
    batch: int | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TunedLens:
    """Return an affine translator for the stream entering each block, fitted to texts.

    A translator maps x to x + A x + b, and starts at the identity, which is the logit lens. Adam
    minimizes the mean of KL(final ‖ lens) over all real positions, with a learning rate that falls
    linearly to 0 (Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the
    Tuned Lens").

    The fit runs the blocks of the model once in each step; with a store they are not run. Logits
    are computed for a few positions at a time.

    Args:
        model: a model in evaluation mode with `unembed`, `config`, and `resid_pre` and `resid_post`
            in each block. Its weights do not change, and receive no gradients.
        texts: strings or tokens; or a store of these points,
            `harvest(model, texts, ["*.resid_pre", "*.resid_post"], out)`, where the `resid_post` of
            the last block is enough. A lens can overfit, so evaluate it on other texts.
        steps: the number of steps. Default: 250.
        batch: the number of texts in a step. Default: 8; for a store, 1,024 rows.
        learning_rate: the rate of the first step. Default: 1 / d_model, because Adam moves each
            weight by the rate, and d_model of these changes add up.
        seed: the seed of the order of the texts. Default: 0.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The lens, with the loss of each step and layer in nats.

    Raises:
        ValueError: if there are no texts, a text is empty, `steps` or `batch` is below 1, the rate
            is negative, PyTorch's inference mode is on, or a loss is not finite.
        CacheError: if a store is not complete, or is of another model.
        TypeError: if the model has no `unembed` or no `config`.
        UnknownNameError: if the model does not have these points.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> lens = tuned_lens(load("pydoc-4l"), ["def f(x): return x", "import os.path"], steps=8)
    >>> lens.losses[[0, -1]].round(decimals=1)  # [step, layer], in nats
    tensor([[11.0000,  1.1000,  0.6000,  0.4000],
            [ 1.4000,  0.2000,  0.1000,  0.1000]])
    """
    at_once = batch
    if at_once is None:
        at_once = 1024 if isinstance(texts, Stored) else 8
    require_integer("steps", steps)
    require_integer("batch", at_once)
    require_kind("learning_rate", learning_rate, (int, float, type(None)), "a number or None")
    language = of(model, "unembed", "config")
    vocab = n_logits(model)
    size = language.config.d_model
    parameter = next(model.parameters())
    runner, names = for_fit(model)
    dtype = wide_dtype(parameter.dtype)
    weight = torch.zeros(len(names) - 1, size, size, dtype=dtype, device=parameter.device)
    bias = torch.zeros_like(weight[..., 0])
    rate = 1 / size if learning_rate is None else learning_rate
    optimizer = torch.optim.Adam([weight.requires_grad_(), bias.requires_grad_()], lr=rate)
    batches: Iterator[Tensor]
    if isinstance(texts, Stored):
        texts.require_weights_of(model)
        batches = (stacked(rows) for rows in texts.batches(at_once, seed, names, epochs=None))
    else:
        batches = _of_runs(runner, names, texts=texts, batch=at_once, seed=seed)
    losses = []
    n_rows = 0
    read = progress_of(itertools.islice(batches, steps), "steps", steps)
    for step, streams in enumerate(read):
        optimizer.zero_grad()
        n_rows += streams.shape[1]
        streams = to_device(streams, parameter.device).to(parameter.dtype)
        losses.append(_backward(language, vocab, weight=weight, bias=bias, streams=streams))
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.step()
    identity = torch.eye(size, dtype=dtype, device=parameter.device)
    return TunedLens(
        weight=identity + weight.detach(),
        bias=bias.detach(),
        config_hash=config_hash(model),
        losses=finite(torch.stack(losses), "losses"),
        rows=n_rows,
    )


def _of_runs(
    runner: HookedRunner, names: Sequence[str], texts: Texts, batch: int, seed: int
) -> Iterator[Float[Tensor, "stream row d_model"]]:
    """Yield the streams of batches of texts in random order, without end."""
    several = [*each_text(texts)]
    if not several:
        raise ValueError("texts must contain at least one text; got none")
    require_edits_of_all_texts(runner.model)
    order = _order(len(several), seed)
    while True:
        numbers = list(itertools.islice(order, batch))
        text = padded([several[number] for number in numbers], runner.model, numbers)
        cache = without_gradients(runner.capture)(
            text.tokens, names=names, **text.arguments(runner.model)
        )
        real = slice(None) if text.attention_mask is None else text.attention_mask.flatten()
        yield stacked(cache[name].flatten(0, 1)[real] for name in names)


def _backward(
    language: Any,
    vocab: int,
    weight: Float[Tensor, "layer d_model d_model"],
    bias: Float[Tensor, "layer d_model"],
    streams: Float[Tensor, "stream row d_model"],
) -> Float[Tensor, " layer"]:
    """Return the mean KL of each layer in nats, and add its gradients to the gradients of the
    translators.
    """
    losses = torch.zeros_like(bias[:, 0])
    for rows in split_rows(streams, vocab):
        x, final = rows[:-1], rows[-1:]
        logits = without_gradients(language.unembed)(final)
        expected = at_least_float32(logits)[0].log_softmax(-1)
        with torch.enable_grad():
            added = x.to(weight.dtype) @ weight.mT + bias[:, None]
            predicted = at_least_float32(language.unembed(x + added.to(x.dtype))).log_softmax(-1)
            by_layer = divergence(expected, predicted).sum(1) / streams.shape[1]
            by_layer.sum().backward(inputs=[weight, bias])
        losses += to_device(by_layer.detach(), losses.device)
    return losses


def _order(count: int, seed: int) -> Iterator[int]:
    """Yield all numbers below `count` in random order, and then again in another order, without
    end.
    """
    generator = seeded(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
