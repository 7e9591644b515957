"""Prompts of a generation: their conversion to a `Text`, and their checks."""

from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Shaped
from torch import Tensor

from hooks.base import Text, Texts, padding_messages
from models.checks import check_tokens, require
from models.text.texts import ReadsText
from models.transformer import Transformer

IN_TRAINING = "the model must be in evaluation mode; got training mode: call model.eval() first"


def prompts_as_text(
    model: ReadsText, prompts: Texts, attention_mask: Shaped[Tensor, "batch pos"] | None
) -> Text:
    """Return the prompts as a `Text`, with the attention mask if it is given.

    Raises:
        ValueError: if the mask does not fit the prompts.
    """
    text = model.to_tokens(prompts)
    check_tokens(text.tokens)
    if attention_mask is None:
        return text
    if text.attention_mask is not None:
        raise ValueError(padding_messages.second_mask("prompts of unequal lengths, or with a mask"))
    shape = text.tokens.shape
    if attention_mask.shape != shape:
        raise ValueError(padding_messages.mask_shape("attention_mask", shape, attention_mask.shape))
    if others := set().union(*attention_mask.tolist()) - {0, 1}:
        raise ValueError(padding_messages.mask_numbers("attention_mask", min(others)))
    return replace(text, attention_mask=attention_mask)


def require_tokens(texts: Sequence[Sequence[int]]) -> None:
    """Check that each prompt has a token.

    Raises:
        ValueError: if a prompt has no token, or there is no prompt.
    """
    empty = [row for row, text in enumerate(texts) if not text]
    if empty or not texts:
        raise ValueError(
            f"each prompt must have at least one token; got {len(texts)} prompts, empty in rows "
            f"{empty}"
        )


def check_prompts(
    model: Transformer, texts: list[list[int]], stops: list[int], new: int, max_context: int | None
) -> None:
    """Check the arguments of a generation before the model runs.

    Without these checks, wrong arguments would give wrong tokens, or an error after some steps.

    Args:
        model: the model.
        texts: the tokens of each prompt.
        stops: the tokens that end a text.
        new: the largest number of new tokens.
        max_context: the largest number of positions. None means the model's `n_ctx`.

    Raises:
        ValueError: see `generate_steps`.
    """
    if any(module.training for module in model.modules()):
        raise ValueError(IN_TRAINING)
    require_tokens(texts)
    vocab = model.config.vocab_size
    n_ctx = model.config.n_ctx
    require(model.config, "causal", model.config.causal, rule="True to write texts")
    same = model.config.vocab_size_out == vocab
    require(model.config, "vocab_size_out", same, rule=f"vocab_size ({vocab}) to write texts")
    named = {"stop": stops} | {f"prompt {n}": tokens for n, tokens in enumerate(texts)}
    for name, tokens in named.items():
        outside = [token for token in tokens if not 0 <= token < vocab]
        if outside:
            raise ValueError(f"the tokens of {name} must be in [0, {vocab}); got {outside[0]}")
    limit = n_ctx if max_context is None else min(max_context, n_ctx)
    longest = max(map(len, texts))
    if longest + new > limit:
        is_learned = model.config.positions == "learned"
        more = "" if is_learned else ", or call model.extend_context"
        raise ValueError(
            f"a prompt and its new tokens must fit in {limit} positions; got {longest} and {new}: "
            f"reduce max_new_tokens, and continue from the last tokens of the result{more}"
        )
