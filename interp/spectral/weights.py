"""Circuits of attention heads, from weights alone, and the tokens of their singular directions."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import number_of, require_choice, require_integer, without_gradients, writer_of
from interp.inputs.token_positions import tokens_of
from interp.inputs.words import token_ids
from interp.json_form import Table, form
from interp.protocol import n_logits
from interp.spectral.factored import FactoredMatrix
from interp.spectral.folded import FoldedWeights
from interp.spectral.singular import svd


@without_gradients
def ov_circuit(model: nn.Module, *, fold: bool = True) -> FactoredMatrix:
    """Return `W_V @ W_O` of every head: [layer, head, d_model, d_model] (Elhage et al. 2021).

    `x @ ov` is the output of a head for the stream `x` at the position that it attends to, without
    biases.

    Args:
        model: a `models.Transformer`, an attached model, or a model of your own with the
            weights that are used; see `LanguageModel`.
        fold: whether norms are folded in: gains, and the mean that LayerNorm subtracts, but not the
            scale that a norm divides by, because it depends on the text. Gains of norms after
            attention are also folded in. If only LayerNorms read the stream, the mean of a head's
            output is left out. False returns the model's own weights. Default: True.

    Returns:
        The products of all heads, as two factors: [layer, head, d_model read, d_model written].
        Indices and `svd()` use the factors, without the full matrices.

    Raises:
        TypeError: if a weight or a norm is missing; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`).

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
    """Return `W_Q @ W_K^T` of every head: [layer, head, d_model, d_model] (Elhage et al. 2021).

    `x @ qk @ y` is the score of a query from the stream `x` and a key from `y`, before the factor 1
    / sqrt(d_head) and a soft cap, and without biases. For `fold` and errors see also `ov_circuit`.
    Norms of queries and keys are folded in like other norms, so their scales are left out.

    Args:
        model: a `models.Transformer`, an attached model, or a model of your own with the
            weights that are used; see `LanguageModel`.
        fold: whether norms are folded in.
        distance: the number of positions from the key to the query; needed if positions are rotary.

    Returns:
        The products of all heads, as two factors: [layer, head, d_model of the query, d_model of
        the key].

    Raises:
        TypeError: if a weight or a norm is missing; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`); or
            if positions are rotary, and the distance is not from 0 to n_ctx - 1.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> from interp.spectral import effective_rank
    >>> circuits = qk_circuit(model)
    >>> effective_rank(circuits[:2].svd().s).round()  # [layer, head], of at most 32
    tensor([[ 8.,  7., 13.,  7.],
            [17., 17., 17., 16.]], dtype=torch.float64)
    """
    queries, keys = FoldedWeights(model, fold, "W_Q", "W_K").queries_and_keys(distance)
    return FactoredMatrix(queries, keys.mT)


class FullCircuits(NamedTuple):
    """The circuits of a head from tokens to tokens on the direct path. Both are [vocab, vocab].

    Attributes:
        qk: the score of a query at the row's token and a key at the column's token.
        ov: the amount that attending to the row's token adds to the logit of the column's token.
    """

    qk: FactoredMatrix
    ov: FactoredMatrix


@without_gradients
def full_circuits(
    model: nn.Module, layer: int, head: int, fold: bool = True, distance: int | None = None
) -> FullCircuits:
    """Return the circuits of one head through embeddings and unembedding (Elhage et al. 2021).

    The matrices of vocab times vocab numbers are never formed: see `FactoredMatrix.top` and its
    slices. Position embeddings are left out. With `fold`, the scales of norms are left out too.

    Args:
        model: a `models.Transformer`, an attached model, or a model of your own with the
            weights that are used; see `LanguageModel`.
        fold: whether norms are folded in. Folded logits have mean 0 over the vocabulary.
        distance: the number of positions from the key to the query; needed if positions are rotary.
        layer, head: the layer and the number of the head.

    Returns:
        The QK circuit [query token, key token], and the OV circuit [input token, output token].

    Raises:
        TypeError: if a weight or a norm is missing; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`); or
            if positions are rotary, and the distance is not from 0 to n_ctx - 1.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> full_circuits(model, layer=1, head=3).ov  # from 103 tokens to 103 tokens
    FactoredMatrix [103, 103], inner 32, torch.float32
    """
    folded = FoldedWeights(model, fold, "W_E", "W_Q", "W_K", "W_V", "W_O", "W_U")
    config = folded.model.config
    require_integer("layer", layer, least=-config.n_layers, most=config.n_layers - 1)
    require_integer("head", head, least=-config.n_heads, most=config.n_heads - 1)
    queries, keys = folded.queries_and_keys(distance)
    at = (layer, head)
    embedding = folded.embedding()
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
    """Return the direction of each token's logit in the stream: columns of `W_U`.

    With `fold`, the product of the final stream and the direction, divided by the scale of the
    final norm, is the logit up to biases, minus the mean over the vocabulary unless logits are
    capped. Without `fold`, the direction reads the output of the final norm and not the stream.

    Args:
        model: a `models.Transformer`, an attached model, or a model of your own with the
            weights that are used; see `LanguageModel`.
        fold: whether the final norm is folded in: its gain, and the mean that a LayerNorm
            subtracts.
        tokens: tokens in any shape; or texts of one token each.

    Returns:
        The directions [..., d_model], with the shape of `tokens` before `d_model`.

    Raises:
        TypeError: if a weight or a norm is missing; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`); or
            if there are no tokens, or a token is negative.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> from interp import run_with_cache
    >>> logits, cache = run_with_cache(model, "def __ini", mode="full")
    >>> t, e = token_directions(model, ["t", "e"])
    >>> stream, scale = cache["resid_post", -1][0, -1], cache["ln_final.scale"][0, -1]
    >>> round((stream @ (t - e) / scale).item(), 1)
    10.7
    >>> right, wrong = model.encoded("te")
    >>> round((logits[0, -1, right] - logits[0, -1, wrong]).item(), 1)  # with their biases
    10.6
    """
    folded = FoldedWeights(model, fold, "W_U")
    ids = tokens_of(token_ids(model, tokens), most=torch.iinfo(torch.int8).max)  # of any shape
    flat = ids.flatten()
    require_integer("the largest token", int(flat.max()), least=0, most=n_logits(model) - 1)
    return folded.unembedding(flat).mT.reshape(*ids.shape, -1)


class SingularTokens(NamedTuple):
    """The tokens at both ends of singular directions of a head or an MLP.

    A direction has two ends. End 0 contains the tokens with the largest products with the
    direction, the largest first. End 1 contains the tokens with the smallest (most negative)
    products. The ends of the direction that is read and of the direction that is written
    correspond: an input towards end 0 causes an output towards end 0.

    Attributes:
        s: the singular values, descending.
        read, read_scores: tokens, and the products of their embeddings with the direction that the
            head or MLP reads. For `qk`, the direction is the direction of the query. For `W_out`,
            they are neurons, and the entries of the direction at these neurons.
        written, written_scores: tokens, and their logits from the direction that the head or MLP
            writes. For `qk`, they are tokens, and the products of their embeddings with the
            direction of the key. For `W_in`, they are neurons, and the entries of the direction at
            these neurons.
        texts: `read` and `written` as text, with neurons as `n3`; None if the model has no
            tokenizer.
    """

    s: Float[Tensor, " k"]
    read: Int[Tensor, "k end top"]
    read_scores: Float[Tensor, "k end top"]
    written: Int[Tensor, "k end top"]
    written_scores: Float[Tensor, "k end top"]
    texts: tuple[list[Any], list[Any]] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return all tokens and scores in the JSON form of all results; see `interp.json_form`."""
        tables = {"s": Table(self.s, "k", "singular value")}
        for name in ("read", "read_scores", "written", "written_scores"):
            tables[name] = Table(getattr(self, name), "k end top")
        for name, texts in zip(("read", "written"), self.texts or (), strict=False):
            tables[f"{name}.words"] = Table(texts, "k end top")
        return form("SingularTokens", tables)

    def __repr__(self) -> str:
        """Return a line for each direction: the first tokens that are read and written at both
        ends.
        """
        read, written = self.texts or (self.read.tolist(), self.written.tolist())
        lines = [
            f"SingularTokens: {number_of(len(self.s), 'direction')}; "
            "at each end what is read -> what is written"
        ]
        for value, *ends in zip(self.s.tolist(), read, written, strict=True):
            lines.append(f"  {value:.4g}")
            for sign, (read_tokens, written_tokens) in zip(
                "+-", zip(*ends, strict=True), strict=True
            ):
                shown_read = " ".join(map(repr, read_tokens[:5]))
                shown_written = " ".join(map(repr, written_tokens[:5]))
                lines.append(f"    {sign} {shown_read} -> {shown_written}")
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
    """Return the tokens of the first singular directions of a head or an MLP.

    The method is from Millidge & Black 2022.

    Args:
        model: a `models.Transformer`, an attached model, or a model of your own with the
            weights that are used; see `LanguageModel`.
        fold: whether norms are folded in. For an MLP, this also needs `ln2` and `ln2_post`.
        distance: the number of positions from the key to the query; needed if positions are rotary.
        layer: the layer.
        head: the head of a circuit; None for weights of the MLP.
        circuit: `ov` or `qk` of a head, or `W_in` or `W_out` of the MLP.
        k: the number of directions, at most d_head or, for an MLP, at most d_model or d_mlp.
        top: the number of tokens or neurons at each end, or all of them if there are fewer.

    Returns:
        The singular values [k], and the tokens and their scores [k, end, top].

    Raises:
        TypeError: if a weight or a norm is missing; or if `fold`, and a norm is neither a
            LayerNorm nor an RMSNorm.
        ValueError: if `fold`, and the norms normalize the stream itself (`norm_place="post"`); if
            positions are rotary, and the distance is not from 0 to n_ctx - 1; if `circuit` is
            unknown; if a head is missing or not needed; or if k is more than the number of singular
            values.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> tokens = singular_tokens(model, layer=3, head=0, k=1, top=3)
    >>> tokens.s
    tensor([1.4624], dtype=torch.float64)
    >>> read, written = tokens.texts
    >>> sorted(zip(read[0], written[0]))  # for each end, the tokens read and written
    [(['E', 'j', 'u'], ['>', '2', '%']), (['l', '@', "'"], ['_', 'k', 'g'])]
    """
    require_choice("circuit", circuit, ("ov", "qk", "W_in", "W_out"))
    folded = FoldedWeights(model, fold, "W_E", "W_U")
    config = folded.model.config
    require_integer("layer", layer, least=-config.n_layers, most=config.n_layers - 1)
    _require_head(head, circuit, config.n_heads)
    if circuit == "ov":
        decomposition = ov_circuit(model, fold=fold)[layer, head].svd()
    elif circuit == "qk":
        decomposition = qk_circuit(model, fold=fold, distance=distance)[layer, head].svd()
    else:
        decomposition = svd(folded.mlp(layer, circuit), circuit)
    require_integer("k", k, most=len(decomposition.s))
    embedding = folded.embedding()
    # The directions that are read and written, as rows.
    reading = decomposition.u[:, :k].to(embedding.dtype).mT
    writing = decomposition.vh[:k].to(embedding.dtype)
    if circuit != "W_out":
        reading = reading @ embedding.mT
    if circuit != "W_in":
        writing = writing @ (embedding.mT if circuit == "qk" else folded.unembedding())
    read, read_scores = _ends(reading, top)
    written, written_scores = _ends(writing, top)
    to_text = writer_of(model)
    texts = None
    if to_text is not None:
        texts = (
            _neurons(read) if circuit == "W_out" else to_text(read),
            _neurons(written) if circuit == "W_in" else to_text(written),
        )
    return SingularTokens(
        s=decomposition.s[:k],
        read=read,
        read_scores=read_scores,
        written=written,
        written_scores=written_scores,
        texts=texts,
    )


