"""The layout of a block: which of its modules compute the values that our points name, found from one run.

No architecture is named here; all is found from the tensors that modules read and gave:

1. Attention is the module in a block that calls an attention function.
2. A sublayer adds the output of a module, times a factor of the config, that makes the stream a later module reads of the one
   that entered the block (`_sublayers`). The first such sublayer after attention began is attention's, the other the MLP's;
   between them is that of attention to an encoder, if the block has some.
3. A norm is a module whose output is its input over a scale (`norm_of`); its name follows from the stream it reads.
4. The MLP's hidden layer is the output of a module without weights, which a later map reads (`hidden_of`).
5. Blocks and sublayers that a user names (`Roles`) must pass the same sums.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from hooks.base import is_same
from models.attached.experts import Experts, find
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
)
from models.attached.probe import Call, ProbeRun


class Roles(NamedTuple):
    """The names that a user gives: of the blocks in a model, and of the sublayers in a block. None where they are looked for."""

    blocks: str | None = None
    attn: str | None = None
    mlp: str | None = None


def sublayer_of(block: Call, calls: Sequence[Call], name: str) -> Call:
    """The call of the sublayer with this name.

    Raises:
        ValueError: if the block has none, or it did not run once.
    """
    for call in calls:
        if call.name == f"{block.name}.{name}":
            return call
    names = ", ".join(name for name, _ in block.module.named_children())
    raise AttachError(
        f"{name!r} must be a module of each block that runs once; {block.name} has {names}"
    )


def gives(added: Call, sublayer: Call) -> bool:
    """Whether what is added is a sublayer's output, or what a norm or dropout makes of it."""
    reads = any(is_same(x, sublayer.output) for x in added.inputs)  # the same tensor
    is_plain = norm_of(added) is not None or not [*added.module.parameters()]
    return (reads and is_plain) or is_in(sublayer, added) or is_in(added, sublayer)


def require_added(sublayer: Call, added: Call | None, block: Call) -> None:
    """Refuses a sublayer that does not give what is added to the stream.

    Raises:
        ValueError: naming the sublayer.
    """
    if added is None or not gives(added, sublayer):
        raise AttachError(
            f"{sublayer.name.removeprefix(block.name)[1:]!r} must give what is added to the stream, up to a norm, dropout or a "
            f"number of the block; in {block.name} the stream is no such sum"
        )


