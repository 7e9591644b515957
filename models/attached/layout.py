"""The layout of a block of any architecture: its attention, MLPs and norms, found from a run.

This file names no architecture. `layout_of` finds the parts of a block in three steps, from the
inputs and outputs of its modules:

1. Candidates (`candidates_of`): the calls inside the block that see every position. A call belongs
   to attention if it calls an attention function of `transformers`, or computes attention in its
   own code. Other attention is found by the name that the user passed, or by the name of its class.
2. Terms (`terms_of`): a term is the output of a module, times a factor of the config, that the
   block adds to the stream. A later module must read the sum of the stream and the terms so far.
   The same sums show where the stream between two terms is read, and which norms read it. With
   attention to an encoder, there are three terms (`crossing_of`).
3. Roles (`roles_of`): the first term whose call ended after attention began belongs to attention.
   The next term, or the last, belongs to the MLP. Any other term comes from another mixer: a
   sublayer without attention that moves information between positions, such as a state space.

`layout_of` assembles these into a `BlockLayout`, with the hidden layer and the experts of the MLP.
A block with a new order of sublayers needs only its sums in `terms_of` and its order in `roles_of`.
A layout has one place for an MLP (`TermsByRole.mlp`, `BlockLayout.mlp_out`). So a block with two
MLPs also needs a second place in both, points for it in `points`, a branch in `view`, and a node in
`interp.graph.nodes`.

`layout_of_streams` is for blocks whose residual stream has several vectors for each token
(hyper-connections, AltUp). Such a block combines the vectors of a token into one vector, which
attention or the MLP reads. The block then multiplies the output by several numbers, and adds one
product to each vector.

1. A tensor between the blocks has an axis of streams: [batch, pos, stream, d_model] or [stream,
   batch, pos, d_model] (`axis_of_streams`). A record of a run gets the first form
   (`ProbeRun.with_streams_third`), and points always show the first form.
2. The stream is not a sum of terms, so sums do not show the sublayers. The sublayer of attention is
   the outermost module with attention that reads and returns one vector for each token. The MLP is
   the outermost other module of this kind with a hidden layer or experts.
3. Norms and dropouts that directly follow a sublayer belong to it. The last of them returns the
   term of the sublayer.
4. If a module between the two sublayers reads all vectors, its input is the stream between them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from hooks.base import is_same
from models.attached.experts import Experts, experts_of
from models.attached.original import AttachError
from models.attached.parts import (
    Hidden,
    Summand,
    TracedNorm,
    factors_of,
    hidden_of,
    is_in,
    norm_of,
    parallel,
    summand,
    weights_in,
)
from models.attached.probe import Call, ProbeRun

Term = tuple[Call, Summand]
"""A call, and the value that is added to the stream from its output."""


class Roles(NamedTuple):
    """The names that a user gives: the blocks of a model, and the sublayers of a block.

    If a name is None, the part is found without a name.
    """

    blocks: str | None = None
    attn: str | None = None
    mlp: str | None = None


@dataclass
class BlockLayout:
    """The parts of one block. A part that was not found is None or missing.

    Attributes:
        block: the module.
        attention: the module that computes attention.
        attn_out, mlp_out: the terms that the sublayers add.
        mixer_out: the term of a sublayer without attention that mixes positions, such as a state
            space or a convolution. The block may also have attention.
        cross: the module that attends to an encoder.
        traced: the modules among `attention` and `cross` that compute attention in their own code.
        cross_out: the term of attention to an encoder.
        mid_in, mid_out: the module whose input, or output, is the stream between the sublayers.
        cross_in, crossed: the module whose input, or output, is the stream after attention to an
            encoder.
        norms: the norms, by the names of `models.Transformer`.
        hidden: the MLP's hidden layer.
        experts: the experts.
        reads_first: whether only the first term was found. A norm reads the sum with this term.
    """

    block: nn.Module
    attention: nn.Module | None = None
    attn_out: Summand | None = None
    mlp_out: Summand | None = None
    mixer_out: Summand | None = None
    cross: nn.Module | None = None
    traced: set[nn.Module] = field(default_factory=set)
    cross_out: Summand | None = None
    mid_in: nn.Module | None = None
    mid_out: nn.Module | None = None
    cross_in: nn.Module | None = None
    crossed: nn.Module | None = None
    norms: dict[str, TracedNorm] = field(default_factory=dict)
    hidden: Hidden | None = None
    experts: Experts | None = None
    reads_first: bool = False


def layout_of(block: Call, probe: ProbeRun, roles: Roles, *configs: Any) -> BlockLayout:
    """Return the parts of a block.

    Args:
        block: the call of the block.
        probe: the run in which the block was called.
        roles: the sublayers that a user names.
        configs: configs, which may contain factors of the terms.

    Raises:
        AttachError: if the output of a named sublayer is not added to the stream.
    """
    candidates = candidates_of(block, probe, roles)
    factors = [1.0, *factors_of(*block.module.modules(), *configs)]
    if len(candidates.attending) == 2 and (crossing := crossing_of(candidates, factors)):
        return crossing
    terms = terms_of(candidates, [1.0])
    if not terms.added:
        terms = terms_of(candidates, factors)
    if len(candidates.attending) > 1 and terms.reads_first:
        # Several modules compute attention, but only one term was found. So this module contains
        # several blocks, as the stages of Swin do, and its parts get no points.
        return BlockLayout(block.module)
    return _assembled(candidates, terms, roles_of(candidates, terms))


@dataclass(frozen=True)
class Candidates:
    """The calls inside a block among which its parts are found.

    Attributes:
        block: the call of the block.
        inside: the calls of modules that ran once.
        whole: the calls among `inside` that see every position. The modules of a list are left out
            if they do not run one after the other, because they may be experts.
        attending: the calls in `whole` that compute attention; empty if the user names attention.
        attention: the module that computes attention; None if there is no such module, or several.
        traced: the modules that compute attention in their own code, not by an attention function
            of `transformers`.
        mixers: the calls of attention, from which its term is found: the call that the user names,
            or the calls in `attending`, or the calls of modules with "attention" in the name of
            their class.
        named: the calls of the sublayers that a user names, by role.
    """

    block: Call
    inside: Sequence[Call]
    whole: Sequence[Call]
    attending: Sequence[Call]
    attention: nn.Module | None
    traced: set[nn.Module]
    mixers: Sequence[Call]
    named: Mapping[str, Call]


def candidates_of(block: Call, probe: ProbeRun, roles: Roles) -> Candidates:
    """Return the calls inside a block among which its parts are found.

    Args:
        block: the call of the block.
        probe: the run in which the block was called.
        roles: the sublayers that a user names.

    Raises:
        AttachError: if a sublayer that the user names ran several times, or never.
    """
    inside = [
        call for call in probe.single if block.began < call.began and call.ended < block.ended
    ]
    in_parallel = set[nn.Module]()
    for part in block.module.modules():
        if isinstance(part, nn.ModuleList) and not _is_chain(part, inside):
            in_parallel |= {*part.modules()}
    whole = [call for call in inside if call.module not in in_parallel]
    attending = [call for call in whole if probe.attention[call.module] == 1]
    traced = set[nn.Module]()
    if probe.parts is not None:
        traced = {call.module for call in attending} - {module for module, _ in probe.keys}
    named = {
        role: _sublayer_named(name, block, whole)
        for role, name in (("attn", roles.attn), ("mlp", roles.mlp))
        if name
    }
    attention = attending[0].module if len(attending) == 1 else None
    if "attn" in named:
        attending = []
        mixers = [named["attn"]]
    else:
        # Linear attention, a state space and a convolution all mix positions without a softmax, so
        # a run does not tell which of them a module is. The name of the class decides: with
        # "attention" in it, the point is `attn_out`, and otherwise `mixer_out`. The name changes
        # no number.
        classes = [call for call in whole if "attention" in type(call.module).__name__.lower()]
        mixers = attending or classes
    return Candidates(
        block=block,
        inside=inside,
        whole=whole,
        attending=attending,
        attention=attention,
        traced=traced,
        mixers=mixers,
        named=named,
    )


def _is_chain(modules: nn.ModuleList, calls: Sequence[Call]) -> bool:
    """Return whether each module of a list runs on the output of the module before."""
    ran = [call for call in calls if call.module in {*modules}]
    is_whole = len(ran) == len(modules) > 1
    return is_whole and all(_runs_on(call, earlier) for earlier, call in itertools.pairwise(ran))


def _runs_on(call: Call, earlier: Call) -> bool:
    """Return whether a call reads the output of an earlier call as its stream."""
    output = earlier.output
    if output is None or _stream_of(call, output) is None or earlier.ended >= call.began:
        return False
    return any(is_same(read, output) for read in call.inputs)


def _sublayer_named(name: str, block: Call, calls: Sequence[Call]) -> Call:
    """Return the call of the sublayer that a user names.

    Raises:
        AttachError: if the block does not contain it, or it did not run exactly once.
    """
    for call in calls:
        if call.name == f"{block.name}.{name}":
            return call
    names = ", ".join(name for name, _ in block.module.named_children())
    raise AttachError(
        f"{name!r} must be a module of each block that runs once; {block.name} has {names}"
    )


@dataclass(frozen=True)
class Terms:
    """The terms that a block adds to its stream, and the facts that their sums show.

    Attributes:
        added: the terms, in order.
        norms: the norms that read the stream, by the names of `models.Transformer`.
        mid_in, mid_out: the module whose input, or output, is the stream between the terms.
        reads_first: whether only the first term was found, because the second one is not the output
            of a module. Then the sum with the first term is known from a norm that reads it.
    """

    added: Sequence[Term]
    norms: Mapping[str, TracedNorm]
    mid_in: nn.Module | None = None
    mid_out: nn.Module | None = None
    reads_first: bool = False


def terms_of(candidates: Candidates, factors: Sequence[float]) -> Terms:
    """Return the terms of a block: the outputs of modules that the block adds to the stream.

    Each output may be multiplied by a factor before it is added. The result has the first of these
    forms in which the outputs of the block's modules add up to its stream:

    1. A later module reads the sum of the stream and a first term, or of the stream and two mixers
       of positions side by side. A second term is added to this sum.
    2. Two terms, and the stream after each of them is the output of a norm that reads the sum
       (BERT).
    3. One term, or two side by side, are added to the stream that enters the block (parallel
       blocks).
    4. Only a first term is found. A norm reads the sum with this term.

    Args:
        candidates: the calls of modules inside the block (see `candidates_of`).
        factors: the factors of the config by which an output may be multiplied.
    """
    calls = candidates.whole
    entering, leaving = candidates.block.inputs[0], candidates.block.output
    assert leaving is not None
    first_alone: tuple[Term, Tensor] | None = None
    for reader in calls:
        between = _stream_of(reader, entering)
        if between is None or is_same(between, entering.to(between.dtype)):
            continue
        before = [call for call in calls if call.ended < reader.began]
        after = [call for call in calls if call.began >= reader.began]
        first = summand(entering, between, calls=before, factors=factors)
        before_second = [first] if first else []
        if first is None and len(factors) > 1:
            # Attention and another mixer of positions may be parallel, each with its own factor.
            before_second = parallel(entering, between, calls=before, factors=factors)
        if before_second and (second := summand(between, leaving, calls=after, factors=factors)):
            norms = _norms_of_readers({"ln1": entering, "ln2": between}, calls)
            return Terms([*before_second, second], norms, mid_in=reader.module)
        if first is None:
            continue
        if normed := _terms_before_norms(first, reader, leaving=leaving, calls=after):
            return normed
        if first_alone is None and norm_of(reader):
            first_alone = first, between
    norms = _norms_of_readers({"ln1": entering, "ln2": entering}, calls)
    if only := summand(entering, leaving, calls=calls, factors=factors):
        return Terms([only], norms)
    pair = parallel(entering, leaving, calls)
    if pair or first_alone is None:
        return Terms(pair, norms)
    first, between = first_alone
    norms = _norms_of_readers({"ln1": entering, "ln2": between}, calls)
    return Terms([first], norms, reads_first=True)


def _terms_before_norms(
    first: Term, norm: Call, leaving: Tensor, calls: Sequence[Call]
) -> Terms | None:
    """Return two terms if the stream after each of them is the output of a norm, as in BERT.

    The first norm reads the sum with the first term. The second norm reads the sum of the first
    norm's output and the second term. The result is None if there is no second term.

    Args:
        first: the first term.
        norm: the call that reads the sum with the first term.
        leaving: the stream that leaves the block.
        calls: the calls from `norm` on.
    """
    if norm.output is None or norm.output.shape != leaving.shape:
        return None
    for last in calls:
        stream = _stream_of(last, leaving)
        if stream is None or last.output is None or not is_same(last.output, leaving):
            continue
        between = [call for call in calls if call.began > norm.ended and call.ended < last.began]
        if second := summand(norm.output, stream, between):
            return Terms([first, second], _norms({"ln1": norm, "ln2": last}), mid_out=norm.module)
    return None


def _norms(calls: Mapping[str, Call]) -> dict[str, TracedNorm]:
    """Return the norms that these calls compute, by their names.

    Calls that do not compute a norm are left out.
    """
    norms = {name: norm_of(call) for name, call in calls.items()}
    return {name: norm for name, norm in norms.items() if norm}


def _norms_of_readers(
    streams: Mapping[str, Tensor], calls: Sequence[Call]
) -> dict[str, TracedNorm]:
    """Return the first norm that reads each stream, by the name of the norm.

    A norm that reads two of the streams gets only the first name.
    """
    norms = dict[str, TracedNorm]()
    for name, stream in streams.items():
        named = {norm.module for norm in norms.values()}
        for call in calls:
            reads = _stream_of(call, stream)
            if reads is None or call.module in named or not is_same(reads, stream.to(reads.dtype)):
                continue
            if norm := norm_of(call):
                norms[name] = norm
                break
    return norms


def _stream_of(call: Call, like: Tensor) -> Tensor | None:
    """Return the first input of a call that may be the stream; None without one.

    It has the shape and the precision of `like`. Its numbers may differ from `like`, because a term
    may have been added. If its precision is different, its numbers must be the numbers of `like`.
    """
    for stream in call.inputs:
        if stream.shape != like.shape or not stream.is_floating_point():
            continue
        if stream.dtype == like.dtype or is_same(stream, like.to(stream.dtype)):
            return stream
    return None


class TermsByRole(NamedTuple):
    """The terms of a block by the sublayer that adds them; None if no term has the role."""

    attn: Term | None = None
    mlp: Term | None = None
    mixer: Term | None = None


def roles_of(candidates: Candidates, terms: Terms) -> TermsByRole | None:
    """Return the terms by their sublayers.

    The result is None if there is a single term and its sublayer is unknown.

    Raises:
        AttachError: if the output of a named sublayer is not added to the stream.
    """
    added = terms.added
    named = candidates.named
    if "attn" in named:
        attn = next((term for term in added if _gives(term[0], named["attn"])), None)
    else:
        attn = next((term for term in added if _is_after(candidates.mixers, term[0])), None)
    is_alone = len(added) == 1 and not terms.reads_first
    if attn and is_alone and not any(is_in(mixer, attn[0]) for mixer in candidates.mixers):
        # The module of the term does not contain attention, so the term may belong to the MLP:
        # attention may have added only zeros.
        _require_added(candidates, TermsByRole())
        return None
    terms_by_role = dict[str, Term]()
    for at, term in enumerate(added):
        is_second = len(added) == 2 and (attn is not None or at == 1)
        is_named = "mlp" in named and _gives(term[0], named["mlp"])
        if term is attn:
            terms_by_role["attn"] = term
        elif at == 2 or is_second or is_named:
            terms_by_role["mlp"] = term
        else:
            terms_by_role["mixer"] = term
    by_role = TermsByRole(**terms_by_role)
    _require_added(candidates, by_role)
    return by_role


def _is_after(mixers: Sequence[Call], call: Call) -> bool:
    """Return whether a call ended after attention began."""
    return any(mixer.began < call.ended for mixer in mixers)


def _gives(added: Call, sublayer: Call) -> bool:
    """Return whether the output of the call `added` is the output of a sublayer.

    It may also be a norm or dropout of this output. Or one of the two modules contains the other.
    """
    # Dropout and norms read the same tensor, so there is no rounding.
    reads = any(is_same(read, sublayer.output) for read in added.inputs)
    is_plain = norm_of(added) is not None or not [*weights_in(added.module)]
    return (reads and is_plain) or is_in(sublayer, added) or is_in(added, sublayer)


def _require_added(candidates: Candidates, by_role: TermsByRole) -> None:
    """Require that the output of each named sublayer is added to the stream.

    Raises:
        AttachError: if it is not. The error names the sublayer.
    """
    block = candidates.block.name
    for role, sublayer in candidates.named.items():
        term: Term | None = getattr(by_role, role)
        if term is None or not _gives(term[0], sublayer):
            raise AttachError(
                f"{sublayer.name.removeprefix(block)[1:]!r} must be a sublayer whose output is "
                "added to the stream, up to a norm, dropout or a factor of the config; in "
                f"{block} it is not added, or more than two outputs are added"
            )


def _assembled(candidates: Candidates, terms: Terms, by_role: TermsByRole | None) -> BlockLayout:
    """Return the layout of a block, with the hidden layer and the experts of its MLP."""
    layout = BlockLayout(
        candidates.block.module,
        attention=candidates.attention,
        traced=candidates.traced,
        mid_in=terms.mid_in,
        mid_out=terms.mid_out,
        norms=dict(terms.norms),
        reads_first=terms.reads_first,
    )
    if by_role is None:
        return layout
    attn, mlp, mixer = by_role
    if attn:
        layout.attn_out = attn[1]
        layout.norms |= _norms({"ln1_post": attn[0]})
    if mixer:
        layout.mixer_out = mixer[1]
    if mlp:
        layout.mlp_out = mlp[1]
        layout.norms |= _norms({"ln2_post": mlp[0]})
    hidden_in = mlp[0] if mlp else None
    if terms.reads_first and "ln2" in layout.norms:
        hidden_in = _reader_of(layout.norms["ln2"].module, candidates.whole) or hidden_in
    if hidden_in is not None:
        others = [call for call, _ in terms.added if call is not hidden_in]
        layout.hidden = hidden_of(
            hidden_in, candidates.whole, others=others, attention=layout.attention
        )
    term_of_experts = mlp or mixer
    layout.experts = experts_of(candidates.inside, term_of_experts[0] if term_of_experts else None)
    return layout


def _reader_of(norm: nn.Module, calls: Sequence[Call]) -> Call | None:
    """Return the first call that reads the output of a norm; None without one.

    If the MLP's term is not the output of a module, this call stands for the MLP.
    """
    output = next(call.output for call in calls if call.module is norm)
    for call in calls:
        if call.inputs and call.output is not None and is_same(call.inputs[0], output):
            return call
    return None


class Addition(NamedTuple):
    """A term that is added to the stream.

    Attributes:
        reader: the call that reads the sum; None if the sum leaves the block.
        term: the term.
        total: the sum of the stream and the term.
    """

    reader: Call | None
    term: Term
    total: Tensor


def crossing_of(candidates: Candidates, factors: Sequence[float]) -> BlockLayout | None:
    """Return the layout of a block with attention to an encoder; None for any other block.

    Attention to the encoder is the second of three terms.
    """
    calls = candidates.whole
    entering = candidates.block.inputs[0]
    attention, cross = (call.module for call in candidates.attending)
    layout = BlockLayout(
        candidates.block.module, attention=attention, cross=cross, traced=candidates.traced
    )
    # In some blocks, norms read the sums (BART).
    for is_normed in (False, True):
        three = next(_three_additions(candidates, factors, is_normed), None)
        if three is None:
            continue
        (attention_term, cross_term, mlp_term), calls_after = three
        assert attention_term.reader is not None
        assert cross_term.reader is not None
        layout.attn_out, layout.cross_out, layout.mlp_out = (
            addition.term[1] for addition in (attention_term, cross_term, mlp_term)
        )
        if mlp_term.reader is None:
            layout.mid_in = attention_term.reader.module
            layout.cross_in = cross_term.reader.module
            streams = {"ln1": entering, "ln_cross": attention_term.total, "ln2": cross_term.total}
            layout.norms = _norms_of_readers(streams, calls)
        else:
            layout.mid_out = attention_term.reader.module
            layout.crossed = cross_term.reader.module
            layout.norms = _norms(
                {
                    "ln1": attention_term.reader,
                    "ln_cross": cross_term.reader,
                    "ln2": mlp_term.reader,
                }
            )
        mlp = mlp_term.term[0]
        layout.hidden = hidden_of(
            mlp, calls_after, others=[attention_term.term[0], cross_term.term[0]], attention=None
        )
        layout.experts = experts_of(candidates.inside, mlp)
        return layout
    return None


def _three_additions(
    candidates: Candidates, factors: Sequence[float], is_normed: bool
) -> Iterator[tuple[tuple[Addition, Addition, Addition], list[Call]]]:
    """Yield three terms that lead from the stream entering a block to the stream leaving it.

    Args:
        candidates: the calls.
        factors: the possible factors of the terms.
        is_normed: whether the stream after each term is the output of a norm that reads the sum.

    Yields:
        The three terms, and the calls after the second term.
    """
    calls = candidates.whole
    leaving = candidates.block.output
    assert leaving is not None
    norms = [call for call in calls if is_normed and is_same(call.output, leaving)]
    ends: list[tuple[Call | None, Tensor | None]] = [(None, leaving)]
    if norms:
        ends = [(norm, _stream_of(norm, leaving)) for norm in norms]
    for first in _additions(candidates.block.inputs[0], calls, factors):
        stream, calls_after_one = _after(first, calls, is_normed)
        for second in _additions(stream, calls_after_one, factors):
            below, calls_after_two = _after(second, calls_after_one, is_normed)
            for norm, total in ends:
                term = (
                    None
                    if total is None
                    else summand(below, total, calls=calls_after_two, factors=factors)
                )
                if term and total is not None:
                    yield (first, second, Addition(norm, term, total)), calls_after_two


def _additions(
    stream: Tensor, calls: Sequence[Call], factors: Sequence[float]
) -> Iterator[Addition]:
    """Yield an `Addition` for each call whose input is the sum of the stream and a term.

    The term is the output of an earlier call, times one of the factors.
    """
    for reader in calls:
        total = _stream_of(reader, stream)
        if total is not None and not is_same(total, stream.to(total.dtype)):
            before = [call for call in calls if call.ended < reader.began]
            if term := summand(stream, total, calls=before, factors=factors):
                yield Addition(reader, term, total)


def _after(addition: Addition, calls: Sequence[Call], is_normed: bool) -> tuple[Tensor, list[Call]]:
    """Return the stream after an addition, and the calls after it.

    With `is_normed`, the stream is the output of the norm that reads the sum. Otherwise, it is the
    sum.
    """
    reader = addition.reader
    assert reader is not None
    if is_normed and reader.output is not None:
        return reader.output, [call for call in calls if call.began > reader.ended]
    return addition.total, [call for call in calls if call.began >= reader.began]


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
        layout.attn_out = _output_of(attn_term)
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
        layout.mlp_out = _output_of(mlp_term)
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


def _output_of(term: Call) -> Summand:
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

    The result is None if no module does this.
    """
    if attn is None:
        return None
    stream: Tensor = candidates.block.inputs[0]
    for call in candidates.whole:
        is_between = attn.ended < call.began and call.ended < mlp.began
        if is_between and _reads(call, stream.shape) and not is_same(call.inputs[0], stream):
            return call.module
    return None
