"""Checks of the points of an attached model. A point that fails its check is removed.

Each check is a run on a few tokens:

1. Attention in a module's own code: pattern, scores and z have the values that their names promise,
   also after edits (`_check_own_attention`).
2. Streams: an edit of `resid_mid` changes the later stream (`_check_streams`).
3. Mixers: a sublayer with the point `mixer_out`, such as a state space or a convolution, moves
   information between positions. If it does not, it is an MLP, and its point is renamed `mlp_out`
   (`_check_mixers`).
4. Experts: their outputs add up, and edits of the router have an effect (`_check_experts`).
5. Attention through the library: with a hook on every point, the logits are the model's
   (`_check_attention`).
6. Each usual point that is missing gets a reason (`_reasons_of_missing_points`).
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner
from hooks.base import (
    HALF,
    agree,
    carried,
    code_rounding,
    is_close,
    is_same,
    run_rounding,
    tensors_in,
    widened,
    widened_module,
    without_gradients,
)
from hooks.shared import Session
from models.attached.attention import AttentionPoints, TracedPoints
from models.attached.experts import Experts
from models.attached.original import AttachError, logits_of, reading_part
from models.attached.points import MLP_OUT, TOP, Wiring
from models.attached.probe import arguments_of
from models.mode import mode


def check_points(wiring: Wiring) -> dict[str, str]:
    """Check the points of one stack, and remove the points that fail.

    Args:
        wiring: the points of the stack, with their hooks.

    Returns:
        The reason for each usual point that is missing from the stack, or from some block of it, by
        the name of the point.

    Raises:
        AttachError: if hooks change the logits.
    """
    stack = wiring.stack
    with reading_part(wiring.model, stack.path):
        _check_own_attention(wiring)
        _check_streams(wiring)
        _check_mixers(wiring)
        _check_experts(wiring)
        _check_attention(wiring)
    reasons = stack.left_out | _reasons_of_missing_points(wiring)
    return {stack.prefix + name: why for name, why in reasons.items()}


def _check_own_attention(wiring: Wiring) -> None:
    """Check the points of modules that compute attention in their own code.

    These modules do not call an attention function of `transformers`. If values of their points are
    wrong, the points are removed.
    """
    traced = list[tuple[Any, str, TracedPoints]]()
    for block in wiring.blocks:
        for name, points in block.named_children():
            if isinstance(points, TracedPoints):
                traced.append((block, name, points))
    if not traced:
        return
    arguments = _arguments_of(wiring, [points.module for _, _, points in traced])
    for block, name, points in traced:
        try:
            with torch.inference_mode(False):
                problem = _problem_of(points.module, *arguments[points.module])
        # If tensors have another layout than the points expect, any error may be raised.
        except Exception as error:
            problem = str(error)
        if problem:
            wiring.drop_attention(block, name)
            wiring.stack.left_out[name] = f"{type(points.module).__name__}: {problem}"


def _check_streams(wiring: Wiring) -> None:
    """Remove `resid_mid` if an edit of it does not change the later stream.

    This happens if the block computes the later stream from a copy of the tensor that the point
    sees.
    """
    layouts = wiring.stack.layouts
    shared = [n for n, layout in enumerate(layouts) if layout.mid_in is not None]
    if not shared:
        return
    if wiring.stack.stream_axis is not None:
        _check_several_streams(wiring, shared)
        return
    parts = ("resid_mid", "mlp_out", "resid_post")
    if layouts[shared[0]].cross is not None:
        parts = ("resid_mid", "cross_out", "resid_mid_cross")
    hooks = {wiring.name_of(n, "resid_mid"): _rolled for n in shared}
    names = list[str]()
    for n in shared:
        names += [wiring.name_of(n, part) for part in parts]
    _, cache = _run(wiring, names, hooks)
    for n in shared:
        mid, added, post = (cache[wiring.name_of(n, part)] for part in parts)
        if not is_close(mid + added, post, mid, added):
            wiring.drop(wiring.blocks[n], "resid_mid")
            wiring.stack.left_out["resid_mid"] = "the later stream is computed from a copy of it"


def _check_several_streams(wiring: Wiring, blocks: Sequence[int]) -> None:
    """Remove `resid_mid` of blocks with several vectors for each token if an edit has no effect.

    The later stream is not a sum. But if the stream and the output of the MLP are 0, it must be 0.
    """
    hooks = dict[str, Any]()
    names = list[str]()
    for n in blocks:
        hooks |= dict.fromkeys((wiring.name_of(n, p) for p in ("resid_mid", "mlp_out")), _zeros)
        names.append(wiring.name_of(n, "resid_post"))
    _, cache = _run(wiring, names, hooks)
    for n, name in zip(blocks, names, strict=True):
        # All terms are products with 0, which rounding cannot change.
        if cache[name].any():
            wiring.drop(wiring.blocks[n], "resid_mid")
            wiring.stack.left_out["resid_mid"] = "the later stream is computed from a copy of it"


def _zeros(value: Tensor, point: object) -> Tensor:
    """Return zeros."""
    return torch.zeros_like(value)


def _rolled(value: Tensor, point: object) -> Tensor:
    """Shift all numbers along the last axis by one. So the edited values have the same norm."""
    return value.roll(1, -1)


def _check_mixers(wiring: Wiring) -> None:
    """Rename `mixer_out` to `mlp_out` in blocks whose sublayer does not mix positions.

    Such a sublayer is an MLP. Some models have a block of its own for each MLP (Nemotron-H).
    """
    layouts = wiring.stack.layouts
    unknown = [n for n, layout in enumerate(layouts) if layout.mixer_out is not None]
    for find_mixing in (_mixing_by_slopes, _mixing_by_values):
        if unknown:
            mixing = find_mixing(wiring, unknown)
            unknown = [n for n in unknown if n not in mixing]
    for n in unknown:
        block = wiring.blocks[n]
        layout = layouts[n]
        block.mlp_out = block.mixer_out
        layout.mlp_out = layout.mixer_out
        block.mlp_out.meaning = MLP_OUT
        layout.mixer_out = None
        del block.mixer_out


def _mixing_by_slopes(wiring: Wiring, blocks: Sequence[int]) -> set[int]:
    """Return the blocks whose mixers mix positions, found by derivatives.

    A mixer mixes positions if its outputs at later positions have a derivative, other than 0, by
    its input at the first position. Without mixing, this derivative is a sum of products with 0,
    which rounding cannot change. So any other number shows mixing, in any precision.
    """
    entering = dict[int, Tensor]()
    leaving = dict[int, Tensor]()

    def begin(n: int, stream: Tensor) -> Tensor:
        entering[n] = stream.detach().requires_grad_()
        return entering[n].clone()

    model = wiring.model
    example = wiring.stack.probe.example
    # Some models do not run with gradients. Then no mixing is found here.
    with contextlib.suppress(Exception), Session() as session:
        for n in blocks:
            session.after(wiring.blocks[n].resid_pre, partial(begin, n))
            session.after(wiring.blocks[n].mixer_out, partial(leaving.__setitem__, n))
        with mode(model, training=False), torch.inference_mode(False), torch.enable_grad():
            example.run(model)
    return {n for n in leaving if _reaches(entering[n], leaving[n])}


def _reaches(entering: Tensor, leaving: Tensor) -> bool:
    """Return whether later positions of `leaving` depend on the first position of `entering`.

    The result is True if the derivative of these positions by the first position is not 0.
    """
    later = leaving[:, 1:]
    # Each element has its own weight, because the plain sum of a norm's outputs is constant, so its
    # derivative is 0.
    weights = torch.linspace(1, 2, later.numel(), dtype=later.dtype, device=later.device)
    try:
        (slopes,) = torch.autograd.grad((later * weights.view(later.shape)).sum(), entering)
    except Exception:
        # There is no derivative, for example because the mixer detaches its output.
        return False
    return bool(slopes[:, 0].any())


def _mixing_by_values(wiring: Wiring, blocks: Sequence[int]) -> set[int]:
    """Return the blocks whose mixers mix positions, found by an edit of the first position.

    A mixer mixes positions if its outputs at later positions change. The comparison has a
    tolerance, because rounding may change them too: an expert multiplies all its positions at once,
    and the edited position may go to another expert.
    """
    streams = {n: wiring.name_of(n, "resid_pre") for n in blocks}
    added = {n: wiring.name_of(n, "mixer_out") for n in blocks}
    _, before = _run(wiring, [*streams.values(), *added.values()])

    def first_changed(stream: Tensor, value: Tensor, point: object) -> Tensor:
        return torch.cat([stream[:, :1].roll(1, -1), stream[:, 1:]], 1)

    # Each block reads its stream from the first run, so that an edit in one block does not change
    # the next.
    hooks = {name: partial(first_changed, before[name]) for name in streams.values()}
    _, after = _run(wiring, [*added.values()], hooks)
    return {n for n, name in added.items() if not agree(after[name][:, 1:], before[name][:, 1:])}


Broken = Iterator[tuple[int, str, str]]
"""Points of experts that fail a check, each with its block and the reason."""


def _check_experts(wiring: Wiring) -> None:
    """Remove points of experts if their values do not add up, or their edits have no effect."""
    layouts = wiring.stack.layouts
    mixtures = {n: layout.experts for n, layout in enumerate(layouts) if layout.experts}
    broken = _unequal_experts(wiring, mixtures), _inert_routers(wiring, mixtures)
    for n, name, why in itertools.chain(*broken):
        wiring.drop(wiring.blocks[n].mlp, name)
        wiring.stack.left_out[f"mlp.{name}"] = why


def _unequal_experts(wiring: Wiring, mixtures: Mapping[int, Experts]) -> Broken:
    """Yield the points `experts` whose weighted values do not add up to the experts' output.

    Args:
        wiring: the points.
        mixtures: the experts, by block.
    """
    modules: dict[int, nn.Module] = {
        n: experts.module
        for n, experts in mixtures.items()
        if experts.module is not None and experts.has_outputs and not experts.reads_copies
    }
    if not modules:
        return
    parts = ("routing", "chosen", "experts")
    names = [f"blocks.{n}.mlp.{part}" for n, part in itertools.product(modules, parts)]
    try:
        _, cache = _run(wiring, names)
    # The hook of `experts` runs each expert alone. Some models do not accept a call with one expert
    # for each vector (LongCat).
    except Exception as error:
        why = f"the experts do not run one by one: {error}"
        yield from ((n, "experts", why) for n in modules)
        return
    arguments = _arguments_of(wiring, [*modules.values()])
    for n, module in modules.items():
        routing, chosen, outputs = (cache[f"blocks.{n}.mlp.{part}"] for part in parts)
        total = (routing.gather(-1, chosen)[..., None] * outputs).sum(2)
        with torch.no_grad():
            output = module(*arguments[module][0])
        rounding = code_rounding(output.dtype)
        if not agree(total.view_as(output), output * mixtures[n].factor, rounding):
            yield n, "experts", "the weighted sum of the experts' outputs is not their joint output"


def _inert_routers(wiring: Wiring, mixtures: Mapping[int, Experts]) -> Broken:
    """Yield the points `router` whose edits change nothing.

    One router of each class is tested with two runs. If an edit has no effect, both runs do the
    same arithmetic and give the same bits, so rounding cannot look like an effect. The weights of
    the experts in the two runs are compared, because they change even if all experts compute the
    same function. Without a point for the weights, the streams after the block are compared.
    """
    acts: dict[type[nn.Module], bool] = {}
    for n, experts in mixtures.items():
        if experts.router is None:
            continue
        if (kind := type(experts.router)) not in acts:
            has_weights = experts.module is not None and not experts.reads_copies
            name = f"blocks.{n}.mlp.routing" if has_weights else f"blocks.{n}.resid_post"
            hook = {f"blocks.{n}.mlp.router": _reordered}
            before, after = (_run(wiring, [name], hooks)[1][name] for hooks in ({}, hook))
            acts[kind] = not is_same(before, after)
        if not acts[kind]:
            yield n, "router", "an edit of the logits does not change which experts are selected"


def _reordered(logits: Tensor, point: object) -> Tensor:
    """Change which logits are the largest, by a shift and a ramp.

    The ramp has an effect even if all logits are equal.
    """
    steps = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return logits.roll(1, -1) + steps


def _check_attention(wiring: Wiring) -> None:
    """Remove the points `scores` and `pattern` if attention adds unknown numbers to its scores.

    `AttentionPoints` computes the scores and the pattern a second time. It does not know these
    numbers, so its scores and pattern would be wrong.

    Raises:
        AttachError: if the logits are still different after the points were removed.
    """
    stack = wiring.stack
    reference = wiring.stack.probe.reference
    attention = [
        module
        for module in wiring.blocks.modules()
        if isinstance(module, AttentionPoints) and hasattr(module, "scores")
    ]
    arguments = _arguments_of(wiring, [points.module for points in attention])
    has_others = {points: _adds_terms(points, arguments) for points in attention}
    wrong = [points for points in attention if has_others[points]]
    is_decided = reference.dtype in HALF and None not in has_others.values()
    rounding = run_rounding(reference.dtype)
    if not (is_decided or wrong or agree(_run(wiring)[0], reference, rounding)):
        wrong = attention
    for points in wrong:
        wiring.drop(points, "scores")
        wiring.drop(points, "pattern")
        stack.left_out["scores"] = stack.left_out["pattern"] = (
            "attention adds terms that are not supported"
        )
    if not agree(_run(wiring, _names_without_scores(wiring))[0], reference, rounding):
        kind = type(wiring.model).__name__
        raise AttachError(f"hooks must not change the logits; the logits of {kind} changed")


def _names_without_scores(wiring: Wiring) -> list[str]:
    """Return the names of a stack's points, without `scores` and `pattern`."""
    of_stack = set[nn.Module]()
    for name, part in wiring.owner.named_children():
        if name in TOP:
            of_stack |= {*part.modules()}
    points = HookedRunner(wiring.model).points
    return [
        name
        for name, point in points.items()
        if point.module in of_stack and not name.endswith(("scores", "pattern"))
    ]