def _neurons(numbers: Int[Tensor, "k end top"]) -> list[Any]:
    """Return the names of neurons, in nested lists."""
    names = []
    for largest, smallest in numbers.tolist():
        names.append([[f"n{n}" for n in largest], [f"n{n}" for n in smallest]])
    return names


def _require_head(head: int | None, circuit: str, n_heads: int) -> None:
    """Check that a circuit of a head has a head, and weights of an MLP have none.

    Raises:
        ValueError: if the head is missing, not needed or outside the model.
    """
    if circuit not in ("ov", "qk"):
        if head is not None:
            raise ValueError(f"head must be None for {circuit!r}; got {head}")
        return
    if head is None:
        raise ValueError(f"head must be given for {circuit!r}, such as head=0; got None")
    require_integer("head", head, least=-n_heads, most=n_heads - 1)


def _ends(
    scores: Float[Tensor, "k entry"], top: int
) -> tuple[Int[Tensor, "k end top"], Float[Tensor, "k end top"]]:
    """Return the tokens with the largest and with the smallest scores, and these scores.

    Raises:
        TypeError, ValueError: if `top` is not a whole number of at least 1.
    """
    require_integer("top", top)
    top = min(top, scores.shape[-1])
    largest = scores.topk(top)
    smallest = scores.topk(top, largest=False)
    tokens = torch.stack([largest.indices, smallest.indices], 1)
    return tokens, torch.stack([largest.values, smallest.values], 1)
