"""Padding in attached models: its weight in attention patterns, and positions of padded texts.

Patterns: the library `transformers` makes a mask from the causal rule, the window of a block and
the padding of the texts, and passes the mask to each attention module. If a hook is active at
`scores` or `pattern`, `pattern_of` computes the pattern:

1. Add the mask to the scores, after the cap and the bias (`_masked_scores`). Without a mask, hide
   the later keys.
2. Find the queries that see no key after an edit. Their pattern is 0 (`queries_without_keys`).
3. Compute the softmax over keys, with the sink of each head if the model has sinks.

Without a hook, the kernel of the model does the same. A module with its own attention code adds the
mask itself; only step 2 is added to its softmax. The masks of the plain model are in
`models.running.masks`.

Positions: `PaddedPositions` also checks whether a model reads padding.

1. Find the sides of the padding in a mask (`PaddedPositions.of`).
2. Test in runs of a few tokens, once for each side, if padding changes the output. If it does,
   raise an error that describes the texts that the model can read.
3. Raise an error if a text would get the rotary frequencies of a longer text (`RotaryLengths`).
4. If padding comes before a token, find the position of the first token, also in such runs. Return
   positions that count only real tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from hooks.base import (
    HALF,
    FakeTensor,
    Scoped,
    TwoRuns,
    agree,
    are_reproduced,
    block_rounding,
    has_shards,
    is_same,
    logits_rounding,
    padding_messages,
    real_positions,
    run_rounding,
    sides_of_padding,
    warn,
    wide_dtype,
    without_gradients,
)
from hooks.shared import hooks_disabled
from models.attached.original import is_encoder_decoder, logits_of, table_of, tokens_for
from models.attached.rotary_lengths import RotaryLengths
from models.mode import mode


@dataclass(frozen=True)
class KernelOptions:
    """The arguments of an attention function of `transformers` that change its numbers.

    Attributes:
        is_causal: whether queries see no later keys if there is no mask.
        scaling: the factor of q·k. Default: one over the square root of d_head.
        dropout: the dropout probability of the pattern in training.
        softcap: the bound of the scores; None without a bound.
        s_aux: the score of the sink of each head, [head]; None without sinks (gpt-oss).
        position_bias: a bias that is added to the scores; None without a bias.
    """

    is_causal: bool
    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, kwargs: Mapping[str, Any]) -> "KernelOptions":
        """Return the options among the arguments of a module's attention function."""
        names = ("scaling", "dropout", "softcap", "s_aux", "position_bias")
        known = {name: kwargs[name] for name in names if name in kwargs}
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return cls(is_causal, **known)


def pattern_of(
    scores: Float[Tensor, "batch head query key"],
    mask: Any,
    options: KernelOptions,
    dtype: torch.dtype,
    is_edited: bool,
) -> Float[Tensor, "batch head query key"]:
    """Return the attention pattern: the softmax of the masked scores over keys.

    Args:
        scores: the scores, which hooks may have edited.
        mask: the mask that the module computed, or None.
        options: the cap, the bias and the sinks.
        dtype: the dtype of the pattern. A pattern with sinks has the dtype of the masked scores.
        is_edited: whether a hook has edited the scores.
    """
    masked = _masked_scores(scores, mask, options=options, is_edited=is_edited)
    without_keys = queries_without_keys(scores, masked) if is_edited else None
    if without_keys is not None:
        masked = masked.masked_fill(without_keys, 0)
    if options.s_aux is None:
        pattern = F.softmax(masked, -1, dtype=wide_dtype(masked.dtype)).to(dtype)
    else:
        pattern = _softmax_with_sink(masked, options.s_aux)
    return pattern if without_keys is None else pattern.masked_fill(without_keys, 0)