def _adds_terms(points: AttentionPoints, arguments: Any) -> bool | None:
    """Return the result of `_has_other_terms` for an attention module.

    The result is None if the module did not run, or cannot be copied.
    """
    try:
        return _has_other_terms(points.module, *arguments[points.module])
    # Copying may fail in any way, for example because the weights have a quantized dtype.
    except Exception:
        return None


def _arguments_of(wiring: Wiring, modules: Sequence[nn.Module]) -> dict[nn.Module, tuple[Any, Any]]:
    """Return the arguments of modules in a run of a few tokens."""
    run = partial(wiring.stack.probe.example.logits, wiring.model)
    with torch.inference_mode(False):
        return arguments_of(modules, run)


@without_gradients
def _run(
    wiring: Wiring, names: Sequence[str] | None = None, hooks: Any = ()
) -> tuple[Tensor, ActivationCache]:
    """Return the logits and the cache of a run of a few tokens with hooks."""
    runner = HookedRunner(wiring.model)
    with mode(wiring.model, training=False), runner.hooks(hooks):
        example = wiring.stack.probe.example
        output, cache = runner.run_with_cache(*example.args, **example.kwargs, names=names)
    return logits_of(output), cache


POINTS = ("q", "k", "v", "scores", "pattern", "z")


def _in_float32(module: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """Return a copy of a module in half precision, with its arguments, in float32.

    A module with higher precision is returned unchanged, with its arguments. In half precision,
    rounding may hide a term of attention, or look like a term.
    """
    tensors = [*module.parameters(), *tensors_in((args, kwargs))]
    if not any(tensor.dtype in HALF for tensor in tensors):
        return module, args, kwargs
    return widened_module(module), widened(args), widened(kwargs)


@without_gradients
def _has_other_terms(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Return whether the output of attention changes if its pattern has a hook."""
    module, args, kwargs = _in_float32(module, args, kwargs)
    points: Any = carried(module, "hook_points")
    output = next(tensors_in(module(*args, **kwargs)))
    with Session() as session:
        session.after(points.pattern, lambda pattern: None)
        explicit = next(tensors_in(module(*args, **kwargs)))
    return not agree(explicit, output, code_rounding(output.dtype))


@without_gradients
def _problem_of(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Return the first error in the points of attention in a module's own code.

    The result is None if there is no error.

    Args:
        module: the attention module, with `TracedPoints`.
        args, kwargs: its arguments in some run.
    """
    traced: Any = carried(module, "hook_points")
    module, args, kwargs = _in_float32(module, args, kwargs)
    values, read = _values_of(module, args, kwargs, edits=False)
    traced.scale = carried(module, "hook_points").scale
    edited, _ = _values_of(module, args, kwargs, edits=True)
    return _broken(values, read) or _broken(edited)


def _values_of(
    module: nn.Module, args: Any, kwargs: Any, edits: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the values at the points of a run of a module, and the tensors that other code reads.

    These tensors are the inputs of all modules inside the module, and its outputs.

    Args:
        module: the attention module.
        args, kwargs: its arguments.
        edits: whether hooks shift the values at all points except `scores` and `z` by one place
            along the last axis.
    """
    points: Any = carried(module, "hook_points")
    values: dict[str, Tensor] = {}
    read: list[Tensor] = []
    with Session() as session:
        for name in POINTS:
            if edits and name not in ("scores", "z"):
                session.after(getattr(points, name), lambda value: value.roll(1, -1))
            session.after(getattr(points, name), partial(values.__setitem__, name))
        for part in module.modules():
            session.before(part, lambda *arguments: read.extend(tensors_in(arguments)))
        read += tensors_in(module(*args, **kwargs))
    return values, read


def _broken(values: Mapping[str, Tensor], read: Sequence[Tensor] | None = None) -> str | None:
    """Return the first error in the values at the points of attention; None without errors.

    Args:
        values: the values at the points `q`, `k`, `v`, `scores`, `pattern` and `z`.
        read: the inputs of modules, one of which must be z. None skips this check.
    """
    # The values may have different dtypes. Float64 rounds none of them.
    q, k, v, scores, pattern, z = (values[name].cpu().double() for name in POINTS)
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
    products = torch.einsum("bqhd,bkhd->bhqk", q, k)
    scale = (products * scores).sum() / products.square().sum()
    equal = partial(agree, tolerance=code_rounding(values["z"].dtype))
    sums = pattern.sum(-1)
    joined = z.flatten(2)
    flat = [part.reshape(joined.shape) for part in read or () if part.numel() == joined.numel()]
    checks = {
        "scores are not a multiple of q·k": equal(products * scale, scores),
        "rows of pattern do not sum to 1": equal(sums, torch.ones_like(sums)),
        "z is not pattern·v": equal(torch.einsum("bhqk,bkhd->bqhd", pattern, v), z),
        "no module reads z": read is None
        or any(equal(part.cpu().double(), joined) for part in flat),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)


USUAL = (
    *("resid_pre", "ln1.scale", "ln1.normalized"),
    *("attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z", "attn_out"),
    *("resid_mid", "ln2.scale", "ln2.normalized", "mlp.pre", "mlp.post", "mlp_out", "resid_post"),
)
"""The points of a usual block, by the last parts of their names."""

ADDED = ("attn_out", "mixer_out", "mlp_out")
SUMMED = ("attn_out", "resid_mid", "ln2.scale", "ln2.normalized", "mlp.pre", "mlp.post", "mlp_out")
"""The points with terms of the stream, and the points that are found by sums of terms."""


def _reasons_of_missing_points(wiring: Wiring) -> dict[str, str]:
    """Return the reason for each usual point that is missing, by its name.

    A point that an earlier check left out already has a reason, and is not included.
    """
    stack = wiring.stack
    prefix = wiring.stack.prefix
    points = HookedRunner(wiring.model).points
    reasons = dict[str, str]()
    for name in USUAL:
        blocks = range(len(stack.layouts))
        without = [n for n in blocks if wiring.name_of(n, name) not in points]
        if without and not {name, *name.split(".")} & {*stack.left_out}:
            reasons[name] = _reason(wiring, name, without, points)
    attentions = [layout.attention for layout in stack.layouts if layout.attention is not None]
    if any(map(_has_router, attentions)):
        reasons["attn.router"] = "attention selects experts with its own router"
    if f"{prefix}ln_final.normalized" not in points:
        reasons["ln_final"] = "no single module after the last block is a norm"
    return reasons


def _has_router(module: nn.Module) -> bool:
    """Return whether a module inside this one has the name `router`."""
    return any("router" in name.split(".") for name, _ in module.named_modules())


def _reason(wiring: Wiring, name: str, without: Sequence[int], points: Mapping[str, Any]) -> str:
    """Return the reason why some blocks have no point of this name.

    Args:
        wiring: the points of the stack.
        name: the last part of the point's name.
        without: the indices of the blocks without the point.
        points: the points that the model has, by name.
    """
    layouts = wiring.stack.layouts
    has_mixers = all(wiring.name_of(n, "mixer_out") in points for n in without)
    terms = (wiring.name_of(n, term) for n, term in itertools.product(without, ADDED))
    has_terms = any(term in points for term in terms)
    named_blocks = f"block {', '.join(map(str, without))}"
    if name.startswith("attn") and has_mixers:
        return f"{named_blocks} has another mixer of positions, mixer_out"
    if name in SUMMED and not has_terms:
        return "the stream that leaves the block is not the sum of its input and outputs of modules"
    if name in ("mlp_out", "resid_mid") and all(layouts[n].reads_first for n in without):
        return "the term after attention is scaled, or is a sum of several outputs"
    where = "any block" if len(without) == len(layouts) else named_blocks
    return f"it is not the input or output of a module in {where}"
