"""Checks of the points of an attached model, by runs on a few tokens. A point that breaks its promise is taken out again.

1. Attention by code of its own: pattern, scores and z are what their names say, also after edits (`Checks.traced`).
2. Streams: an edit of `resid_mid` reaches what comes after (`Checks.streams`).
3. Mixers other than attention: positions mix, or it is an MLP (`Checks.mixers`).
4. Experts: their parts add up, and edits of the router act (`Checks.experts`).
5. Attention through the library: with everything listened at, the logits are the model's (`Checks.attention`).
6. Each usual point that is not there gets a reason (`reasons_of_missing_points`).
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner
from hooks.base import (
    HALF,
    agree,
    carried,
    is_close,
    is_same,
    mapped,
    tensors_in,
    without_gradients,
)
from hooks.shared import Session
from models.attached.attention import AttentionPoints, TracedPoints
from models.attached.experts import Experts
from models.attached.layout import BlockLayout
from models.attached.original import AttachError, logits_of
from models.attached.points import MLP_OUT, TOP, Wiring
from models.attached.probe import arguments_of
from models.attached.stacks import Stack
from models.mode import mode


def rolled(value: Tensor, point: object) -> Tensor:
    """An edit by which all numbers along the last axis move on by one."""
    return value.roll(1, -1)


@dataclass(eq=False)
class Checks:
    """Checks of one stack.

    Attributes:
        model: the model, with its points.
        wiring: takes points out.
        stack: the stack, which gets what was left out, and why.
    """

    model: Any
    wiring: Wiring
    stack: Stack

    def __call__(self) -> None:
        """Make all checks of its blocks.

        Raises:
            ValueError: if hooks change the logits, which are `reference` without points.
        """
        layouts = self.stack.layouts
        self.traced()
        self.streams(layouts)
        self.mixers(layouts)
        self.experts(layouts)
        self.attention(self.stack.probe.reference)

    def traced(self) -> None:
        """Leaves out the points of attention by code of its own where they would not hold what they promise."""
        traced = [
            (n, name, points)
            for n, block in enumerate(self._blocks)
            for name, points in block.named_children()
            if isinstance(points, TracedPoints)
        ]
        if not traced:
            return
        calls = self._calls([points.module for _, _, points in traced])
        for n, name, points in traced:
            try:
                with torch.inference_mode(False):
                    problem = problem_of(points.module, *calls[points.module])
            except Exception as error:  # whatever another layout of its tensors leads to
                problem = str(error)
            if problem:
                self.wiring.drop_attention(self._blocks[n], name)
                self.left_out[name] = f"{type(points.module).__name__}: {problem}"

    def _calls(self, modules: Sequence[nn.Module]) -> dict[nn.Module, tuple[Any, Any]]:
        """The arguments of modules in a run of a few tokens."""
        run = partial(self.stack.probe.example.logits, self.model)
        with torch.inference_mode(False):
            return arguments_of(modules, run)

    @property
    def _blocks(self) -> Any:
        return self.wiring.owner.blocks

    @property
    def left_out(self) -> dict[str, str]:
        """What was taken out, and why."""
        return self.stack.left_out

    def _point(self, n: int, name: str) -> str:
        return f"{self.stack.prefix}blocks.{n}.{name}"

    def streams(self, layouts: Sequence[BlockLayout]) -> None:
        """Leaves out `resid_mid` where the stream goes on from a copy, which an edit does not reach."""
        shared = [n for n, layout in enumerate(layouts) if layout.mid_in is not None]
        if not shared:
            return
        parts = ("resid_mid", "mlp_out", "resid_post")
        if layouts[shared[0]].cross is not None:
            parts = ("resid_mid", "cross_out", "resid_mid_cross")
        hooks = {self._point(n, "resid_mid"): rolled for n in shared}
        names = [self._point(n, part) for n in shared for part in parts]
        _, cache = self._run(names, hooks)
        for n in shared:
            mid, added, post = (cache[self._point(n, part)] for part in parts)
            if not is_close(mid + added, post, mid, added):
                self.wiring.drop(self._blocks[n], "resid_mid")
                self.left_out["resid_mid"] = "the stream goes on from a copy of it"

    def mixers(self, layouts: Sequence[BlockLayout]) -> None:
        """Renames `mixer_out` where a position gets nothing from another: that is an MLP in a block of its own."""
        unknown = [n for n, layout in enumerate(layouts) if layout.mixer_out is not None]
        for find_mixing in (self._mixing_by_slopes, self._mixing_by_values):
            if unknown:
                mixing = find_mixing(unknown)
                unknown = [n for n in unknown if n not in mixing]
        for n in unknown:
            block, layout = self._blocks[n], layouts[n]
            block.mlp_out, layout.mlp_out = block.mixer_out, layout.mixer_out
            block.mlp_out.meaning, layout.mixer_out = MLP_OUT, None
            del block.mixer_out

    def _mixing_by_slopes(self, blocks: Sequence[int]) -> set[int]:
        """The blocks whose mixers show a derivative of later positions by the first.

        Without mixing, this derivative is a sum of products with 0, and rounding cannot change that. So any other number
        shows mixing, in any precision.
        """
        entering, leaving = dict[int, Tensor](), dict[int, Tensor]()

        def begin(n: int, stream: Tensor) -> Tensor:
            entering[n] = stream.detach().requires_grad_()
            return entering[n].clone()

        example = self.stack.probe.example
        with contextlib.suppress(Exception), Session() as session:  # code without derivatives
            for n in blocks:
                session.after(self._blocks[n].resid_pre, partial(begin, n))
                session.after(self._blocks[n].mixer_out, partial(leaving.__setitem__, n))
            with mode(self.model, training=False), torch.inference_mode(False), torch.enable_grad():
                example.run(self.model)
        return {n for n in leaving if _reaches(entering[n], leaving[n])}

    def _mixing_by_values(self, blocks: Sequence[int]) -> set[int]:
        """The blocks whose mixers change later positions by more than rounding if the first one changes.

        Rounding alone changes some of them: an expert multiplies all its positions at once, and the first one may go to
        another expert.
        """

        streams = {n: self._point(n, "resid_pre") for n in blocks}
        added = {n: self._point(n, "mixer_out") for n in blocks}
        _, before = self._run([*streams.values(), *added.values()])

        def first_changed(stream: Tensor, value: Tensor, point: object) -> Tensor:
            return torch.cat([stream[:, :1].roll(1, -1), stream[:, 1:]], 1)

        # Each block reads its stream of the first run, so that blocks do not change one another.
        hooks = {name: partial(first_changed, before[name]) for name in streams.values()}
        _, after = self._run([*added.values()], hooks)
        return {
            n for n, name in added.items() if not agree(after[name][:, 1:], before[name][:, 1:])
        }

    def experts(self, layouts: Sequence[BlockLayout]) -> None:
        """Leaves out points of experts whose values do not add up, or whose edits do not act."""
        mixtures = {n: layout.experts for n, layout in enumerate(layouts) if layout.experts}
        wrong = unequal(mixtures, self._run, self._calls), inert(mixtures, self._run)
        for n, name, why in itertools.chain(*wrong):
            self.wiring.drop(self._blocks[n].mlp, name)
            self.left_out[f"mlp.{name}"] = why

    def attention(self, reference: Tensor) -> None:
        """Leaves out `scores` and `pattern` where attention has terms that `AttentionPoints` lacks.

        Raises:
            ValueError: if the logits differ without these points too.
        """
        attention = [p for p in self._blocks.modules() if isinstance(p, AttentionPoints)]
        attention = [points for points in attention if hasattr(points, "scores")]
        calls = self._calls([points.module for points in attention])
        has_others = {points: _has_other_terms(points, calls) for points in attention}
        wrong = [points for points in attention if has_others[points]]
        is_decided = reference.dtype in HALF and None not in has_others.values()
        if not (is_decided or wrong or agree(self._run()[0], reference, 1e-3)):
            wrong = attention
        for points in wrong:
            self.wiring.drop(points, "scores")
            self.wiring.drop(points, "pattern")
            self.left_out["scores"] = self.left_out["pattern"] = "attention has terms of its own"
        top = {part for name, part in self.wiring.owner.named_children() if name in TOP}
        of_top = {module for part in top for module in part.modules()}
        known = HookedRunner(self.model).points
        others = [name for name, point in known.items() if point.module in of_top]
        others = [name for name in others if not name.endswith(("scores", "pattern"))]
        if not agree(self._run(others)[0], reference, 1e-3):
            raise AttachError(
                f"hooks must not change the logits; got others from {type(self.model).__name__}"
            )

    @without_gradients
    def _run(
        self, names: Sequence[str] | None = None, hooks: Any = ()
    ) -> tuple[Tensor, ActivationCache]:
        """The logits of a cached run of a few tokens, under hooks."""
        runner = HookedRunner(self.model)
        with mode(self.model, training=False), runner.hooks(hooks):
            example = self.stack.probe.example
            output, cache = runner.run_with_cache(*example.args, **example.kwargs, names=names)
        return logits_of(output), cache


def _reaches(entering: Tensor, leaving: Tensor) -> bool:
    """Whether the first position of a stream has a derivative in later positions of what was made of it."""
    later = leaving[:, 1:]
    # Different weights, because a norm makes sums without derivatives.
    weights = torch.linspace(1, 2, later.numel(), dtype=later.dtype, device=later.device)
    try:
        (slopes,) = torch.autograd.grad((later * weights.view(later.shape)).sum(), entering)
    except Exception:  # code without derivatives
        return False
    return bool(slopes[:, 0].any())


def _has_other_terms(points: AttentionPoints, calls: Any) -> bool | None:
    """See `has_other_terms`; None for a module that cannot be copied, or did not run."""
    try:
        return has_other_terms(points.module, *calls[points.module])
    except Exception:  # weights of a kind that is no number, for instance
        return None


Run = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
Broken = Iterator[tuple[int, str, str]]
"""Points that do not hold what they promise, each with its block and the reason."""


def unequal(mixtures: Mapping[int, Experts], run: Run, calls: Callable[..., Any]) -> Broken:
    """The points `experts` whose values, each times its weight, are not what the experts give together.

    Args:
        mixtures: the experts, by block.
        run: the logits and a cache of a run on a few tokens, given names and hooks.
        calls: the arguments of modules in such a run.
    """
    modules: dict[int, nn.Module] = {
        n: module
        for n, each in mixtures.items()
        if (module := each.module) is not None and each.has_outputs and not each.reads_copies
    }
    if not modules:
        return
    parts = ("routing", "chosen", "experts")
    try:
        _, cache = run([f"blocks.{n}.mlp.{part}" for n in modules for part in parts])
    except Exception as error:  # code that takes no row with one expert alone (LongCat)
        why = f"they do not run one by one: {error}"
        yield from ((n, "experts", why) for n in modules)
        return
    arguments = calls([*modules.values()])
    for n, module in modules.items():
        routing, chosen, outputs = (cache[f"blocks.{n}.mlp.{part}"] for part in parts)
        total = (routing.gather(-1, chosen)[..., None] * outputs).sum(2)
        with torch.no_grad():
            output = module(*arguments[module][0])
        if not agree(total.view_as(output), output * mixtures[n].factor, 1e-4):
            yield n, "experts", "what each gives, times its weight, is not what they give together"


def inert(mixtures: Mapping[int, Experts], run: Run) -> Broken:
    """The points `router` whose edits change nothing, found by runs of one router of each kind; see `unequal`.

    If an edit reaches nothing, both runs do the same arithmetic and give the same bits. So rounding cannot make it look as
    if it acted. The weights of the experts show that it acts even if all experts compute the same.
    """
    acts: dict[type[nn.Module], bool] = {}
    for n, each in mixtures.items():
        if each.router is None:
            continue
        if (kind := type(each.router)) not in acts:
            has_weights = each.module is not None and not each.reads_copies
            name = f"blocks.{n}.mlp.routing" if has_weights else f"blocks.{n}.resid_post"
            hook = {f"blocks.{n}.mlp.router": _reordered}
            before, after = (run([name], hooks)[1][name] for hooks in ({}, hook))
            acts[kind] = not is_same(before, after)
        if not acts[kind]:
            yield n, "router", "an edit of the logits does not reach what is chosen"


def _reordered(logits: Tensor, point: object) -> Tensor:
    """An edit after which other logits are the largest, also where all were equal."""
    steps = torch.arange(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return logits.roll(1, -1) + steps


POINTS = ("q", "k", "v", "scores", "pattern", "z")


def in_float32(module: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, Any, Any]:
    """A copy of a module in half precision, with its arguments, in float32; themselves where they are precise.

    In half precision rounding may hide a term of attention, or look like one.
    """
    held = [*module.parameters(), *tensors_in((args, kwargs))]
    if not any(tensor.dtype in HALF for tensor in held):
        return module, args, kwargs

    def widened(leaf: Any) -> Any:
        is_half = isinstance(leaf, Tensor) and leaf.dtype in HALF
        return leaf.float() if is_half else leaf

    return copy.deepcopy(module).float(), mapped(args, widened), mapped(kwargs, widened)


@without_gradients
def has_other_terms(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether attention gives something else where its scores and its pattern are listened to."""
    module, args, kwargs = in_float32(module, args, kwargs)
    points: Any = carried(module, "hook_points")
    output = next(tensors_in(module(*args, **kwargs)))
    with Session() as session:
        session.after(points.pattern, lambda pattern: None)
        explicit = next(tensors_in(module(*args, **kwargs)))
    return not agree(explicit, output, 1e-4)


