"""The points of an attached model, and the hooks that pass its values through them."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookPoint, HookPoints
from hooks.base import hooks_last, is_same
from models.attached.attention import (
    AttentionPoints,
    CrossPoints,
    TracedCross,
    TracedPoints,
)
from models.attached.context import CacheGiven, number_of, past_of
from models.attached.experts import ChosenOutputs, Copies, ExpertPoints, Gated, Routing
from models.attached.layout import BlockLayout
from models.attached.original import embedding_of, text_config
from models.attached.parts import Summand, TracedNorm, factors_of, norm_of, summand
from models.attached.probe import Call, ProbeRun
from models.attached.stacks import Stack, require_position_of_each_token
from models.attached.wires import (
    BlockInput,
    Input,
    Merged,
    Output,
    PositionsWire,
    Projected,
    Scale,
    restore_methods,
)

STREAM, HIDDEN = "batch pos d_model", "batch pos d_mlp"
MLP_OUT = "what the MLP adds to the residual stream"
TOP = ("embed", "pos_embed", "blocks", "ln_final", "merged", "projected")
"""The names beside those of blocks."""


class Blocks(nn.ModuleList):
    """The points of each block of an attached model."""


class BlockPoints(HookPoints):
    """The points of a block.

    Attributes:
        layer: the number of its attention in a cache; None without attention.
    """

    layer: int | None = None

    def plain(self, argument: Any) -> Any:
        """The part that a lazy cache keeps of a cache of keys and values; see `past_of`."""
        return past_of(argument, self.layer)


class Wiring:
    """Points at the places of a layout, and the hooks on the model's modules.

    Attributes:
        model: the model.
        owner: the module that holds the points of a stack; the model for those without a prefix.
    """

    def __init__(self, model: Any, owner: Any = None) -> None:
        self.model, self.owner = model, model if owner is None else owner
        self._handles: dict[HookPoint, Any] = {}
        self._modules: list[nn.Module] = []

    def places(self) -> list[tuple[nn.Module, str, nn.Module]]:
        """Each module with a hook, with its parent and its name there. Hooks that keep outputs come after ours."""
        listening = {*self._modules}
        for module in listening:
            keep_outputs_last(module)
        return [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if child in listening
        ]

    def drop(self, parent: nn.Module, name: str) -> None:
        """Takes one point out."""
        handle = self._handles.pop(getattr(parent, name), None)
        if handle is not None:
            handle.remove()
        delattr(parent, name)

    def drop_attention(self, block: Any, name: str) -> None:
        """Takes the points of one attention of a block out."""
        points = getattr(block, name)
        restore_methods(points.module)
        for point in [point for point, _ in points.named_children()]:
            self.drop(points, point)
        vars(points.module).pop("hook_points")
        delattr(block, name)

    def _listen(self, module: nn.Module, hook: Any) -> None:
        if isinstance(hook, Input | CacheGiven | Merged):
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        elif isinstance(hook, Routing):
            handle = module.register_forward_pre_hook(hook)
        else:
            handle = module.register_forward_hook(hook, with_kwargs=isinstance(hook, Scale))
        self._handles[hook.point] = handle
        self._modules.append(module)

    def _added(self, point: HookPoint, added: Summand) -> HookPoint:
        self._listen(added.module, Output(point, added.factor, added.is_overwritten))
        return point

    def embeddings(self, stack: Stack, root: nn.Module) -> Output | None:
        """Adds `embed`, and `pos_embed` where positions have vectors, from what enters the first block.

        Args:
            stack: the stack of that block.
            root: the module whose embeddings are meant.

        Returns:
            The hook of `embed` for embeddings that `root` is given instead of tokens; None if it is not there, or acts on them.

        Raises:
            AttachError: if the stream of a text has not a position for each token.
        """
        probe, first = stack.probe, stack.chain[0]
        stream, embedding = first.inputs[0], embedding_of(root)
        before = [c for c in probe.single if c.ended < first.began and c.output is not None]
        tokens = next((call for call in before if call.module is embedding), None)
        require_position_of_each_token(self.model, stack)
        if tokens is None or tokens.output is None or tokens.output.shape != stream.shape:
            return None
        added = Summand(embedding, 1.0, tokens.is_overwritten)
        factors = [1.0, *factors_of(text_config(self.model)), stream.shape[-1] ** 0.5]
        if alone := summand(torch.zeros_like(stream), stream, [tokens], factors):
            added = alone[1]
        for call in () if alone else before:
            vectors = _for_each_text(call.output, stream)
            if vectors is not None and (explained := summand(vectors, stream, [tokens], factors)):
                added = explained[1]
                self.owner.pos_embed = HookPoint(STREAM, "additive position encodings")
                self._listen(call.module, PositionsWire(self.owner.pos_embed))
                break
        self.owner.embed = self._added(HookPoint(STREAM, "token embeddings"), added)
        # Where the embedding runs before `root`, that is always given embeddings, which have passed the point.
        began = next((call.began for call in probe.calls if call.module is root), -1)
        if tokens.began < began:
            return None
        return Output(self.owner.embed, added.factor, added.is_overwritten)

    def merged(self, module: nn.Module) -> None:
        """Adds `merged` where a module reads the embeddings with the features of towers among them."""
        self.owner.merged = HookPoint(
            STREAM, "embeddings with the features of images or sounds in their places"
        )
        self._listen(module, Merged(self.owner.merged))

    def projected(self, module: nn.Module) -> None:
        """Adds `projected` where a module gives a tower's features for the stream of the text."""
        self.owner.projected = HookPoint(STREAM, "what is put into the stream of the text")
        self._listen(module, Projected(self.owner.projected))

    def block(self, layout: BlockLayout) -> BlockPoints:
        """The points of one block."""
        points: Any = BlockPoints(layout.block)
        points.resid_pre = HookPoint(STREAM, "residual stream entering the block")
        self._listen(layout.block, BlockInput(points.resid_pre))
        self._norm(points, "ln1", layout)
        if layout.attention is not None:
            is_traced = layout.attention in layout.traced
            points.attn = (TracedPoints if is_traced else AttentionPoints)(layout.attention)
            points.layer = number_of(layout.attention)
            self._listen(layout.attention, CacheGiven(points.attn.k))
        self._norm(points, "ln1_post", layout)
        if layout.attn_out:
            meaning = "what attention adds to the residual stream"
            points.attn_out = self._added(HookPoint(STREAM, meaning), layout.attn_out)
        if layout.mixer_out:
            meaning = "what a mixer of positions other than attention adds to the residual stream"
            points.mixer_out = self._added(HookPoint(STREAM, meaning), layout.mixer_out)
        if layout.mid_in or layout.mid_out:
            points.resid_mid = HookPoint(STREAM, "residual stream between the two sublayers")
        if layout.mid_in:
            self._listen(layout.mid_in, Input(points.resid_mid, is_shared=True))
        if layout.cross is not None:
            self._cross(points, layout)
        self._norm(points, "ln2", layout)
        if layout.mid_out:
            self._listen(layout.mid_out, Output(points.resid_mid))
        if layout.hidden or layout.experts:
            points.mlp = self._mlp(layout)
        self._norm(points, "ln2_post", layout)
        if layout.mlp_out:
            points.mlp_out = self._added(HookPoint(STREAM, MLP_OUT), layout.mlp_out)
        points.resid_post = HookPoint(STREAM, "residual stream leaving the block")
        self._listen(layout.block, Output(points.resid_post))
        return points

    def _cross(self, points: Any, layout: BlockLayout) -> None:
        """Adds the points of attention to an encoder, and of the stream after it."""
        assert layout.cross is not None
        assert layout.cross_out is not None
        self._norm(points, "ln_cross", layout)
        is_traced = layout.cross in layout.traced
        points.cross = (TracedCross if is_traced else CrossPoints)(layout.cross)
        meaning = "what attention to the encoder adds to the residual stream"
        points.cross_out = self._added(HookPoint(STREAM, meaning), layout.cross_out)
        meaning = "residual stream between attention to the encoder and the MLP"
        points.resid_mid_cross = HookPoint(STREAM, meaning)
        if layout.cross_in:
            self._listen(layout.cross_in, Input(points.resid_mid_cross, is_shared=True))
        elif layout.crossed:
            self._listen(layout.crossed, Output(points.resid_mid_cross))

    def _mlp(self, layout: BlockLayout) -> nn.Module:
        if (experts := layout.experts) is not None:
            mlp: Any = ExpertPoints(experts)
            if experts.module is not None and not experts.reads_copies:
                self._listen(experts.module, Routing(mlp.routing, mlp.chosen, experts.n))
            if experts.module is not None and experts.has_outputs:
                outputs = (
                    Copies(mlp.experts, experts.n, experts.factor)
                    if experts.reads_copies
                    else ChosenOutputs(mlp.experts, experts.factor)
                )
                self._listen(experts.module, outputs)
            if experts.gate is not None and experts.shared is not None:
                self._listen(experts.shared.module, Gated(mlp.shared, experts.gate))
            elif experts.shared is not None:
                self._added(mlp.shared, experts.shared)
            return mlp
        mlp = nn.Module()
        if (hidden := layout.hidden) is not None:
            mlp.pre = HookPoint(HIDDEN, "before the nonlinearity")
            self._listen(hidden.act, Input(mlp.pre))
            if hidden.linear:
                mlp.linear = HookPoint(HIDDEN, "what the gate is multiplied with")
                self._listen(hidden.linear, Output(mlp.linear))
            mlp.post = HookPoint(HIDDEN, "what the last map of the MLP reads")
            self._listen(hidden.post, Input(mlp.post))
        return mlp

    def _norm(self, parent: nn.Module, name: str, layout: BlockLayout) -> None:
        if name in layout.norms:
            setattr(parent, name, self._around(nn.Module(), layout.norms[name]))

    def _around(self, points: nn.Module, norm: TracedNorm) -> nn.Module:
        points.scale = HookPoint("batch pos 1", "what the norm divides by")
        points.normalized = HookPoint(STREAM, "the norm's output")
        self._listen(norm.module, Scale(points.scale, norm))
        self._listen(norm.module, Output(points.normalized))
        return points

    def final_norm(self, probe: ProbeRun, last: Call, root: nn.Module) -> None:
        """Adds `ln_final` where a norm reads the stream that leaves the last block, while `root` runs."""
        end = next((c.ended for c in probe.calls if c.module is root), math.inf)
        for call in (c for c in probe.single if last.ended < c.began < end):
            # The same tensor: nothing is computed between.
            if call.inputs and is_same(call.inputs[0], last.output) and (norm := norm_of(call)):
                points = HookPoints(norm.module)
                self.owner.ln_final = self._around(points, norm)
                return


def keep_outputs_last(module: nn.Module) -> None:
    """Moves the hooks by which `transformers` collects hidden states behind all others, or they miss edits."""
    hooks_last(module, lambda hook: hook.__module__ == "transformers.utils.output_capturing")


def _for_each_text(vectors: Tensor | None, like: Tensor) -> Tensor | None:
    """Vectors of positions, a row for each text; None if they are something else."""
    if vectors is None or vectors.ndim < 2 or vectors.shape[-2:] != like.shape[-2:]:
        return None
    return vectors.view(-1, *vectors.shape[-2:]).expand_as(like)
