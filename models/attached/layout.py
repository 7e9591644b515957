"""The layout of a model: which of its modules compute what our points name, found from one run.

No architecture is named here; all is found from what modules read and gave:

1. The blocks are the `ModuleList` whose modules run once each, every one on what the last one gave (`block_calls`).
2. Attention is the module in a block that calls an attention function.
3. What a sublayer adds is the output, times a factor of the config, that makes the stream a later module reads of the one
   that entered the block (`_sublayers`). The first such sublayer after attention began is attention's, the other the MLP's.
4. A norm is a module whose output is its input over a scale (`norm_of`); its name follows from the stream it reads.
5. The MLP's hidden layer is what a module without weights makes new, and what a later map reads (`find_mlp`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from models.attached.experts import Experts, find
from models.attached.norms import TracedNorm, norm_of
from models.attached.probe import SHAPE, Call, ProbeRun
from models.attached.sums import Summand, factors_of, is_close, is_same, parallel, summand


@dataclass
class BlockLayout:
    """The parts of one block; None or absent where structure does not show them.

    Attributes:
        block: the module.
        attention: the module that calls the attention function.
        is_traced: whether that module computes attention by code of its own.
        attn_out, mlp_out: what the sublayers add.
        mixer_out: what a mixer of positions without attention adds, such as a state space or a convolution, in place of attention
            or beside it.
        mid_in, mid_out: the module whose input, or output, is the stream between them.
        norms: by our names.
        act, post, linear: in the MLP, the nonlinearity, the last map and what the gate is multiplied with.
        experts: the experts.
        reads_first: whether a norm reads the sum with the one sublayer that was found.
    """

    block: nn.Module
    attention: nn.Module | None = None
    is_traced: bool = False
    attn_out: Summand | None = None
    mlp_out: Summand | None = None
    mixer_out: Summand | None = None
    mid_in: nn.Module | None = None
    mid_out: nn.Module | None = None
    norms: dict[str, TracedNorm] = field(default_factory=dict)
    act: nn.Module | None = None
    post: nn.Module | None = None
    linear: nn.Module | None = None
    experts: Experts | None = None
    reads_first: bool = False


def block_calls(probe: ProbeRun, model: nn.Module) -> list[Call]:
    """The calls of the blocks: of a `ModuleList` outside all others, each on what the last one returned.

    Attention is in it, if any list has some; otherwise it is the largest that ran.

    Raises:
        ValueError: if there is no such list.
    """
    calls = {call.module: call for call in probe.calls}
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outermost = [lists[n] for n in lists if not any(n.startswith(f"{o}.") for o in lists if o != n)]

    def weight(blocks: nn.ModuleList) -> int:
        return sum(parameter.numel() for parameter in blocks.parameters())

    ran = [blocks for blocks in outermost if any(block in calls for block in blocks)]
    ran.sort(key=weight, reverse=True)
    attend = [blocks for blocks in ran if any(probe.attention[m] for m in blocks.modules())]
    problem = "has none"
    for blocks in attend or ran[:1]:
        chain = [calls[block] for block in blocks if block in calls]
        times = {sum(call.module is block for call in probe.calls) for block in blocks}
        if (found := _problem(chain, times)) is None:
            return chain
        problem = f"has some that {found}"
    raise ValueError(
        "the model must have a ModuleList of blocks that run once each, in order, on a stream [batch, pos, d_model]; "
        f"{type(model).__name__} {problem}"
    )


def _problem(chain: Sequence[Call], times: set[int]) -> str | None:
    """The reason why calls are no chain of blocks, which ran so many times; None if they are one."""
    if times != {1}:
        return f"run {' or '.join(map(str, sorted(times)))} times"
    for call in chain:
        if not call.inputs or call.output is None or call.output.ndim != 3:
            if call.output is None:
                return "give no tensor"
            several = " (several streams)" if call.output.ndim == 4 else ""
            return f"give {[*call.output.shape]}{several}"
    if any(not is_same(one.output, two.inputs[0]) for one, two in itertools.pairwise(chain)):
        return "do not read what the last one gave"
    return None


def layout_of(block: Call, probe: ProbeRun, *configs: Any) -> BlockLayout:
    """The parts of a block; the configs may hold factors of what it adds."""
    # Modules of a list, such as experts, may see some positions only.
    lists = [m for m in block.module.modules() if isinstance(m, nn.ModuleList)]
    listed = {module for blocks in lists for module in blocks.modules()}
    inside = [c for c in probe.single if block.began < c.began and c.ended < block.ended]
    once = [call for call in inside if call.module not in listed]
    attending = [call for call in once if probe.attention[call.module] == 1]
    layout = BlockLayout(block.module)
    if len(attending) == 1:
        layout.attention, layout.is_traced = attending[0].module, probe.parts is not None
    # Attention in other functions shows in nothing else.
    named = [c for c in once if "attention" in type(c.module).__name__.lower()]
    factors = [1.0, *factors_of(*block.module.modules(), *configs)]
    sublayers = _sublayers(layout, block, once, [1.0]) or _sublayers(layout, block, once, factors)
    mixers = attending or named
    first = next((c for c, _ in sublayers if any(a.began < c.ended for a in mixers)), None)
    is_alone = len(sublayers) == 1 and not layout.reads_first
    if first is not None and is_alone and not any(_is_in(a, first) for a in mixers):
        return layout  # the MLP's, where attention adds zeros
    adding = None
    for at, (call, added) in enumerate(sublayers):
        if call is first:
            layout.attn_out = added
            _name(layout, "ln1_post", call)
        elif at == 2 or (len(sublayers) == 2 and (first is not None or at == 1)):
            layout.mlp_out, adding = added, call
            _name(layout, "ln2_post", call)
            find_mlp(layout, call, once, [other for other, _ in sublayers if other is not call])
        else:
            layout.mixer_out, adding = added, call
    if layout.reads_first and (read := layout.norms.get("ln2")):
        # What comes second is no module's output. The MLP in it is the module that reads its norm.
        output = next(call.output for call in once if call.module is read.module)
        readers = (
            c for c in once if c.inputs and c.output is not None and is_same(c.inputs[0], output)
        )
        if (mlp := next(readers, None)) is not None:
            find_mlp(layout, mlp, once, [call for call, _ in sublayers])
    layout.experts = find(inside, adding)
    return layout


def _is_in(inner: Call, outer: Call) -> bool:
    return outer.began <= inner.began and inner.ended <= outer.ended


def _name(layout: BlockLayout, name: str, call: Call) -> None:
    if norm := norm_of(call):
        layout.norms[name] = norm


def _stream_of(call: Call, like: Tensor) -> Tensor | None:
    """The first input with the shape of the stream; of another precision, only if it is the stream itself."""
    streams = [t for t in call.inputs if t.shape == like.shape and t.is_floating_point()]
    return next((t for t in streams if t.dtype == like.dtype or is_same(t, like.to(t.dtype))), None)


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
            _name_readers(layout, [pre, mid], calls)
            return [*firsts, second]
        if first is None:
            continue
        if second := _after_post_norm(layout, reader, post, after):
            return [first, second]
        if alone is None and norm_of(reader):
            alone = first, mid
    _name_readers(layout, [pre, pre], calls)
    if only := summand(pre, post, calls, factors):
        return [only]
    if (both := parallel(pre, post, calls)) or alone is None:
        return both
    # What comes second is no module's output.
    layout.reads_first = True
    _name_readers(layout, [pre, alone[1]], calls)
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


def _name_readers(layout: BlockLayout, streams: Sequence[Tensor], calls: Sequence[Call]) -> None:
    """Names the norms that read these streams."""
    for name, stream in zip(("ln1", "ln2"), streams, strict=True):
        taken = {norm.module for norm in layout.norms.values()}
        for call in calls:
            reads = _stream_of(call, stream)
            if reads is None or call.module in taken or not is_same(reads, stream.to(reads.dtype)):
                continue
            if norm := norm_of(call):
                layout.norms[name] = norm
                break


def find_mlp(layout: BlockLayout, added: Call, calls: Sequence[Call], others: list[Call]) -> None:
    """Finds the nonlinearity, and what is read before and after it."""
    began = max([call.ended for call in others if call.ended < added.began], default=-1)
    attention = [c for c in calls if c.module is layout.attention]
    inside = [
        c
        for c in calls
        if began < c.began <= added.ended and not any(_is_in(c, a) for a in attention)
    ]
    for call in inside:
        if _is_nonlinearity(call):
            _find_hidden(layout, call, inside, added)


def _is_nonlinearity(call: Call) -> bool:
    """Whether the module has no weights and computes something new of the same shape, but no norm."""
    x, y = call.inputs[0] if call.inputs else None, call.output
    if x is None or y is None or x.shape != y.shape or x.shape[:2] != SHAPE:
        return False
    plain = all(weight.numel() == 1 for weight in call.module.parameters())
    return plain and not is_same(x, y) and norm_of(call) is None


def _find_hidden(layout: BlockLayout, act: Call, calls: Sequence[Call], added: Call) -> None:
    y = act.output
    assert y is not None
    for last in calls:
        hidden = last.inputs[0] if last.inputs else None
        has_weights = any(True for _ in last.module.parameters())
        if hidden is None or last.began < act.ended or not has_weights or hidden.shape != y.shape:
            continue
        # Where others add to it, as experts may, these are not all neurons.
        if not any(is_same(last.output, whole) for whole in (added.output, *added.inputs)):
            continue
        layout.act, layout.post = act.module, last.module
        for other in calls:
            u = other.output
            is_factor = u is not None and u.shape == y.shape and other is not act
            if is_factor and u is not None and is_close(y * u, hidden) and not is_same(y, hidden):
                layout.linear = other.module
        return
