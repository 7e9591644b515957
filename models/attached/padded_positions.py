"""Positions of tokens in padded texts for attached models, and a check whether models read padding.

1. Find the sides of the padding in a mask (`PaddedPositions.of`).
2. Test in runs of a few tokens, once for each side, if padding changes the output. If it does,
   raise an error that says which texts the model can read.
3. If padding comes before a token, find the position of the first token, also in such runs. Return
   positions that count only real tokens.

The weights of padding in attention patterns are in `pattern`.
"""

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooks.base import (
    HALF,
    FakeTensor,
    Scoped,
    agree,
    has_shards,
    is_close,
    is_same,
    logits_rounding,
    padding_messages,
    real_positions,
    run_rounding,
    sides_of_padding,
    without_gradients,
)
from hooks.shared import hooks_disabled
from models.attached.original import is_encoder_decoder, logits_of, table_of, tokens_for
from models.mode import mode

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

        The positions count only columns without padding. They are needed if some padding comes
        before a token, and the model accepts positions.

        Args:
            mask: True at real tokens.
            copies_text: whether the decoder gets no text in the run. Some models then copy the text
                of their encoder to the decoder. Default: False.

        Raises:
            ValueError: if the model accepts no positions and counts padding, or if padding changes
                its output.
        """
        if _alone.get() or mask.is_meta or isinstance(mask, FakeTensor):
            return {}
        has_left, has_right = sides_of_padding(mask)
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
        """Return whether one column of padding on a side changes the output of a text."""
        attached = self._attached
        model = attached.model
        if has_shards(model):
            # The run needs all processes. A process without padding would not take part in it, and
            # the others would wait.
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
        (2 if there is no such id), as in RoBERTa. Both are tried, and the first that gives the
        logits of a run without positions is returned. The value is None if the model accepts no
        positions, or if neither gives these logits.
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
        is_equal = is_close if stream.dtype in HALF else agree
        if not is_equal(late[:, 1:], stream):
            return True
        padded = self._logits_alone(tokens, attention_mask=mask)[:, 1:]
        alone = self._logits_alone(tokens[:, 1:])
        return not agree(padded, alone, run_rounding(alone.dtype))

    @without_gradients
    def _logits_alone(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Return the logits of a run without hooks, and without positions added by this class."""
        with mode(self._attached.model, training=False), _alone.set(True):
            return logits_of(hooks_disabled(self._attached.run_base, tokens, **arguments))