@without_gradients
def problem_of(module: nn.Module, args: Any, kwargs: Any) -> str | None:
    """The first promise that the points of attention by code of its own break; None if there is none.

    Args:
        module: the attention module, with `TracedPoints`.
        args, kwargs: its arguments in some run.
    """
    traced: Any = carried(module, "hook_points")
    module, args, kwargs = in_float32(module, args, kwargs)
    values, read = _values_of(module, args, kwargs, edits=False)
    traced.scale = carried(module, "hook_points").scale
    edited, _ = _values_of(module, args, kwargs, edits=True)
    return _broken(values, read) or _broken(edited)


def _values_of(
    module: nn.Module, args: Any, kwargs: Any, edits: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The values at the points of one run, and what modules read, or may read, of it. Edits turn what can be edited."""
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
    """The first promise that values break. One of the tensors that are `read` must be z."""
    eps = torch.finfo(values["z"].dtype).eps
    q, k, v, scores, pattern, z = (values[name].float().cpu() for name in POINTS)
    k, v = (part.repeat_interleave(q.shape[2] // part.shape[2], 2) for part in (k, v))
    products = torch.einsum("bqhd,bkhd->bhqk", q, k)
    scale = (products * scores).sum() / products.square().sum()
    equal = partial(agree, tolerance=max(1e-4, 16 * eps))
    sums, joined = pattern.sum(-1), z.flatten(2)
    flat = [part.reshape(joined.shape) for part in read or () if part.numel() == joined.numel()]
    checks = {
        "scores are no multiple of q·k": equal(products * scale, scores),
        "rows of pattern do not sum to 1": equal(sums, torch.ones_like(sums)),
        "z is not pattern·v": equal(torch.einsum("bhqk,bkhd->bqhd", pattern, v), z),
        "no map reads z": read is None or any(equal(part.float().cpu(), joined) for part in flat),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)


USUAL = (
    *("resid_pre", "ln1.scale", "ln1.normalized", "attn.q", "attn.k", "attn.v", "attn.scores", "attn.pattern", "attn.z"),
    *("attn_out", "resid_mid", "ln2.scale", "ln2.normalized", "mlp.pre", "mlp.post", "mlp_out", "resid_post"),
)  # fmt: skip
"""The points of a usual block, by the last parts of their names."""

ADDED = ("attn_out", "mixer_out", "mlp_out")
SUMMED = ("attn_out", "resid_mid", "ln2.scale", "ln2.normalized", "mlp.pre", "mlp.post", "mlp_out")
"""Those that say what is added to the stream, and those that are found by such sums."""


def reasons_of_missing_points(
    model: Any, layouts: Sequence[BlockLayout], known: Mapping[str, str], prefix: str = ""
) -> dict[str, str]:
    """The usual points that some block, or the model's end, is without, and why, beside those whose reason is known."""
    points, reasons = HookedRunner(model).points, dict[str, str]()
    for name in USUAL:
        without = [n for n in range(len(layouts)) if f"{prefix}blocks.{n}.{name}" not in points]
        if without and not {name, *name.split(".")} & {*known}:
            others = all(f"{prefix}blocks.{n}.mixer_out" in points for n in without)
            scaled = all(layouts[n].reads_first for n in without)
            some = f"block {', '.join(map(str, without))}"
            if name.startswith("attn") and others:
                why = f"{some} has another mixer of positions, mixer_out"
            elif name in SUMMED and not any(
                f"{prefix}blocks.{n}.{part}" in points for n in without for part in ADDED
            ):
                why = "the stream that leaves the block is no sum of what entered and modules' outputs"
            elif name in ("mlp_out", "resid_mid") and scaled:
                why = "what is added after attention is scaled, or a sum of several"
            else:
                where = "any block" if len(without) == len(layouts) else some
                why = f"no module of {where} takes it in or gives it out"
            reasons[name] = why
    attentions = [layout.attention for layout in layouts if layout.attention is not None]
    inside = (name.split(".") for attention in attentions for name, _ in attention.named_modules())
    if any("router" in parts for parts in inside):
        reasons["attn.router"] = "attention chooses among experts by a router of its own"
    if f"{prefix}ln_final.normalized" not in points:
        reasons["ln_final"] = "no norm of one module comes after the last block"
    return reasons