@dataclass
class BlockLayout:
    """The parts of one block; None or absent where structure does not show them.

    Attributes:
        block: the module.
        attention: the module that calls the attention function.
        attn_out, mlp_out: what the sublayers add.
        mixer_out: what a mixer of positions without attention adds, such as a state space or a convolution, in place of attention
            or beside it.
        cross: the module that attends to an encoder.
        traced: those of the two that compute attention by code of their own.
        cross_out: what it adds.
        mid_in, mid_out: the module whose input, or output, is the stream between them.
        cross_in, crossed: the module whose input, or output, is the stream after attention to an encoder.
        norms: by our names.
        hidden: the MLP's hidden layer.
        experts: the experts.
        reads_first: whether a norm reads the sum with the one sublayer that was found.
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
    """The parts of a block; the configs may hold factors of what it adds.

    Raises:
        ValueError: if a sublayer with a name is not what is added to the stream.
    """
    inside = [c for c in probe.single if block.began < c.began and c.ended < block.ended]
    # Modules of a list, such as experts, may see some positions only; not those that run one on another.
    lists = [m for m in block.module.modules() if isinstance(m, nn.ModuleList)]
    listed = {m for each in lists if not _is_chain(each, inside) for m in each.modules()}
    once = [call for call in inside if call.module not in listed]
    attending = [call for call in once if probe.attention[call.module] == 1]
    layout = BlockLayout(block.module)
    if probe.parts is not None:
        layout.traced = {call.module for call in attending} - {module for module, _ in probe.keys}
    if len(attending) == 1:
        layout.attention = attending[0].module
    # Attention in other functions shows in nothing else.
    named = [c for c in once if "attention" in type(c.module).__name__.lower()]
    roled = {name: sublayer_of(block, once, name) for name in roles[1:] if name}
    if roles.attn:
        attending, named = [], [roled[roles.attn]]
    factors = [1.0, *factors_of(*block.module.modules(), *configs)]
    if len(attending) == 2 and (mlp := _find_crossing(layout, block, once, factors)):
        layout.attention, layout.cross = (call.module for call in attending)
        layout.experts = find(inside, mlp)
        return layout
    sublayers = _sublayers(layout, block, once, [1.0]) or _sublayers(layout, block, once, factors)
    if len(attending) > 1 and layout.reads_first:
        return BlockLayout(block.module)  # several blocks in one, as the stages of Swin
    mixers = attending or named
    first = next((c for c, _ in sublayers if any(a.began < c.ended for a in mixers)), None)
    if roles.attn:
        first = next((c for c, _ in sublayers if gives(c, roled[roles.attn])), None)
    is_alone = len(sublayers) == 1 and not layout.reads_first
    if first is not None and is_alone and not any(is_in(a, first) for a in mixers):
        if not roled:
            return layout  # the MLP's, where attention adds zeros
        first, sublayers = None, []
    adding, mlp = None, roled.get(roles.mlp or "")
    for at, (call, added) in enumerate(sublayers):
        is_second = len(sublayers) == 2 and (first is not None or at == 1)
        if call is first:
            layout.attn_out = added
            _name(layout, "ln1_post", call)
        elif at == 2 or is_second or (mlp and gives(call, mlp)):
            layout.mlp_out, adding = added, call
            _name(layout, "ln2_post", call)
            others = [other for other, _ in sublayers if other is not call]
            layout.hidden = hidden_of(call, once, others, layout.attention)
        else:
            layout.mixer_out, adding = added, call
    if layout.reads_first and (read := layout.norms.get("ln2")):
        # What comes second is no module's output. The MLP in it is the module that reads its norm.
        output = next(call.output for call in once if call.module is read.module)
        readers = (
            c for c in once if c.inputs and c.output is not None and is_same(c.inputs[0], output)
        )
        if (mlp := next(readers, None)) is not None:
            others = [call for call, _ in sublayers]
            layout.hidden = hidden_of(mlp, once, others, layout.attention)
    layout.experts = find(inside, adding)
    mlp_added = adding if layout.mlp_out else None
    for name, shown in ((roles.attn, first), (roles.mlp, mlp_added)):
        if name:
            require_added(roled[name], shown, block)
    return layout


def _is_chain(modules: nn.ModuleList, calls: Sequence[Call]) -> bool:
    """Whether the modules of a list run one on what the last one gave."""
    ran = [call for call in calls if call.module in {*modules}]
    pairs = itertools.pairwise(ran)
    return len(ran) == len(modules) > 1 and all(
        one.output is not None
        and _stream_of(two, one.output) is not None
        and one.ended < two.began
        and any(is_same(x, one.output) for x in two.inputs)
        for one, two in pairs
    )


def _name(layout: BlockLayout, name: str, call: Call) -> None:
    if norm := norm_of(call):
        layout.norms[name] = norm


def _stream_of(call: Call, like: Tensor) -> Tensor | None:
    """The first input with the shape of the stream; of another precision, only if it is the stream itself.

    Here and below `is_same` asks whether a module reads that tensor or another; what was added to it is for `summand`.
    """
    streams = [t for t in call.inputs if t.shape == like.shape and t.is_floating_point()]
    return next((t for t in streams if t.dtype == like.dtype or is_same(t, like.to(t.dtype))), None)


def _find_crossing(
    layout: BlockLayout, block: Call, calls: Sequence[Call], factors: Sequence[float]
) -> Call | None:
    """Finds what three sublayers add, the second of them attention to an encoder. Returns the MLP, if they are there."""
    pre, post = block.inputs[0], block.output
    assert post is not None
    for is_normed in (False, True):  # norms may take the sums (BART)
        norms = [call for call in calls if is_normed and is_same(call.output, post)]
        ends: list[Any] = [(norm, _stream_of(norm, post)) for norm in norms] or [(None, post)]
        for one, first, mid in _steps(pre, calls, factors):
            stream, rest = _after(one, mid, calls, is_normed)
            for two, second, crossed in _steps(stream, rest, factors):
                below, left = _after(two, crossed, rest, is_normed)
                for norm, total in ends:
                    third = None if total is None else summand(below, total, left, factors)
                    if third is None:
                        continue
                    layout.attn_out, layout.cross_out = first[1], second[1]
                    layout.mlp_out = third[1]
                    if norm is not None:
                        layout.mid_out, layout.crossed = one.module, two.module
                        for name, call in (("ln1", one), ("ln_cross", two), ("ln2", norm)):
                            _name(layout, name, call)
                    else:
                        layout.mid_in, layout.cross_in = one.module, two.module
                        _name_readers(layout, {"ln1": pre, "ln_cross": mid, "ln2": crossed}, calls)
                    layout.hidden = hidden_of(third[0], left, [first[0], second[0]], None)
                    return third[0]
    return None


def _steps(
    stream: Tensor, calls: Sequence[Call], factors: Sequence[float]
) -> Iterator[tuple[Call, tuple[Call, Summand], Tensor]]:
    """Each call that reads the stream with something added, the call that gives that, and the sum."""
    for reader in calls:
        total = _stream_of(reader, stream)
        if total is not None and not is_same(total, stream.to(total.dtype)):
            before = [call for call in calls if call.ended < reader.began]
            if added := summand(stream, total, before, factors):
                yield reader, added, total


def _after(
    reader: Call, total: Tensor, calls: Sequence[Call], is_normed: bool
) -> tuple[Tensor, list[Call]]:
    """The stream that goes on after a step, and the calls to come."""
    if is_normed and reader.output is not None:
        return reader.output, [call for call in calls if call.began > reader.ended]
    return total, [call for call in calls if call.began >= reader.began]


def _sublayers(
    layout: BlockLayout, block: Call, calls: Sequence[Call], factors: Sequence[float]
) -> list[tuple[Call, Summand]]:
    """The terms that are added to the stream, in order. Notes the norms, and where the stream in between is read."""
    pre, post, alone = block.inputs[0], block.output, None
    assert post is not None
    for reader in calls:
        mid = _stream_of(reader, pre)
        if mid is None or is_same(mid, pre.to(mid.dtype)):
            continue
        before = [c for c in calls if c.ended < reader.began]
        after = [c for c in calls if c.began >= reader.began]
        first = summand(pre, mid, before, factors)
        # Attention and another mixer of positions may stand side by side, each with a factor.
        both = parallel(pre, mid, before, factors) if len(factors) > 1 and first is None else []
        firsts = [first] if first else both
        if firsts and (second := summand(mid, post, after, factors)):
            layout.mid_in = reader.module
            _name_readers(layout, {"ln1": pre, "ln2": mid}, calls)
            return [*firsts, second]
        if first is None:
            continue
        if second := _after_post_norm(layout, reader, post, after):
            return [first, second]
        if alone is None and norm_of(reader):
            alone = first, mid
    _name_readers(layout, {"ln1": pre, "ln2": pre}, calls)
    if only := summand(pre, post, calls, factors):
        return [only]
    if (both := parallel(pre, post, calls)) or alone is None:
        return both
    # What comes second is no module's output.
    layout.reads_first = True
    _name_readers(layout, {"ln1": pre, "ln2": alone[1]}, calls)
    return [alone[0]]


def _after_post_norm(
    layout: BlockLayout, first: Call, post: Tensor, calls: Sequence[Call]
) -> tuple[Call, Summand] | None:
    """The second summand where norms take the sum of stream and sublayer (BERT)."""
    if first.output is None or first.output.shape != post.shape:
        return None
    for last in calls:
        stream = _stream_of(last, post)
        if stream is None or last.output is None or not is_same(last.output, post):
            continue
        between = [c for c in calls if c.began > first.ended and c.ended < last.began]
        if second := summand(first.output, stream, between):
            layout.mid_out = first.module
            _name(layout, "ln1", first)
            _name(layout, "ln2", last)
            return second
    return None


def _name_readers(
    layout: BlockLayout, streams: Mapping[str, Tensor], calls: Sequence[Call]
) -> None:
    """Names the norms that read these streams."""
    for name, stream in streams.items():
        taken = {norm.module for norm in layout.norms.values()}
        for call in calls:
            reads = _stream_of(call, stream)
            if reads is None or call.module in taken or not is_same(reads, stream.to(reads.dtype)):
                continue
            if norm := norm_of(call):
                layout.norms[name] = norm
                break
