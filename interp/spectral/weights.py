"""Circuits of attention heads, from weights alone, and what their singular directions say in tokens."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import require_choice, require_integer, without_gradients, writer_of
from interp.inputs.token_positions import token_ids, tokens_of
from interp.protocol import n_logits
from interp.spectral.factored import FactoredMatrix
from interp.spectral.folded import FoldedWeights
from interp.spectral.singular import svd


@without_gradients
def ov_circuit(model: nn.Module, *, fold: bool = True) -> FactoredMatrix:
    """`W_V @ W_O` of every head: [layer, head, d_model, d_model] (Elhage et al. 2021).

    `x @ ov` is what a head writes for the stream `x` at the position that it attends to, without biases.

    Args:
        model: see `LanguageModel`.
        fold: whether norms are folded in: gains, and the mean that LayerNorm subtracts, but not the
            scale that a norm divides by, as it depends on the text. Gains of norms after attention
            are folded in too. Where only LayerNorms read the stream, the mean of what a head writes is
            left out. False for the weights as the model holds them.

    Raises:
        TypeError: if the model lacks weights or norms that are read; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and norms are of the stream itself (`norm_place="post"`).

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> ov_circuit(model)
    FactoredMatrix [4, 4, 128, 128], inner 32, torch.float32
    """
    folded = FoldedWeights(model, fold, "W_V", "W_O")
    return FactoredMatrix(folded.values(), folded.written())


@without_gradients
def qk_circuit(
    model: nn.Module, *, fold: bool = True, distance: int | None = None
) -> FactoredMatrix:
    """`W_Q @ W_K^T` of every head: [layer, head, d_model, d_model] (Elhage et al. 2021).

    `x @ qk @ y` is the score of a query from the stream `x` and a key from `y`, before the factor
    1 / sqrt(d_head) and a soft cap, and without biases. For `fold` and errors see also `ov_circuit`. Norms of
    queries and keys are folded in like others, so their scales are left out.

    Args:
        model: see `LanguageModel`.
        fold: whether norms are folded in.
        distance: where positions are rotary, how many positions the key is before the query.

    Raises:
        TypeError, ValueError: as for `ov_circuit`; or if positions are rotary and there is no distance
            from 0 to n_ctx - 1.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> qk_circuit(model)[0, 2].svd().s.shape
    torch.Size([32])
    """
    queries, keys = FoldedWeights(model, fold, "W_Q", "W_K").queries_and_keys(distance)
    return FactoredMatrix(queries, keys.mT)


class FullCircuits(NamedTuple):
    """The circuits of a head from tokens to tokens, on the direct path. Both are [vocab, vocab].

    Attributes:
        qk: the score of a query at the row's token and a key at the column's.
        ov: the logit that attending to the row's token adds to the column's.
    """

    qk: FactoredMatrix
    ov: FactoredMatrix


@without_gradients
def full_circuits(
    model: nn.Module, layer: int, head: int, fold: bool = True, distance: int | None = None
) -> FullCircuits:
    """The circuits of one head through embeddings and unembedding (Elhage et al. 2021).

    The matrices of vocab times vocab numbers are never formed: see `FactoredMatrix.top` and its slices.
    Position embeddings are left out, and so are the scales of norms if `fold`.

    Args:
        model, fold, distance: see `qk_circuit`. Folded logits have mean 0 over the vocabulary.
        layer, head: which head.

    Raises:
        TypeError, ValueError: as for `qk_circuit`.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> full_circuits(model, layer=1, head=3).ov  # from 103 tokens to 103 tokens
    FactoredMatrix [103, 103], inner 32, torch.float32
    """
    folded = FoldedWeights(model, fold, "W_E", "W_Q", "W_K", "W_V", "W_O", "W_U")
    queries, keys = folded.queries_and_keys(distance)
    at, embedding = (layer, head), folded.embedding()
    return FullCircuits(
        qk=FactoredMatrix(embedding @ queries[at], (embedding @ keys[at]).mT),
        ov=FactoredMatrix(
            embedding @ folded.values()[at], folded.written()[at] @ folded.unembedding()
        ),
    )


@without_gradients
def token_directions(
    model: nn.Module, tokens: Int[Tensor, "*axes"] | str | Sequence[str], fold: bool = True
) -> Float[Tensor, "*axes d_model"]:
    """The direction of each token's logit in the stream: columns of `W_U`.

    The final stream's product with it, over the scale of the final norm, is the logit up to biases. Folded,
    that is the logit less the mean over the vocabulary, unless logits are capped.

    Args:
        model, fold: see `ov_circuit`.
        tokens: any shape; or texts, each of one token.

    Raises:
        TypeError, ValueError: as for `ov_circuit`; or if there are no tokens, or one is negative.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> token_directions(model, ["a", "b"]).shape
    torch.Size([2, 128])
    """
    folded = FoldedWeights(model, fold, "W_U")
    ids = tokens_of(token_ids(model, tokens), most=torch.iinfo(torch.int8).max)  # of any shape
    flat = ids.flatten()
    require_integer("the largest token", int(flat.max()), 0, n_logits(model) - 1)
    return folded.unembedding(flat).mT.reshape(*ids.shape, -1)


class SingularTokens(NamedTuple):
    """The tokens that singular directions of a head or an MLP stand for, at both ends of each direction.

    At end 0 are the tokens with the largest products with the direction, best first, and at end 1 those
    with the most negative. What is read at an end is written with the sign of that end.

    Attributes:
        s: the singular values, descending.
        read, read_scores: tokens by the products of their embeddings with what the head reads: for
            `qk`, the query.
        written, written_scores: tokens by their logits from what the head writes: for `qk`, tokens by
            the products of their embeddings with the key.
            For `W_in` what is written, and for `W_out` what is read, are neurons, by their entries.
        texts: `read` and `written` as text, neurons as `n3`; None where the model has no tokenizer.
    """

    s: Float[Tensor, " k"]
    read: Int[Tensor, "k end top"]
    read_scores: Float[Tensor, "k end top"]
    written: Int[Tensor, "k end top"]
    written_scores: Float[Tensor, "k end top"]
    texts: tuple[list[Any], list[Any]] | None = None

    def __repr__(self) -> str:
        """For each direction the first tokens at both of its ends, read and written."""
        read, written = self.texts or (self.read.tolist(), self.written.tolist())
        lines = [
            f"SingularTokens: {len(self.s)} directions; at each end what is read -> what is written"
        ]
        for s, *ends in zip(self.s.tolist(), read, written, strict=True):
            lines.append(f"  {s:.4g}")
            for sign, (one, other) in zip("+-", zip(*ends, strict=True), strict=True):
                lines.append(
                    f"    {sign} {' '.join(map(repr, one[:5]))} -> {' '.join(map(repr, other[:5]))}"
                )
        return "\n".join(lines)


@without_gradients
def singular_tokens(
    model: nn.Module,
    layer: int,
    head: int | None = None,
    circuit: Literal["ov", "qk", "W_in", "W_out"] = "ov",
    k: int = 5,
    top: int = 10,
    fold: bool = True,
    distance: int | None = None,
) -> SingularTokens:
    """Return the first singular directions of a head's circuit or of an MLP's weights, in tokens (Millidge & Black 2022).

    Args:
        model, fold, distance: see `qk_circuit`. A model whose MLP is read needs `ln2` and `ln2_post` too if `fold`.
        layer: the layer.
        head: the head of a circuit; None for weights of the MLP.
        circuit: `ov` or `qk` of a head, or `W_in` or `W_out` of the MLP.
        k: how many directions, at most d_head or, of an MLP, d_model or d_mlp.
        top: how many tokens or neurons at each end; all if there are fewer.

    Raises:
        TypeError, ValueError: as for `qk_circuit`; or if circuit is none of these, a head is missing or not
            needed, or k is more than the number of singular values.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> singular_tokens(model, layer=3, head=1, k=2, top=4).read.shape  # directions, ends, tokens
    torch.Size([2, 2, 4])
    """
    require_choice("circuit", circuit, ("ov", "qk", "W_in", "W_out"))
    if (head is None) == (circuit in ("ov", "qk")):
        raise ValueError(f"head must be given for 'ov' and 'qk' alone; got {head} for {circuit!r}")
    folded = FoldedWeights(model, fold, "W_E", "W_U")
    config = folded.model.config
    require_integer("layer", layer, -config.n_layers, config.n_layers - 1)
    if head is not None:
        require_integer("head", head, -config.n_heads, config.n_heads - 1)
    if circuit == "ov":
        decomposition = ov_circuit(model, fold=fold)[layer, head].svd()
    elif circuit == "qk":
        decomposition = qk_circuit(model, fold=fold, distance=distance)[layer, head].svd()
    else:
        decomposition = svd(folded.mlp(layer, circuit), circuit)
    require_integer("k", k, most=len(decomposition.s))
    embedding = folded.embedding()
    u, vh = (x.to(embedding.dtype) for x in (decomposition.u[:, :k], decomposition.vh[:k]))
    reading = u.mT if circuit == "W_out" else u.mT @ embedding.mT
    writing = vh
    if circuit != "W_in":
        writing = vh @ (embedding.mT if circuit == "qk" else folded.unembedding())
    read, written = _ends(reading, top), _ends(writing, top)
    to_text = writer_of(model)
    texts = None
    if to_text is not None:
        texts = (
            _neurons(read[0].tolist()) if circuit == "W_out" else to_text(read[0]),
            _neurons(written[0].tolist()) if circuit == "W_in" else to_text(written[0]),
        )
    return SingularTokens(decomposition.s[:k], *read, *written, texts)


def _neurons(numbers: list[list[list[int]]]) -> list[Any]:
    return [[[f"n{number}" for number in end] for end in ends] for ends in numbers]


def _ends(
    scores: Float[Tensor, "k entry"], top: int
) -> tuple[Int[Tensor, "k end top"], Float[Tensor, "k end top"]]:
    """The tokens at both ends, and their scores."""
    top = min(top, scores.shape[-1])
    ends = [scores.topk(top, largest=largest) for largest in (True, False)]
    return torch.stack([end.indices for end in ends], 1), torch.stack([e.values for e in ends], 1)
