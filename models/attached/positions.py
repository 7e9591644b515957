"""Positions of texts with padding before a token: how a model counts them, by runs that try it."""

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooks.base import FakeTensor, Scoped, is_fully_sharded, without_gradients
from hooks.shared import hooks_disabled
from models.attached.context import AttachedContext
from models.attached.example import is_encoder_decoder, logits_of, table_of, tokens_for
from models.attached.sums import HALF, agree, is_close, is_same
from models.mode import mode

# Whether a run is one that finds out how the model counts positions.
_alone = Scoped("alone", False)


class PaddedPositions:
    """The positions that a model must be given where texts are padded.

    Args:
        attached: the model's parts.
        takes_positions: whether it has an argument for them.
    """

    def __init__(self, attached: Any, takes_positions: bool) -> None:
        self._attached, self._takes_positions = attached, takes_positions
        self._reads_padding: dict[tuple[str, bool], bool] = {}

    def of(self, mask: Shaped[Tensor, "batch pos"], copies_text: bool = False) -> dict[str, Tensor]:
        """Return positions for texts with padding before a token, if the model takes positions: columns without padding.

        Args:
            mask: True at real tokens.
            copies_text: whether the run gives no text to the decoder, so that some models copy the text of their encoder.

        Raises:
            ValueError: if the model takes none, and counts padding; or if its output reads padding.
        """
        if _alone.get() or mask.is_meta or isinstance(mask, FakeTensor):
            return {}
        real = mask.bool()
        is_start = real[:, 1:] & ~real[:, :-1]
        is_end = real[:, :-1] & ~real[:, 1:]
        # Together, so that an accelerator is waited for once.
        has_left, has_right = torch.stack([is_start.any(), is_end.any()]).tolist()
        if has_left:
            self._require_unread("left", copies_text)
        if has_right:
            self._require_unread("right", copies_text)
        if not has_left or not self._attached.has("run_block"):
            return {}
        if (first := self._first_position) is not None:
            return {"position_ids": self._counted(mask, first)}
        if self._counts_padding:
            raise ValueError(
                f"texts must be padded on the right for a {type(self._attached.model).__name__}, which takes no positions and "
                "counts padding; got padding before a token"
            )
        return {}

    def _require_unread(self, side: str, copies_text: bool) -> None:
        """Raise an error if padding on a side changes the output of a text.

        A classifier may read the first column, a convolution reads across the end of a text, and a decoder that copies the
        text of its encoder also reads the padding in it.

        Raises:
            ValueError: saying which texts the model can read.
        """
        if not self._is_read(side, copies_text):
            return
        model = self._attached.model
        other = "left" if side == "right" else "right"
        if copies_text and not self._is_read(side, copies_text=False):
            raise ValueError(
                f"a padded {type(model).__name__} must be given decoder_input_ids, because without them its decoder reads "
                f"input_ids with the padding; got padding on the {side}"
            )
        if not self._is_read(other, copies_text):
            rule = f"must be padded on the {other}"
        elif getattr(model.config, "pad_token_id", None) is None:
            rule = "must have one length, or the model a config.pad_token_id"
        else:
            rule = "must have one length"
        raise ValueError(
            f"texts {rule}, because padding on the {side} changes the output of a {type(model).__name__}; "
            "got padding there"
        )

    def _is_read(self, side: str, copies_text: bool) -> bool:
        """Return `_changes_output`, which runs the model once for each question."""
        question = (side, copies_text)
        if question not in self._reads_padding:
            self._reads_padding[question] = self._changes_output(*question)
        return self._reads_padding[question]

    @without_gradients
    def _changes_output(self, side: str, copies_text: bool) -> bool:
        """Whether one column of padding on a side changes the output of a text."""
        attached = self._attached
        model = attached.model
        if any(map(is_fully_sharded, model.modules())):
            return False  # other processes may have no padding, and would not take part in this run
        if table_of(model) is None:
            return False  # it reads no tokens
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
                more["position_ids"] = self._counted(mask, self._first_position)
            beside = self._logits_alone(padded, attention_mask=mask, **more)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # The model needs more than these tokens. A copied text keeps its padding on the left all the same.
            return copies_text and side == "left"
        if beside.shape[1:2] == (n_pos + 1,) and alone.shape[1:2] == (n_pos,):
            beside = beside[:, 1:] if side == "left" else beside[:, :-1]
        tolerance = 0.05 if alone.dtype in HALF else 1e-3
        return beside.shape == alone.shape and not agree(beside, alone, tolerance)

    def _counted(self, mask: Tensor, first: int) -> Tensor:
        """Positions of real tokens, the first of which has the number `first`."""
        return (mask.long().cumsum(1) - 1).clamp(min=0) + first

    @cached_property
    def _first_position(self) -> int | None:
        """The position that the model gives the first token by itself; None if it takes no positions, or counts otherwise."""
        if not self._takes_positions:
            return None
        model = self._attached.model
        tokens, pad = tokens_for(model), getattr(model.config, "pad_token_id", None)
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        alone = self._logits_alone(tokens)
        for first in (0, pad + 1 if isinstance(pad, int) else 2):
            shifted = self._logits_alone(tokens, position_ids=columns + first)
            # In half precision, other positions may give almost the same logits. The right positions give the same bits,
            # because the model does the same arithmetic on the same shapes.
            if is_same(shifted, alone) or (alone.dtype not in HALF and agree(shifted, alone, 1e-3)):
                return first
        return None

    @cached_property
    @without_gradients
    def _counts_padding(self) -> bool:
        """Whether a column of padding before a text changes its logits."""
        attached = self._attached
        tokens = tokens_for(attached.model)
        mask = torch.ones_like(tokens).index_fill(1, tokens.new_zeros(1), 0)
        with mode(attached.model, training=False), _alone.set(True):
            with_mask = AttachedContext({"attention_mask": mask, **attached.uncached})
            late, stream = (
                hooks_disabled(attached.input_resid, part, context)
                for part, context in ((tokens, with_mask), (tokens[:, 1:], None))
            )
        # Compare the streams, because half precision may hide the vectors of positions in the logits. A linear map of the
        # embeddings rounds differently with fewer rows, so the comparison has a tolerance.
        is_equal = is_close if stream.dtype in HALF else agree
        if not is_equal(late[:, 1:], stream):
            return True
        padded = self._logits_alone(tokens, attention_mask=mask)[:, 1:]
        return not agree(padded, self._logits_alone(tokens[:, 1:]), 1e-3)

    @without_gradients
    def _logits_alone(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Return the logits of a run without hooks, with the given positions only."""
        with mode(self._attached.model, training=False), _alone.set(True):
            return logits_of(hooks_disabled(self._attached.run_base, tokens, **arguments))
