"""Blocks whose residual stream has several vectors for each token (hyper-connections, AltUp).

Such a block combines the vectors of a token into one vector, which attention or the MLP reads. The
block then multiplies the output by several numbers, and adds one product to each vector.

1. A tensor between the blocks has an axis of streams: [batch, pos, stream, d_model] or [stream,
   batch, pos, d_model] (`axis_of_streams`). A record of a run gets the first form
   (`ProbeRun.with_streams_third`), and points always show the first form.
2. The stream is not a sum of terms, so sums do not show the sublayers. The sublayer of attention is
   the outermost module with attention that reads and returns one vector for each token. The MLP is
   the outermost other module of this kind with a hidden layer or experts (`layout_of_streams`).
3. Norms and dropouts that directly follow a sublayer belong to it. The last of them returns the
   term of the sublayer.
4. If a module between the two sublayers reads all vectors, its input is the stream between them.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from hooks.base import is_same
from models.attached.experts import experts_of
from models.attached.layout import BlockLayout, Candidates
from models.attached.parts import Summand, TracedNorm, hidden_of, is_in, norm_of
from models.attached.probe import Call, ProbeRun


def axis_of_streams(block: Call, probe: ProbeRun, texts: tuple[int, int]) -> int | None:
    """Return the index of the axis of streams in the tensor that a block reads.

    The result is None for a block with one vector for each token.

    Args:
        block: the call of the block.
        probe: the run in which the block was called.
        texts: the numbers of rows and positions of the texts.
    """
    stream = block.inputs[0] if block.inputs else None
    output = block.output
    if stream is None or output is None or stream.ndim != 4 or stream.shape != output.shape:
        return None
    inside = [call for call in probe.single if call is not block and is_in(call, block)]
    for axis in (2, 0):
        one = stream.select(axis, 0).shape
        if one[:2] == texts and any(_is_sublayer(call, one) for call in inside):
            return axis
    return None


def _is_sublayer(call: Call, shape: Sequence[int]) -> bool:
    """Return whether a module with matrices reads and returns one vector for each token.

    Args:
        call: the call of the module.
        shape: the shape of these vectors, [batch, pos, d_model].
    """
    is_same_shape = call.output is not None and [*call.output.shape] == [*shape]
    has_matrices = any(weight.ndim > 1 for weight in call.module.parameters())
    return is_same_shape and has_matrices and _reads(call, shape)


def _reads(call: Call, shape: Sequence[int]) -> bool:
    """Return whether the first input of a call has a shape."""
    return bool(call.inputs) and [*call.inputs[0].shape] == [*shape]


def layout_of_streams(candidates: Candidates) -> BlockLayout:
    """Return the parts of a block with several vectors for each token.

    Args:
        candidates: the calls inside the block.
    """
    calls = candidates.whole
    one = candidates.block.inputs[0][:, :, 0]
    sublayers = [call for call in calls if _is_sublayer(call, one.shape)]
    layout = BlockLayout(
        candidates.block.module, attention=candidates.attention, traced=candidates.traced
    )
    attn = candidates.named.get("attn")
    if attn is None and len(candidates.attending) == 1:
        attends = candidates.attending[0]
        attn = next((call for call in sublayers if is_in(attends, call)), None)
    attn_term = None
    if attn is not None:
        attn_term = _term_of(attn, calls)
        layout.attn_out = _summand(attn_term)
        layout.norms |= _norms_around("ln1", attn, attn_term, calls)
    others = [attn_term] if attn_term else []
    mlps = list[Call]()
    for call in sublayers:
        is_inside = any(is_in(call, outer) or is_in(outer, call) for outer in (*others, *mlps))
        if attn is not None and (is_in(call, attn) or is_in(attn, call)):
            continue
        if not is_inside and _has_hidden_layer(call, candidates):
            mlps.append(call)
    mlp = candidates.named.get("mlp", mlps[0] if len(mlps) == 1 else None)
    if mlp is not None:
        mlp_term = _term_of(mlp, calls)
        layout.mlp_out = _summand(mlp_term)
        layout.norms |= _norms_around("ln2", mlp, mlp_term, calls)
        layout.hidden = hidden_of(mlp_term, calls, others=others, attention=layout.attention)
        layout.experts = experts_of([c for c in candidates.inside if is_in(c, mlp)], mlp_term)
        layout.mid_in = _reader_between(attn_term, mlp, candidates)
    return layout


def _has_hidden_layer(call: Call, candidates: Candidates) -> bool:
    """Return whether a module contains the hidden layer of an MLP, or experts."""
    inside = [inner for inner in candidates.inside if inner is not call and is_in(inner, call)]
    is_mlp = hidden_of(call, inside, others=[], attention=candidates.attention) is not None
    return is_mlp or experts_of(inside, call) is not None


def _term_of(sublayer: Call, calls: Sequence[Call]) -> Call:
    """Return the last of the norms and dropouts that read the output of a sublayer in a chain."""
    term = sublayer
    for call in calls:
        if call.began < term.ended or not call.inputs or call.output is None:
            continue
        # The module must read the same tensor, so there is no rounding.
        is_next = is_same(call.inputs[0], term.output) and call.output.shape == call.inputs[0].shape
        is_plain = norm_of(call) is not None or not [*call.module.parameters()]
        if is_next and is_plain:
            term = call
    return term


def _summand(term: Call) -> Summand:
    """Return the value of a term: the output of its module."""
    return Summand(term.module, 1.0, term.is_overwritten)


def _norms_around(
    name: str, sublayer: Call, term: Call, calls: Sequence[Call]
) -> dict[str, TracedNorm]:
    """Return the norm before a sublayer, and the norm after it, by their names.

    Args:
        name: the name of the norm before the sublayer.
        sublayer: the call of the sublayer.
        term: the call whose output is the term of the sublayer.
        calls: the calls inside the block.
    """
    norms = dict[str, TracedNorm]()
    for call in calls:
        is_before = call.ended < sublayer.began and is_same(call.output, sublayer.inputs[0])
        if is_before and (norm := norm_of(call)):
            norms[name] = norm
    if term is not sublayer and (norm := norm_of(term)):
        norms[f"{name}_post"] = norm
    return norms


def _reader_between(attn: Call | None, mlp: Call, candidates: Candidates) -> nn.Module | None:
    """Return the module between the two sublayers that first reads all vectors of the tokens.

    The result is None without such a module.
    """
    if attn is None:
        return None
    stream: Tensor = candidates.block.inputs[0]
    for call in candidates.whole:
        is_between = attn.ended < call.began and call.ended < mlp.began
        if is_between and _reads(call, stream.shape) and not is_same(call.inputs[0], stream):
            return call.module
    return None