def _masked_scores(
    scores: Float[Tensor, "batch head query key"],
    mask: Any,
    options: KernelOptions,
    is_edited: bool,
) -> Float[Tensor, "batch head query key"]:
    """Return the scores with the cap, the bias and the mask.

    Args:
        scores: the scores, which hooks may have edited.
        mask: the mask that the module computed, or None.
        options: the cap and the bias.
        is_edited: whether a hook has edited the scores.
    """
    softcap = options.softcap
    bias = options.position_bias
    masked = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    if is_edited:
        # The cap makes a score of -inf finite, so set the keys that an edit removed to -inf again.
        masked = masked.masked_fill(torch.isneginf(scores), -torch.inf)
    if mask is None and options.is_causal and scores.shape[-2] > 1:
        mask = _causal(masked)
    masked = masked if bias is None else masked + bias
    if mask is None:
        return masked
    if mask.dtype == torch.bool:
        # A query without visible keys gets a uniform pattern, as in the eager kernels.
        return masked.masked_fill(~mask, torch.finfo(masked.dtype).min)
    return masked + mask


def _causal(scores: Tensor) -> Tensor:
    """Return the causal mask of scores, [query, key]; True at visible keys."""
    # Without a mask, queries and keys begin at the same position. Any further keys are free places
    # of a static cache.
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


