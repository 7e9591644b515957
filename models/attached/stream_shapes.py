"""The positions of a stream: one for each token, or the reason why a model has others.

A short text tells the reasons apart. For 7 and 6 tokens a stream has

1. 39 and 38 positions if the model or an adapter adds 32 of its own, such as a learned prompt;
2. 21 and 18 if there are three for each token;
3. 8 and 8 if texts are padded to a multiple of 4;
4. fewer positions than tokens if tokens are joined.
"""

from typing import Any

from torch import Tensor, nn

from hooks.base import tensors_in, without_gradients
from hooks.shared import Session
from models.attached.configs import base_of
from models.attached.example import Example
from models.attached.stacks import Stack
from models.attached.unreadable import WITHOUT_ATTACH, AttachError
from models.mode import mode


def require_position_of_each_token(model: nn.Module, stack: Stack) -> None:
    """Refuses a stack whose stream is not [batch, pos, d_model], with a position for each token.

    The stream of an encoder or a decoder may have others, as that of images. It must not have its axes in another order.

    Raises:
        AttachError: saying what the positions are instead.
    """
    tokens, stream = _tokens_of(stack), stack.chain[0].inputs[0]
    if tokens is None or tokens.shape == stream.shape[:2]:
        return
    (rows, n_pos), (rows_seen, seen) = tokens.shape, stream.shape[:2]
    advice = WITHOUT_ATTACH
    if (rows_seen, seen) == (n_pos, rows):
        why = "its blocks read [pos, batch, d_model], with positions first"
    elif stack.texts is None:
        return
    elif base_of(model) is not model and _positions(base_of(model), stack, n_pos) == n_pos:
        why = f"an adapter puts {seen - n_pos} virtual tokens before each text"
        advice = "attach its base model, and give the adapter as run="
    else:
        why = _reason(n_pos, seen, _positions(model, stack, n_pos - 1))
    raise AttachError(
        f"the stream must have a position for each of {n_pos} tokens of {rows} texts; got {[*stream.shape]} in "
        f"{stack.path!r} of a {type(model).__name__}: {why} ({advice})"
    )


def _tokens_of(stack: Stack) -> Tensor | None:
    """The tokens that a stack reads; None for images and sounds."""
    example: Example = stack.probe.example
    if stack.name == "decoder":
        decoded = example.kwargs.get("decoder_input_ids")
        return decoded if isinstance(decoded, Tensor) and decoded.ndim == 2 else None
    return example.tokens if stack.name in ("", "encoder") else None


def _reason(n_pos: int, seen: int, shorter: int | None) -> str:
    """The reason why a stream has other positions than tokens.

    Args:
        n_pos: the number of tokens.
        seen: the number of positions.
        shorter: the number of positions for one token less; None if it is not known.
    """
    if seen < n_pos:
        return f"it joins tokens, {n_pos} of them into {seen}"
    if shorter == seen - 1:
        return f"it puts {seen - n_pos} positions of its own beside each text"
    if shorter == seen:
        return "it pads texts to a multiple of some length"
    if shorter is not None and shorter * n_pos == seen * (n_pos - 1):
        return f"it has {seen // n_pos} positions for each token, in several streams"
    return "its positions are not those of the tokens"


@without_gradients
def _positions(model: Any, stack: Stack, n_pos: int) -> int | None:
    """How many positions the stream has where texts have `n_pos` tokens; None if the model does not run on these."""
    example, found = stack.probe.example, list[int]()

    def see(args: Any, kwargs: Any) -> None:
        found.append(next(tensors_in((args, kwargs))).shape[1])

    def cut(value: Any) -> Any:
        tokens = example.tokens
        is_by_token = isinstance(value, Tensor) and tokens is not None
        return value[:, :n_pos] if is_by_token and value.shape[:2] == tokens.shape else value

    args = [*map(cut, example.args)]
    kwargs = {name: cut(value) for name, value in example.kwargs.items()}
    try:
        with mode(model, training=False), Session() as session:
            session.before(stack.chain[0].module, see)
            model(*args, **kwargs)
    except Exception:  # any, because the length of texts may be fixed
        return None
    return found[0] if found else None
