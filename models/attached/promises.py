"""Checks of the points of an attached model, by runs on a few tokens: what does not hold its promise is taken out again.

1. Attention by code of its own: pattern, scores and z are what their names say, also after edits (`Checks.traced`).
2. Streams: an edit of `resid_mid` reaches what comes after (`Checks.streams`).
3. Mixers other than attention: positions mix, or it is an MLP (`Checks.mixers`).
4. Experts: their parts add up, and edits of the router act (`Checks.experts`).
5. Attention through the library: with everything listened at, the logits are the model's (`Checks.attention`).
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner
from hooks.base import without_gradients
from hooks.shared import Session
from models.attached.attention import AttentionPoints
from models.attached.checked import has_other_terms, problem_of
from models.attached.example import logits_of
from models.attached.experts import inert, unequal
from models.attached.layout import BlockLayout
from models.attached.points import MLP_OUT, TOP, Wiring
from models.attached.probe import arguments_of
from models.attached.stacks import Stack
from models.attached.sums import HALF, agree, is_close, rolled
from models.attached.traced import TracedPoints
from models.attached.unreadable import AttachError
from models.mode import mode


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
