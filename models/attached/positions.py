"""Positions of texts with padding before a token: how a model counts them, by runs that try it."""

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooks.shared import FakeTensor, Scoped, hooks_disabled, without_gradients
from models.attached.context import AttachedContext
from models.attached.example import logits_of, tokens_for
from models.attached.sums import HALF, agree, is_same
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

    def of(self, mask: Shaped[Tensor, "batch pos"]) -> dict[str, Tensor]:
        """Positions for texts with padding before a token, for a model that takes them: columns without padding.

        Raises:
            ValueError: if the model takes none, and counts padding.
        """
        if _alone.get() or mask.is_meta or isinstance(mask, FakeTensor):
            return {}
        late = mask[:, 1:].bool() & ~mask[:, :-1].bool()
        if not bool(late.any()):
            return {}
        if (first := self._first_position) is not None:
            return {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0) + first}
        if self._counts_padding:
            raise ValueError(
                f"texts must be padded on the right for a {type(self._attached.model).__name__}, which takes no positions and "
                "counts padding; got padding before a token"
            )
        return {}

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
            # In half precision other positions may give almost the same, but these the same bits.
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
        # Vectors of positions, which half precision may hide in the logits.
        if not is_same(late[:, 1:], stream):
            return True
        padded = self._logits_alone(tokens, attention_mask=mask)[:, 1:]
        return not agree(padded, self._logits_alone(tokens[:, 1:]), 1e-3)

    @without_gradients
    def _logits_alone(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Logits of a run that nobody sees, and that gets no positions but these."""
        with mode(self._attached.model, training=False), _alone.set(True):
            return logits_of(hooks_disabled(self._attached.run_base, tokens, **arguments))
