"""Settings, texts and batches of training, and the loss of each next token.

Tokens for training are one long text [pos], or many texts of equal length [walk, pos]. They are
called walks here, because random walks on a graph are the usual example. A window, which is a row
of a batch, is always inside one walk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from hooks.base import (
    HasLogits,
    Text,
    Texts,
    as_text,
    at_least_float32,
    each_text,
    logits_in,
    names_fields,
    padding_messages,
    padding_of,
    require_integer,
    require_kind,
    require_module,
    shown,
    skip_token_checks,
    to_device,
    uncompiled,
    without_gradients,
)
from models.checks import INTEGERS, check_tokens, check_types
from models.mode import mode
from models.transformer import Transformer

Batches = Callable[[int, torch.Generator], Int[Tensor, "batch pos"]]
"""A function that returns the batch of a step, counted from 0.

For example, `lambda step, generator: sample_batch(tokens, 8, 33, generator)` draws 8 windows of 33
tokens.

The model reads all tokens of a row except the last, and predicts all except the first.

A batch must depend only on the step and the generator. Otherwise a resumed run continues with other
batches, without an error.
"""


TrainingText = Int[Tensor, "*_walk _pos"] | Sequence[int]
"""One long text [pos], or many texts of equal length [walk, pos], such as random walks on a graph.