def queries_without_keys(
    scores: Float[Tensor, "batch head query key"], masked: Float[Tensor, "batch head query key"]
) -> Bool[Tensor, "batch head query 1"]:
    """Return the queries for which edits of the scores left no visible key.

    For these queries, softmax would return NaN. Or, because the kernels mask with the lowest finite
    number, the queries would attend to masked keys. Instead, the pattern of these queries is 0, as
    in a plain transformer.

    Args:
        scores: edited scores. Edits set keys to -inf, as `edits.knockout` does.
        masked: the same scores after the mask.
    """
    lowest = torch.finfo(masked.dtype).min / 2
    has_lost_keys = torch.isneginf(scores).any(-1, keepdim=True)
    return has_lost_keys & (masked.amax(-1, keepdim=True) <= lowest)


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Return the weights of the keys in a model whose heads have sinks (gpt-oss).

    The sink of a head gets a part of each query's attention, so the weights of the keys sum to less
    than 1.
    """
    sink = sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    joined = torch.cat([scores, sink], -1)
    joined = joined - joined.amax(-1, keepdim=True)
    return F.softmax(joined, -1, dtype=joined.dtype)[..., :-1]


# Whether the current run tests how the model counts positions.
_alone = Scoped("alone", False)


class PaddedPositions:
    """The positions that a model needs if texts are padded.

    Args:
        attached: the model's parts.
        takes_positions: whether the model has an argument for positions.
    """

    def __init__(self, attached: Any, takes_positions: bool) -> None:
        self._attached = attached
        self._takes_positions = takes_positions
        self._reads_padding: dict[tuple[padding_messages.Side, bool], bool] = {}

    def of(self, mask: Shaped[Tensor, "batch pos"], copies_text: bool = False) -> dict[str, Tensor]:
        """Return the argument `position_ids` for padded texts; empty if the model does not need it.

        The positions count only columns without padding. The model needs them if padding comes
        before a token of some text, and if the model accepts positions.

        Args:
            mask: True at real tokens.
            copies_text: whether the decoder gets no text in the run. Some models then copy the text
                of their encoder to the decoder. Default: False.

        Raises:
            ValueError: if the model accepts no positions and counts padding, or if padding changes
                its output. If a text gets the rotary frequencies of a longer text.
        """
        if _alone.get() or mask.is_meta or isinstance(mask, FakeTensor):
            return {}
        has_left, has_right = sides_of_padding(mask)
        if (has_left or has_right) and self.lengths.depend_on_runs:
            counts = mask.sum(1).tolist()
            # Positions count only real tokens if padding comes before a token.
            longest = max(counts) if has_left else mask.shape[1]
            if (message := self.lengths.message(counts, longest)) is not None:
                raise ValueError(message)
        if has_left:
            self._require_unread("left", copies_text)
        if has_right:
            self._require_unread("right", copies_text)
        if not has_left or not self._attached.has("run_block"):
            return {}
        if (first := self._first_position) is not None:
            return {"position_ids": real_positions(mask.bool()) + first}
        if self._counts_padding:
            kind = type(self._attached.model).__name__
            because = f"a {kind} accepts no positions and counts padding"
            raise ValueError(padding_messages.wrong_side("left", because))
        return {}

    @cached_property
    def lengths(self) -> RotaryLengths:
        """The lengths at which the rotary frequencies of the model change."""
        return RotaryLengths.of(self._attached.model)

    def warn_of_lengths(
        self, mask: Shaped[Tensor, "batch key"], position_ids: Shaped[Tensor, "..."]
    ) -> None:
        """Warn if the caller's positions give a text the rotary frequencies of a longer text.

        This is no error, because a `generate` of `transformers` makes these positions. Its prompts
        may reach the length at which the frequencies change in different steps.

        Args:
            mask: the mask of the texts, True at real tokens.
            position_ids: the positions of the caller.
        """
        if _alone.get() or mask.is_meta or isinstance(mask, FakeTensor):
            return
        if not self.lengths.depend_on_runs or position_ids.ndim != 2:
            return
        real = mask[:, -position_ids.shape[1] :].bool()
        counts = (position_ids + 1).where(real, 0).amax(1).tolist()
        message = self.lengths.message(counts, int(position_ids.max()) + 1)
        if message is not None:
            warn(message)

    def require_decoder(self, mask: Shaped[Tensor, "batch pos"]) -> None:
        """Require texts of a decoder that its padding does not change.

        Args:
            mask: the mask of the decoder's texts, True at real tokens.

        Raises:
            ValueError: if padding comes before a token, and the decoder counts padding.
        """
        if _alone.get() or mask.is_meta or isinstance(mask, FakeTensor):
            return
        has_left, _ = sides_of_padding(mask)
        if has_left and self._decoder_counts_padding:
            because = f"the decoder of a {type(self._attached.model).__name__} counts padding"
            raise ValueError(padding_messages.wrong_side("left", because))

    @cached_property
    @without_gradients
    def _decoder_counts_padding(self) -> bool:
        """True if a column of padding before a text of the decoder changes its logits."""
        attached = self._attached
        if has_shards(attached.model):
            # Other processes may not take part in this run, and it would wait for them.
            return False
        tokens = tokens_for(attached.model)[:1]
        text = tokens[:, :3]
        padded = torch.cat([text.new_full((1, 1), attached.pad_token), text], 1)
        mask = torch.ones_like(padded)
        mask[:, 0] = 0
        alone = self._logits_alone(tokens, decoder_input_ids=text)
        beside = self._logits_alone(tokens, decoder_input_ids=padded, decoder_attention_mask=mask)
        return not agree(beside[:, 1:], alone, logits_rounding(alone.dtype))

    def _require_unread(self, side: padding_messages.Side, copies_text: bool) -> None:
        """Require that padding on a side does not change the output of a text.

        It changes the output of some models. A classifier may read the first column, a convolution
        reads past the end of a text, and a decoder that copies the text of its encoder also copies
        the padding.

        Raises:
            ValueError: if padding changes the output. The error states which texts the model can
                read.
        """
        if not self._is_read(side, copies_text):
            return
        model = self._attached.model
        kind = type(model).__name__
        if copies_text and not self._is_read(side, copies_text=False):
            raise ValueError(padding_messages.decoder_copies_padding(kind, side))
        because = f"padding on the {side} changes the output of a {kind}"
        if not self._is_read(padding_messages.other_side(side), copies_text):
            raise ValueError(padding_messages.wrong_side(side, because))
        lacks_pad_token = getattr(model.config, "pad_token_id", None) is None
        raise ValueError(padding_messages.unequal_lengths(side, because, lacks_pad_token))

    def _is_read(self, side: padding_messages.Side, copies_text: bool) -> bool:
        """Return the result of `_changes_output`, which runs once for each pair of arguments."""
        question = (side, copies_text)
        if question not in self._reads_padding:
            self._reads_padding[question] = self._changes_output(*question)
        return self._reads_padding[question]

    @without_gradients
    def _changes_output(self, side: padding_messages.Side, copies_text: bool) -> bool:
        """Run a text with and without one column of padding, and return whether its logits differ.

        The result is False if this cannot be tested: the model is sharded, reads no tokens, or
        needs other arguments. One exception is a decoder that copies a text with padding on the
        left: without a test, its logits count as different.

        Args:
            side: the side of the padding.
            copies_text: whether the decoder gets no text and copies the text of the encoder.
        """
        attached = self._attached
        model = attached.model
        if has_shards(model):
            # All processes must run the model together. A process whose texts have no padding would
            # not start this run, and the other processes would wait for it.
            return False
        if table_of(model) is None:
            # The model reads no tokens.
            return False
        pad = attached.pad_token
        tokens = tokens_for(model)[:1]
        # A classifier may find the end of a text by the first padding token.
        tokens = tokens[:, tokens[0] != pad]
        n_pos = tokens.shape[1]
        padding = tokens.new_full((1, 1), pad)
        columns = [padding, tokens] if side == "left" else [tokens, padding]
        padded = torch.cat(columns, 1)
        mask = torch.ones_like(padded)
        mask[:, 0 if side == "left" else -1] = 0
        more: dict[str, Tensor] = {}
        if is_encoder_decoder(model) and not copies_text:
            more["decoder_input_ids"] = tokens[:, :3]
        try:
            alone = self._logits_alone(tokens, **more)
            if side == "left" and attached.has("run_block") and self._first_position is not None:
                more["position_ids"] = real_positions(mask.bool()) + self._first_position
            beside = self._logits_alone(padded, attention_mask=mask, **more)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # The model needs more arguments than these tokens. If the decoder copies a text with
            # padding on the left, its output depends on the padding without a test.
            return copies_text and side == "left"
        if beside.shape[1:2] == (n_pos + 1,) and alone.shape[1:2] == (n_pos,):
            beside = beside[:, 1:] if side == "left" else beside[:, :-1]
        tolerance = logits_rounding(alone.dtype)
        return beside.shape == alone.shape and not agree(beside, alone, tolerance)

    @cached_property
    def _first_position(self) -> int | None:
        """The position that the model gives to the first token in a run without positions.

        Later positions count up from it. The position is 0, or the id of the padding token plus 1
        (2 if there is no such id), as in RoBERTa. The model runs without positions, and then with
        each of these two starts. The value is the first start with the same logits. It is None if
        no start has the same logits, or if the model accepts no positions.
        """
        if not self._takes_positions:
            return None
        model = self._attached.model
        tokens = tokens_for(model)
        pad = getattr(model.config, "pad_token_id", None)
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        alone = self._logits_alone(tokens)
        for first in (0, pad + 1 if isinstance(pad, int) else 2):
            shifted = self._logits_alone(tokens, position_ids=columns + first)
            # In half precision, other positions may give almost the same logits. The right
            # positions give the same bits, because the model does the same arithmetic on the same
            # shapes.
            may_round = alone.dtype not in HALF
            rounding = run_rounding(alone.dtype)
            if is_same(shifted, alone) or (may_round and agree(shifted, alone, rounding)):
                return first
        return None

    @cached_property
    @without_gradients
    def _counts_padding(self) -> bool:
        """True if a column of padding before a text changes its logits."""
        attached = self._attached
        tokens = tokens_for(attached.model)
        mask = torch.ones_like(tokens).index_fill(1, tokens.new_zeros(1), 0)
        with mode(attached.model, training=False), _alone.set(True):
            with_mask = attached.context(tokens, attention_mask=mask, **attached.uncached)
            late, stream = (
                hooks_disabled(attached.input_resid, part, context)
                for part, context in ((tokens, with_mask), (tokens[:, 1:], None))
            )
        # Compare the streams, because half precision may hide the vectors of positions in the
        # logits. A linear map of the embeddings rounds differently with fewer rows, so the
        # comparison has a tolerance.
        streams = TwoRuns([late[:, 1:]], [stream], block_rounding(stream.dtype))
        if are_reproduced([streams]) == [False]:
            return True
        padded = self._logits_alone(tokens, attention_mask=mask)[:, 1:]
        alone = self._logits_alone(tokens[:, 1:])
        return not agree(padded, alone, run_rounding(alone.dtype))

    @without_gradients
    def _logits_alone(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Return the logits of a run without hooks, and without positions added by this class."""
        with mode(self._attached.model, training=False), _alone.set(True):
            return logits_of(hooks_disabled(self._attached.run_base, tokens, **arguments))
