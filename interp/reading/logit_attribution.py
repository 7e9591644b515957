"""Direct logit attribution: logits as sums over a model's parts, or up to each layer.

1. Take the values of each part from the cache: embeddings, `z` of heads, outputs of MLPs or
   activations of neurons, and biases.
2. Map the direction of the logit back to these values, through the final norm and weights such as
   `W_O`. The effect of a part is the product of its value and this direction. The output of the
   part in the stream is not computed.
3. Divide by the norm's scale in the run. With a fixed scale the norm is linear (Elhage et al.
   2021).
4. Check that the parts add up to the logit, up to rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, CacheError
from hooks.base import Index, at_least_float32, stacked, to_device, without_gradients
from interp.inputs.cached import nan_at_padding, text_of, text_of_values
from interp.inputs.copies import groups_of_cache
from interp.inputs.token_positions import short, tokens_of
from interp.inputs.words import has_several_tokens, token_ids, tokens_of_words
from interp.numbers.precision import like
from interp.protocol import n_logits, of
from interp.reading.components import ResidualComponents
from interp.results.result import Result

TokensOrWords = int | str | Sequence[str] | Int[Tensor, " batch"] | Int[Tensor, "batch pos"]
"""One token for all positions, one for each example, or one for each position.

A token may be a text, such as `" Mary"`.
"""

LogitDirection = (
    Float[Tensor, " d_model"] | Float[Tensor, "batch d_model"] | Float[Tensor, "batch pos d_model"]
)
"""One direction in the input of the unembedding, one for each example, or one for each position."""


@without_gradients
def direct_logit_attribution(
    model: nn.Module,
    cache: ActivationCache,
    *,
    right: "TokensOrWords | None" = None,
    wrong: "TokensOrWords | None" = None,
    vector: "LogitDirection | None" = None,
    pos: "Index | None" = None,
    neurons: bool = False,
    experts: bool = False,
) -> Result:
    """Return the direct contribution of each part of the model to a logit or a logit difference.

    The method is from Elhage et al. 2021. Each part of `decompose` is mapped to the logit through
    the final norm, with the norm's scale in the run. LoRA adapters are separate parts, such as
    `m3.adapter`, and so are the biases `ln_final.bias` and `unembed.bias`. All parts add up to the
    logit. The outputs of heads in the stream are not computed: the direction of the logit is mapped
    back through `W_O`, and multiplied with the input of `W_O`.

    Args:
        model: the model of the run, with the parts that a graph needs (see `decompose`), and `W_U`.
        cache: the cache of a run that cached all points, or
            `Graph(model, split_embeddings=True).needed` and `ln_final.scale`.
        right: the token of the logit. If `pos` is -1, a text without a space at its beginning is
            read like an answer of `Pairs`: as a new word or the rest of a word. A text of several
            tokens, such as `" Paris, the city"`, means the sum of the logits of its tokens, each at
            the position that predicts it. The text of the run must then end with this answer.
        wrong: the token of a logit to subtract. Default: subtract no logit.
        vector: a direction in the input of the unembedding, such as a probe's direction, instead of
            tokens.
        pos: read one position of all texts, or one for each example; -1 is the last real token, if
            the run was given its mask. Default: all positions.
        neurons: whether to return the neurons of each MLP, `m0.n3`, and `m0.bias` instead of the
            MLP.
        experts: whether to return the parts of a mixture of experts instead of its sum: the output
            of each expert times its weight, such as `m0.e3`, and the shared expert, `m0.shared`.

    Returns:
        A result in logits with the axes `component`, `pos` and `example`; the axis `pos` is missing
        if `pos` was given, or if `right` is several tokens. Values are NaN at padding, and means
        leave them out. `about` contains the largest gap between the sum of the parts and the logit.

    Raises:
        TypeError: if the model lacks a part, such as `W_U`.
        ValueError: if norms are applied to the sum of stream and sublayer (`norm_place="post"`); if
            `models.from_hf` does not support an attached model; if logits are capped, because they
            are then not a sum of parts; or if tokens, vector or position do not fit.
        CacheError: if the cache is of another model, a point is missing, or the parts do not add up
            to the logit.

    >>> import torch
    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> logits, cache = HookedRunner(model).run_with_cache("Return the", lazy=True)
    >>> parts = direct_logit_attribution(model, cache, right="n", pos=-1)
    >>> parts.top(2)
    component m2  +1.238
    component m0  +0.8653
    >>> torch.allclose(parts.values.sum(), logits[0, -1, model.to_id("n")], atol=1e-4)
    True
    """
    reading = _Reading(model=model, cache=cache, right=right, wrong=wrong, vector=vector, pos=pos)
    parts = [*reading.parts(neurons=neurons, experts=experts)]
    sizes = [len(part.names) for part in parts]
    biases = {name: value for name, value in reading.biases.items() if value.any()}
    stream = reading.parts.at(reading.parts.last)
    values = reading.direction.new_empty(*stream.shape[:2], sum(sizes) + len(biases))
    written, added = values.split([sum(sizes), len(biases)], -1)
    for part, out in zip(parts, written.split(sizes, -1), strict=True):
        part.along(reading.direction, out)
    written /= reading.scale
    sizes_of_rounding = reading.spread(stream), written
    gap = reading.parts.check(written.sum(-1), reading.read(stream), *sizes_of_rounding)
    for column, value in enumerate(biases.values()):
        added[..., column] = value
    names: list[str] = []
    for part in parts:
        names += part.names
    return reading.result(
        values.movedim(-1, 0), axis="component", labels=[*names, *biases], about={"gap": gap}
    )


@without_gradients
def accumulated_logits(
    model: nn.Module,
    cache: ActivationCache,
    *,
    right: "TokensOrWords | None" = None,
    wrong: "TokensOrWords | None" = None,
    vector: "LogitDirection | None" = None,
    pos: "Index | None" = None,
) -> Result:
    """Return a logit, or a difference of logits, of the stream up to each layer, with the final
    norm's scale in the run.

    The last value is the model's own logit. Each step is the sum of the values that
    `direct_logit_attribution` returns for the parts in between. In contrast, `logit_lens` divides
    each stream by the scale of that stream.

    Args:
        model: the model of the run, with `W_U`; for attached models see `decompose`.
        cache: the cache of a run that cached the residual stream and `ln_final.scale`.
        right: the token of the logit; see `direct_logit_attribution`.
        wrong: the token of a logit to subtract. Default: subtract no logit.
        vector: a direction in the input of the unembedding, in place of tokens.
        pos: one position of all texts, or one for each example; see `direct_logit_attribution`.

    Returns:
        A result with the axes `stream` (`0_pre`, `0_mid`, ..., `final_post`), `pos` and `example`;
        the axis `pos` is missing if `pos` was given. Values are NaN at padding, and means leave
        them out.

    Raises:
        TypeError: if the model lacks a part, such as `W_U`.
        ValueError: if norms are applied to the sum of stream and sublayer (`norm_place="post"`); if
            `models.from_hf` does not support an attached model; if logits are capped; or if tokens,
            vector or position do not fit.
        CacheError: if the cache is of another model, or a point is missing.

    >>> import torch
    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> logits, cache = HookedRunner(model).run_with_cache("Return the", lazy=True)
    >>> result = accumulated_logits(model, cache, right="n", pos=-1)
    >>> result.labels["stream"][:3]
    ('0_pre', '0_mid', '1_pre')
    >>> torch.allclose(result.values[-1, 0], logits[0, -1, model.to_id("n")], atol=1e-4)
    True
    """
    reading = _Reading(model=model, cache=cache, right=right, wrong=wrong, vector=vector, pos=pos)
    points = {}
    for n, block in enumerate(reading.parts.model.blocks):
        points[f"{n}_pre"] = f"blocks.{n}.resid_pre"
        if len({branch.reads for branch in block.branches}) > 1:
            points[f"{n}_mid"] = f"blocks.{n}.resid_mid"
    points["final_post"] = reading.parts.last
    logits = stacked(reading.read(reading.parts.at(name)) for name in points.values())
    return reading.result(
        logits + sum(reading.biases.values()), axis="stream", labels=[*points], about={}
    )


class _Reading:
    """A direction of the logits, mapped back to the residual stream of a run.

    For the arguments, see `direct_logit_attribution`.

    Attributes:
        parts: the parts of the stream.
        direction: the direction in the stream, [batch, pos, d_model]; the first two sizes may be 1.
        scale: the scale that the final norm divided by.
        biases: the parts of the logit that do not depend on the stream.
        about: facts about the logit.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: ActivationCache,
        right: TokensOrWords | None,
        wrong: TokensOrWords | None,
        vector: LogitDirection | None,
        pos: Index | None,
    ) -> None:
        self._named = model
        self._cache = cache
        self.parts = ResidualComponents(model, cache, pos)
        self._has_one_position = pos is not None
        self._is_at_last = isinstance(pos, int) and pos == -1
        # The table of positions that predict an answer of several tokens.
        self._is_read: Tensor | None = None
        if vector is None and has_several_tokens(model, right):
            if wrong is not None or pos is not None:
                raise ValueError(
                    "wrong and pos must be left out if right is several tokens; subtract the "
                    f"result of another run instead; got wrong={wrong!r} and pos={pos!r}"
                )
            right, self._is_read = _tokens_of_answer(model, cache, right)  # type: ignore[arg-type]
        stream = self.parts.at(self.parts.last)
        self.about: dict[str, Any] = {}
        vectors, offset = self._vectors(right, wrong, vector)
        if self._is_read is not None:
            is_read = to_device(self._is_read, vectors.device)
            vectors, offset = vectors * is_read[..., None], offset * is_read
        _require_fit(vectors, stream)
        linear, self.scale = self.parts.norm_in_run(getattr(self.parts.model, "ln_final", None))
        vectors = like(vectors, self.scale)
        self.direction = linear.before(vectors)
        constant = vectors @ like(linear.bias, vectors)
        offset = like(offset, vectors)
        self.biases = {"ln_final.bias": constant, "unembed.bias": offset}

    def _vectors(
        self,
        right: TokensOrWords | None,
        wrong: TokensOrWords | None,
        vector: LogitDirection | None,
    ) -> tuple[Float[Tensor, "_batch _pos d_model"], Float[Tensor, "_batch _pos"]]:
        """Return the directions in the stream and the biases of the logit.

        Raises:
            ValueError: if there is neither a token nor a vector, or both.
        """
        if vector is not None and right is None and wrong is None:
            vectors = at_least_float32(vector)
            vectors = vectors if vectors.ndim == 3 else vectors.view(-1, 1, vectors.shape[-1])
            return vectors, vectors.new_zeros(1, 1)
        if vector is not None or right is None:
            raise ValueError(
                "give either right=, the token of a logit, or vector=; got both or neither"
            )
        vectors, offset = self._unembedding("right", right)
        if wrong is not None:
            subtracted_vectors, subtracted_offset = self._unembedding("wrong", wrong)
            vectors, offset = vectors - subtracted_vectors, offset - subtracted_offset
        return vectors, offset

    def _unembedding(self, name: str, answers: TokensOrWords) -> tuple[Tensor, Tensor]:
        """Return the directions and biases of logits, [batch, pos, d_model] and [batch, pos]."""
        model = of(self.parts.model, "W_U", "config")
        if getattr(model.config, "logit_cap", 0):
            raise ValueError(
                "logits are a sum of parts only without a cap; got logit_cap="
                f"{model.config.logit_cap}: vector=W_U[:, token] reads the logit before the cap"
            )
        tokens = tokens_of(self._ids(answers), 2)
        vocab = n_logits(self.parts.model)
        if int(tokens.max()) >= vocab:
            raise ValueError(f"{name} must be 0 to {vocab - 1}; got {int(tokens.max())}")
        tokens = to_device(tokens.view(len(tokens) if tokens.ndim else 1, -1), model.W_U.device)
        self.about[name] = short(answers) if tokens.shape[1] == 1 else "one for each position"
        vectors = at_least_float32(model.W_U.T[tokens])
        bias = getattr(model, "b_U", None)
        zeros = vectors.new_zeros(tokens.shape)
        return vectors, zeros if bias is None else bias[tokens].to(vectors.dtype)

    def _ids(self, answers: TokensOrWords) -> Any:
        """Return tokens as numbers. At the last position, read texts like answers of `Pairs`."""
        text = text_of(self._cache) if self._is_at_last else None
        if text is None:
            return token_ids(self._named, answers)
        return tokens_of_words(self._named, text.of_logits.listed(), answers)

    def read(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos"]:
        """Return the effect of a vector of the stream on the logit: the product with the direction,
        divided by the scale of the final norm.
        """
        return self._scaled((stream * to_device(self.direction, stream.device)).sum(-1))

    def spread(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos"]:
        """Return a number that is proportional to the rounding error of `read`.

        `read` is a sum of products. The result is the root of the sum of their squares, because
        rounding errors with random signs add up in this way.
        """
        return self._scaled((stream * to_device(self.direction, stream.device)).norm(dim=-1))

    def _scaled(self, along: Tensor) -> Tensor:
        """Return numbers divided by the scale of the final norm."""
        return to_device(along, self.scale.device) / self.scale[..., 0]

    def result(
        self,
        logits: Float[Tensor, "place batch pos"],
        axis: str,
        labels: list[str],
        about: dict[str, Any],
    ) -> Result:
        """Return a result with the axes `axis`, `pos` and `example`, without `pos` if one position
        is read.

        Args:
            logits: the logits of each place.
            axis: the name of the axis of places.
            labels: the labels of the places.
            about: further facts about the result.
        """
        values = logits.transpose(1, 2)
        axes = [axis, "pos", "example"]
        has_positions = not self._has_one_position and self._is_read is None
        if self._is_read is not None:
            values = values.where(to_device(self._is_read.T, values.device), 0).sum(1)
        elif self._has_one_position:
            values = values[:, 0]
        if not has_positions:
            axes = [axis, "example"]
        words = exists = None
        if has_positions:
            mask = self.parts.mask
            values = nan_at_padding(logits, mask).transpose(1, 2)
            exists = None if mask is None else to_device(mask.mT[None].bool(), values.device)
            text = text_of_values(self._cache, logits.shape[1:3])
            words = None if text is None else text.words(self._named)
        return Result(
            values,
            tuple(axes),
            labels={axis: labels},
            unit="logits" if self.about else "product with the vector",
            about=self.about | about,
            words={"pos": words} if words else {},
            groups=groups_of_cache(self._cache, values),
            exists=exists,
        )


def _require_fit(vectors: Tensor, stream: Float[Tensor, "batch pos d_model"]) -> None:
    """Check that there is one direction, one for each text or one for each position.

    Raises:
        ValueError: if the shape is another one.
    """
    fits = all(size in (1, full) for size, full in zip(vectors.shape, stream.shape, strict=True))
    if not fits or vectors.shape[2] != stream.shape[2]:
        raise ValueError(
            "right=, wrong= and vector= must be one token or direction, one for each text or one "
            f"for each position of [batch pos d_model] {[*stream.shape]}; got {[*vectors.shape]}"
        )


def _tokens_of_answer(
    model: nn.Module, cache: ActivationCache, answers: str | Sequence[str]
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Return the next token of each position that predicts an answer, and a mask of the positions.

    Args:
        model: the model of the run.
        cache: the cache of a run whose texts end with the answers.
        answers: one answer for all texts, or one for each text.

    Raises:
        CacheError: if the tokens of the run are unknown.
        ValueError: if a text does not end with its answer.
    """
    text = text_of(cache)
    if text is None:
        raise CacheError(
            "the cache must know the tokens of its run to find an answer of several tokens; got a "
            "cache without tokens"
        )
    rows = text.listed()
    columns_of_rows = text.columns
    answer_of_row = [answers] * len(rows) if isinstance(answers, str) else [*answers]
    if len(answer_of_row) != len(rows):
        raise ValueError(
            f"right must be one answer, or one for each of {len(rows)} texts; got "
            f"{len(answer_of_row)}"
        )
    next_tokens = torch.zeros_like(text.tokens)
    is_read = torch.zeros_like(text.tokens, dtype=torch.bool)
    for row, (tokens, answer) in enumerate(zip(rows, answer_of_row, strict=True)):
        (answer_tokens,) = of(model, "to_id").to_tokens(answer, bos=False).listed()
        n = len(answer_tokens)
        if tokens[-n:] != answer_tokens or len(tokens) == n:
            raise ValueError(
                "the text of the run must end with the answer; run the model on the prompt and "
                f"{answer!r}; text {row} ends with {of(model).to_text(tokens[-n:])!r}"
            )
        columns = columns_of_rows[row][-n - 1 : -1]
        next_tokens[row, columns] = next_tokens.new_tensor(answer_tokens)
        is_read[row, columns] = True
    return next_tokens, is_read