A window, a row of a training batch, never contains parts of two of these texts.
"""


@names_fields
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of training.

    The defaults are the defaults of nanoGPT for small character models (Karpathy 2022).

    Attributes:
        steps: number of updates.
        batch_size: number of rows of a batch, and number of windows that `evaluate` reads at once.
        learning_rate: the largest learning rate. It is reached after `warmup` steps and then falls
            along a cosine (Loshchilov & Hutter 2017).
        final_rate: the rate at the end, as a share of `learning_rate`; 1 for a constant rate.
        warmup: steps of linear warm-up.
        betas: AdamW's decay rates for the mean and the mean square of gradients.
        weight_decay: AdamW's weight decay of matrices. Biases and norms are not decayed.
        clip: the largest norm of the whole gradient; 0 means no limit.
        seed: the seed of batches and dropout.
        train_fraction: the share of the text, or of many texts of equal length, for training. The
            rest is held out.
        evaluate_every: steps between validations. A checkpoint is saved after each validation. Both
            are also done after the last step.
        characters_per_token: mean number of characters per token, for bits per character: 1 if
            tokens are characters, 0 if unknown.

    Raises:
        ValueError: naming the field, its value and its range.

    >>> config = TrainingConfig(steps=10, warmup=2, learning_rate=0.5)
    >>> config.rate(0), config.rate(2)
    (0.25, 0.5)
    """

    steps: int
    batch_size: int = 12
    learning_rate: float = 1e-3
    final_rate: float = 0.1
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    train_fraction: float = 0.9
    evaluate_every: int = 250
    characters_per_token: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        # AdamW itself checks the ranges of the rate, the betas and the weight decay.
        least = {"steps": 1, "batch_size": 1, "evaluate_every": 1, "warmup": 0, "clip": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}; got {getattr(self, name)}")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate must be from 0 to 1; got {self.final_rate}")

    def rate(self, step: int) -> float:
        """Return the learning rate at a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        decrease = (1 - self.final_rate) * (1 - math.cos(math.pi * progress)) / 2
        return self.learning_rate * (1 - decrease)


@dataclass(frozen=True)
class Evaluation:
    """A mean loss in several units.

    Attributes:
        nats: cross-entropy in nats per token.
        characters_per_token: mean length of a token: 1 if tokens are characters, 0 if unknown.
        standard_error: the standard error of `nats` over windows; None for a single window.

    >>> Evaluation(nats=math.log(8), characters_per_token=2.0).bits_per_character
    1.5
    """

    nats: float
    characters_per_token: float = 0.0
    standard_error: float | None = None

    @property
    def bits(self) -> float:
        """Cross-entropy in bits per token."""
        return self.nats / math.log(2)

    @property
    def bits_per_character(self) -> float | None:
        """Cross-entropy in bits per character; None if the length of tokens is unknown."""
        return self.bits / self.characters_per_token if self.characters_per_token else None

    @property
    def perplexity(self) -> float:
        """exp(nats): the number of equally likely tokens with the same cross-entropy."""
        # The largest float64 is about exp(709.8).
        return math.exp(self.nats) if self.nats < 709 else math.inf


def tensor_of(tokens: TrainingText, name: str) -> Int[Tensor, "..."]:
    """Return the tokens of a text as a tensor.

    Raises:
        TypeError: if they are neither a tensor, an array nor a list, such as a text.
    """
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence | Tensor | np.ndarray):
        raise TypeError(
            f"{name} must be a tensor or a list of integers; got {shown(tokens)} "
            "(tokenizer.encode(text) gives the tokens of a text)"
        )
    return torch.as_tensor(tokens)


def next_token_loss(
    logits: Float[Tensor, "batch pos vocab"] | HasLogits,
    tokens: Texts,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "batch pos-1"]:
    """Return the cross-entropy of each next token, in nats, and NaN at padding: use `nanmean`.

    The value is NaN if the token or the token before it is padding. So the `mean` over padded texts
    is NaN too.

    Args:
        logits: the logits of the next token at each position, or the output of a model of
            `transformers`.
        tokens: the tokens that the model read: a tensor [batch, pos], lists of tokens, a `Text`, or
            the output of a tokenizer of `transformers`. A `Text` and the output of a tokenizer
            contain their mask. Convert strings first: `model.to_tokens(text)`.
        attention_mask: 1 or True at real tokens of a tensor, 0 or False at padding. Default: the
            mask of the run that computed the logits, if it is known; see `interp.measure`.

    Returns:
        The losses [batch, pos - 1], in nats. Entry i is the loss of token i + 1, in the dtype
        of the logits.

    Raises:
        TypeError: if the tokens are strings or are not integers, or if the logits or the mask are
            no tensor.
        ValueError: if the tokens have other axes than [batch, pos], if the logits or the mask have
            another shape, or if a mask is given twice.

    >>> logits = torch.zeros(1, 3, 8)  # eight tokens, equally likely
    >>> next_token_loss(logits, torch.tensor([[5, 0, 7]])).exp()
    tensor([[8., 8.]])
    >>> padded = next_token_loss(logits, torch.tensor([[5, 0, 7]]), torch.tensor([[1, 1, 0]]))
    >>> padded.mean(), padded.nanmean().exp()
    (tensor(nan), tensor(8.))
    """
    text = _text_read(tokens)
    if attention_mask is not None:
        if text.attention_mask is not None:
            raise ValueError(padding_messages.second_mask("texts with a mask"))
        text = replace(text, attention_mask=attention_mask)
    scores = logits_in(logits)
    require_kind(
        "logits",
        scores,
        Tensor,
        words="a tensor [batch, pos, vocab]",
        call="model(tokens) gives it",
    )
    if scores.shape[:2] != text.tokens.shape:
        raise ValueError(
            f"logits must have the positions of the tokens, {[*text.tokens.shape]}; got "
            f"{[*scores.shape]}"
        )
    if text.attention_mask is None:
        text = replace(text, attention_mask=padding_of(scores))
    next_tokens = to_device(text.tokens[:, 1:], scores.device)
    losses = F.cross_entropy(scores[:, :-1].transpose(1, 2), next_tokens, reduction="none")
    if text.attention_mask is None:
        return losses
    real = to_device(text.real, scores.device)
    return losses.where(real[:, 1:] & real[:, :-1], torch.nan)


def _text_read(tokens: Texts) -> Text:
    """Return the texts whose positions the logits have, from tokens in any form.

    Raises:
        TypeError: if they are strings, or are not integers.
        ValueError: if they have other axes than [batch, pos].
    """
    if isinstance(tokens, str | list | tuple):
        rows = [*each_text(tokens)]
        if any(isinstance(row, str) for row in rows):
            raise TypeError(
                f"tokens must be integers, because next_token_loss has no tokenizer; got "
                f"{shown(tokens)}: write next_token_loss(logits, model.to_tokens(text)), or "
                "attached.to_tokens(text) after attached = attach(model)"
            )
        token_rows = [torch.as_tensor(row) for row in rows]
        for row in token_rows:
            check_tokens(row[None])
        tokens = Text.padded(token_rows) if rows else tokens
    text = as_text(tokens)
    if not isinstance(text, Text):
        check_tokens(tokens)
    check_tokens(text.of_logits.tokens)
    return text.of_logits


Loss = Callable[[Transformer, Int[Tensor, "batch pos"]], Float[Tensor, " batch"]]
"""A loss: a function from the model and the rows of a batch to a number for each row, such as
`row_losses`.
"""


def row_losses(model: Transformer, rows: Int[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
    """Return the mean cross-entropy of each row, in nats, over all tokens except the first."""
    rows = to_device(rows, model.token_embedding.weight.device).long()
    # `check_learnable` has already checked these tokens.
    with skip_token_checks():
        logits = model(rows[:, :-1])
    # In half precision, the sum over tokens would be rounded or infinite.
    losses = F.cross_entropy(
        at_least_float32(logits).flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(rows), -1).mean(1)


def train_test_split(
    tokens: Int[Tensor, "text ..."], fraction: float = 0.9
) -> tuple[Int[Tensor, "training ..."], Int[Tensor, "validation ..."]]:
    """Divide tokens into a first part for training and a second part for validation.

    Args:
        tokens: one long text [pos], or many short texts of equal length [walk, pos], such as random
            walks on a graph.
        fraction: the share of the first part, which is for training.

    Returns:
        The first part and the second part, with the axes of `tokens`. They share memory with
        `tokens`. A single text is divided at a position. Of many texts, the first texts are for
        training, and each text stays whole.

    Raises:
        ValueError: if one of the two parts would be empty.

    >>> [part.tolist() for part in train_test_split(torch.arange(5), 0.6)]
    [[0, 1, 2], [3, 4]]
    >>> [part.tolist() for part in train_test_split(torch.tensor([[0, 1], [2, 3], [4, 5]]), 0.7)]
    [[[0, 1], [2, 3]], [[4, 5]]]
    """
    require_kind("fraction", fraction, (int, float), "a number between 0 and 1")
    tokens = tensor_of(tokens, "tokens")
    count = int(len(tokens) * fraction)
    if not 0 < count < len(tokens):
        raise ValueError(
            f"both parts must have tokens or walks; got {count} of {len(tokens)} for training, "
            f"with a fraction of {fraction}"
        )
    return tokens[:count], tokens[count:]


def sample_batch(
    tokens: Int[Tensor, "*walk pos"], batch: int, length: int, generator: torch.Generator
) -> Int[Tensor, "batch length"]:
    """Return random windows of a text.

    Args:
        tokens: one long text [pos], or many texts of equal length [walk, pos], such as random walks
            on a graph. Each window is inside one text.
        batch: the number of windows.
        length: the number of tokens of a window.
        generator: the generator of the draws, on the CPU.

    Returns:
        The windows [batch, length], on the device of the text. Each possible window is equally
        likely.

    Raises:
        ValueError: if the text, or each of many texts, is shorter than a window.

    >>> rows = sample_batch(torch.arange(10), 2, 4, torch.Generator().manual_seed(0))
    >>> (rows - rows[:, :1]).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    walks = torch.atleast_2d(tokens)
    starts = walks.shape[1] - length + 1
    if starts < 1:
        raise ValueError(f"the text must have at least {length} tokens; got {walks.shape[1]}")
    drawn = torch.randint(len(walks) * starts, (batch, 1), generator=generator)
    indices = (drawn // starts, drawn % starts + torch.arange(length))
    return walks[tuple(to_device(index, walks.device) for index in indices)]


@without_gradients
def evaluate(
    model: Transformer,
    tokens: TrainingText,
    batch: int = 16,
    characters_per_token: float = 0.0,
    loss: Loss = row_losses,
) -> Evaluation:
    """Return the mean loss over consecutive windows of the whole context, in evaluation mode.

    Windows do not overlap. A shorter rest at the end of a text is ignored. After the evaluation,
    each module is again in the mode (training or evaluation) that it was in before.

    Args:
        model: the model to measure.
        tokens: one long text [pos], or many texts of equal length [walk, pos].
        batch: the number of windows that are read at once.
        characters_per_token: the mean length of a token; 1 if tokens are characters.
        loss: the loss; see `train`. Default: the loss of each next token.

    Returns:
        The mean loss, in nats per token unless `loss` has another unit, and its standard error over
        windows.

    Raises:
        TypeError: if the model is not a `Transformer`.
        ValueError: if the tokens are not integers or are outside the vocabulary, if the text or
            each walk is shorter than a window and its next token, or if `batch` is below 1.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=4, n_layers=1, n_heads=1, d_model=2)
    >>> round(evaluate(Transformer(config), torch.arange(5)).perplexity)  # it knows nothing yet
    7
    """
    require_plain_model(model)
    length = model.config.n_ctx
    require_integer("batch", batch)
    tokens = tensor_of(tokens, "tokens")
    check_learnable("the text", tokens, least=length + 1, vocab_size=model.config.vocab_size)
    windows = tokens.unfold(-1, length + 1, length).flatten(0, -2)  # [window, pos]
    with mode(model, training=False):
        batch_losses = [loss(model, rows) for rows in windows.split(batch)]
    losses = torch.cat(batch_losses).cpu().double()
    error = losses.std().item() / len(losses) ** 0.5 if len(losses) > 1 else None
    return Evaluation(losses.mean().item(), characters_per_token, error)


def require_plain_model(model: nn.Module) -> None:
    """Check that a model to train or to evaluate is a `Transformer`, which may be compiled.

    Raises:
        TypeError: if it is another model.
    """
    require_module(model)
    if not isinstance(uncompiled(model), Transformer):
        raise TypeError(
            f"model must be a models.Transformer; got a {type(model).__name__} (from_hf(model) "
            "makes one of a model of transformers; interp.cross_entropy(texts) is a metric of the "
            "loss for any model)"
        )


def check_learnable(what: str, tokens: Tensor, least: int, vocab_size: int) -> None:
    """Check tokens that would silently give a wrong loss, or an error later.

    Floats would be rounded, and cross-entropy ignores targets of -100.

    Args:
        what: the name of the tokens, for the error.
        tokens: the tokens, [pos] or [row, pos].
        least: the smallest number of positions.
        vocab_size: the size of the vocabulary.

    Raises:
        ValueError: if the tokens are not integers [pos] or [row, pos], have fewer than `least`
            positions or no row, or are outside the vocabulary.
    """
    fits = tokens.ndim in (1, 2) and tokens.dtype in INTEGERS
    if not fits or tokens.shape[-1] < least or not len(tokens):
        raise ValueError(
            f"{what} must be integers [pos] or [row, pos] with pos at least {least}; got "
            f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        )
    low, high = torch.stack(torch.aminmax(tokens)).tolist()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} must have tokens from 0 to {vocab_size - 1}; got tokens from {low} to {high}"
        )
