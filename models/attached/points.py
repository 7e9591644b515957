"""The points of an attached model, at the modules of its layouts (`place_points`).

1. The model gets its new forward. Each stack gets a `Wiring`: the points of the stack, and the
   hooks on the model's own modules.
2. `Wiring.block` creates the points of one block. For each point, a hook (a wire) is registered on
   the module whose input or output is the value. Attention and experts have their own kinds of
   points (`attention`, `experts`).
3. `Wiring.embeddings` and `Wiring.final_norm` create the points before and after the blocks.
4. Points are added where the features of towers enter the stream of the text (`_place_features`).
5. If a plan splits heads or neurons over processes, points join the parts (`_join_shards`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookedRunner, HookPoint, HookPoints, Point
from hooks.base import Shards, hooks_last, is_whole, mesh_of, tensors_in, with_first_tensor
from hooks.shared import Session, Wire, is_listened_to
from models.attached.attention import (
    AttentionPoints,
    CrossPoints,
    TracedCross,
    TracedPoints,
    further_keys,
)
from models.attached.context import CacheGiven, FurtherKeys, past_of
from models.attached.experts import (
    ChosenOutputs,
    ExpertCopies,
    ExpertPoints,
    Experts,
    GatedExpert,
    Routing,
)
from models.attached.forward import (
    Computed,
    Forward,
    Generate,
    Output,
    StackForward,
    fire,
    restore_methods,
    rows_and_positions,
    rows_first,
    texts_read,
)
from models.attached.layout import BlockLayout
from models.attached.original import (
    AttachError,
    ExampleArguments,
    base_of,
    reading_part,
)
from models.attached.parts import Summand, TracedNorm
from models.attached.probe import ProbeRun
from models.attached.stacks import OwnPart, Stack, Tower, entries_of_towers
from models.attached.unchanged import Unchanged

STREAM, HIDDEN = "batch pos d_model", "batch pos d_mlp"
STREAMS = "batch pos stream d_model"
"""The axes of a stream with several vectors for each token."""
MLP_OUT = "what the MLP adds to the residual stream"
SPLIT_AXES = frozenset(("head", "kv_head", "d_mlp"))
"""The axes that tensor-parallel plans split."""

TOP = ("embed", "pos_embed", "blocks", "ln_final", "merged", "projected")
"""The names of the modules in a model that contain points."""


def points_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `attach` adds to a model: points, and the lists that contain them."""
    added = HookPoint | HookPoints | PointsOfBlocks | Tower
    return [module for module in model.modules() if isinstance(module, added)]


class PointsOfBlocks(nn.ModuleList):
    """The points of each block of an attached model."""


class BlockPoints(HookPoints):
    """The points of a block.

    Attributes:
        layer: the index of the layer of a cache that belongs to its attention; None without
            attention.
    """

    layer: int | None = None

    def plain(self, argument: Any) -> Any:
        """Return a copy of this layer's keys and values in a cache, for a lazy cache.

        See `past_of`.

        Args:
            argument: the cache that the block got.
        """
        return past_of(argument, self.layer)


def place_points(
    model: Any, forward: Forward, stacks: Sequence[Stack], probes: Sequence[ProbeRun]
) -> list["Wiring"]:
    """Add points to a model at the modules of its layouts, with the hooks that fire them.

    Args:
        model: the model.
        forward: the new forward of the model inside an adapter's wrapper.
        stacks: the stacks.
        probes: the runs in which the stacks were found.

    Returns:
        The points of each stack, with their hooks.
    """
    base = base_of(model)
    base.forward = forward
    if hasattr(base, "generate"):
        base.generate = Generate(base)
    wirings = list[Wiring]()
    for stack in stacks:
        with reading_part(model, stack.path):
            wirings.append(_placed(model, base, forward, stack))
    if len(probes) > 1 and len(stacks) > 1:
        _place_features(model, probes[1], wirings)
    _join_shards(model, probes[0].example)
    return wirings


def _placed(model: Any, base: nn.Module, forward: Forward, stack: Stack) -> "Wiring":
    """Return the points of one stack."""
    root: Any = stack.root(base) if stack.name else model
    is_half = stack.name in ("encoder", "decoder")
    if is_half:
        forward.reads_texts = False
        setattr(model, f"get_{stack.name}", OwnPart(model, f"get_{stack.name}"))
    wiring = Wiring(model, stack)
    stack_forward: StackForward = forward
    if stack.name:
        stack_forward = root.forward = StackForward(root, grows=stack.name == "decoder")
    stack_forward.embedded = wiring.embeddings()
    wiring.owner.blocks = PointsOfBlocks(map(wiring.block, stack.layouts))
    wiring.final_norm()
    wiring.note(forward.unchanged)
    for points in wiring.owner.blocks.modules():
        if isinstance(points, AttentionPoints):
            points.is_lent = points.module in stack.probe.sharing
    return wiring


def _place_features(model: Any, probe: ProbeRun, wirings: Sequence["Wiring"]) -> None:
    """Add points where the features of towers enter the stream of the text."""
    text, *towers = wirings
    merged, projected = entries_of_towers(
        model, probe, text.stack.chain, [wiring.stack for wiring in towers]
    )
    if merged is None:
        why = "no module reads the embeddings that contain the features"
        text.stack.left_out["merged"] = why
    else:
        text.merged(merged)
    for tower in towers:
        if tower.stack.name in projected:
            tower.projected(projected[tower.stack.name])
        else:
            why = "the features that enter the stream are not the output of a module"
            tower.stack.left_out["projected"] = why


def _join_shards(model: nn.Module, example: ExampleArguments) -> None:
    """Let points join the parts of all processes if a tensor-parallel plan splits heads or neurons.

    The parts of two processes are compared. If they differ, they are different heads or neurons.

    Raises:
        AttachError: if all numbers of a part are equal. Then the comparison does not show whether
            the part is split.
    """
    if (mesh := mesh_of(model)) is None:
        return
    groups: dict[str, list[tuple[Point, int, Tensor]]] = {}

    def note(point: Point, axis: int, part: Tensor) -> None:
        groups.setdefault(point.name.rpartition(".")[0], []).append((point, axis, part))

    with Session() as session:
        for point in HookedRunner(model).points.values():
            for axis in SPLIT_AXES & {*point.axes}:
                hook = partial(note, point, point.axes.index(axis))
                session.after(point.module, hook)
        example.logits(model)
    for name, group in groups.items():
        # Check the points of a module together. The values at one of them may be zero, and so equal
        # on all processes, although they are split.
        if not all(is_whole(part, mesh) for _, _, part in group):
            for point, axis_at, part in group:
                vars(point.module)["shards"] = Shards.of(part, axis_at, mesh)
        elif group[0][2].min() == group[0][2].max():
            raise AttachError(
                f"{name} must have different numbers, to show whether they are split over "
                f"{mesh.size()} processes; got only {float(group[0][2].min())}"
            )


class Wiring:
    """The points of a stack, and the hooks on the model's modules.

    Attributes:
        model: the model.
        stack: the stack that has the points.
        owner: the module that contains the points. For a stack without a prefix, it is the model.
    """

    def __init__(self, model: Any, stack: Stack) -> None:
        self.model = model
        self.stack = stack
        self.owner = stack.owner(model)
        self._handles: dict[HookPoint, Any] = {}
        self._modules: list[nn.Module] = []

    @property
    def blocks(self) -> Any:
        """The points of each block."""
        return self.owner.blocks

    def name_of(self, n: int, point: str) -> str:
        """Return the full name of a point of block `n`."""
        return f"{self.stack.prefix}blocks.{n}.{point}"

    def note(self, unchanged: Unchanged) -> None:
        """Store the modules and numbers that points and the unembedding use.

        Before this, the hooks with which `transformers` collects hidden states are moved behind the
        hooks of points.
        """
        listening = {*self._modules}
        for module in listening:
            _keep_outputs_last(module)
        if self.stack.unembedding is not None:
            listening |= {*self.stack.unembedding.modules}
        attention = set[nn.Module]()
        for layout in self.stack.layouts:
            attention |= {
                module for module in (layout.attention, layout.cross) if module is not None
            }
        unchanged.note_modules(self.model, listening, attention)

    def drop(self, parent: nn.Module, name: str) -> None:
        """Remove one point."""
        handle = self._handles.pop(getattr(parent, name), None)
        if handle is not None:
            handle.remove()
        delattr(parent, name)

    def drop_attention(self, block: Any, name: str) -> None:
        """Remove the points of one attention of a block."""
        points = getattr(block, name)
        restore_methods(points.module)
        for point in [point for point, _ in points.named_children()]:
            self.drop(points, point)
        vars(points.module).pop("hook_points")
        delattr(block, name)

    def _listen(self, module: nn.Module, hook: Any) -> None:
        """Register a hook on one of the model's modules."""
        if isinstance(hook, Input | CacheGiven | Merged):
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        elif isinstance(hook, Routing):
            handle = module.register_forward_pre_hook(hook)
        else:
            handle = module.register_forward_hook(hook, with_kwargs=isinstance(hook, Scale))
        self._handles[hook.point] = handle
        self._modules.append(module)

    def _added(self, point: HookPoint, added: Summand) -> HookPoint:
        """Register the hook of a point on the module of a term, and return the point."""
        self._listen(added.module, Output(point, added.factor, added.is_overwritten))
        return point

    def embeddings(self) -> Output | None:
        """Add `embed`, and `pos_embed` if there are position vectors.

        Returns:
            The hook of `embed` for runs that get embeddings instead of tokens. It is None if there
            is no `embed`, or if the embedding is outside the module that runs the blocks, so that
            its output has already passed through the point.
        """
        embeddings = self.stack.embeddings
        if embeddings is None:
            return None
        if embeddings.positions is not None:
            self.owner.pos_embed = HookPoint(STREAM, "additive position encodings")
            self._listen(embeddings.positions, PositionsWire(self.owner.pos_embed))
        tokens = embeddings.tokens
        self.owner.embed = self._added(HookPoint(STREAM, "token embeddings"), tokens)
        if not embeddings.is_inside:
            return None
        return Output(self.owner.embed, tokens.factor, tokens.is_overwritten)

    def merged(self, module: nn.Module) -> None:
        """Add `merged` at a module that reads the embeddings with the features of towers."""
        self.owner.merged = HookPoint(
            STREAM, "embeddings with the features of images or sounds in their places"
        )
        self._listen(module, Merged(self.owner.merged))

    def projected(self, module: nn.Module) -> None:
        """Add `projected` at a module that returns features for the stream of the text."""
        self.owner.projected = HookPoint(
            STREAM, "the features that are inserted into the stream of the text"
        )
        self._listen(module, Projected(self.owner.projected))

    def block(self, layout: BlockLayout) -> BlockPoints:
        """Create the points of one block, register the hooks that fill them, and return the points.

        Args:
            layout: the attention, MLP and norms of the block.
        """
        points: Any = BlockPoints(layout.block)
        points.resid_pre = self._stream("residual stream entering the block")
        self._listen(layout.block, BlockInput(points.resid_pre))
        self._norm(points, "ln1", layout)
        if layout.attention is not None:
            is_traced = layout.attention in layout.traced
            points.attn = (TracedPoints if is_traced else AttentionPoints)(layout.attention)
            points.layer = points.attn.layer
            self._listen(layout.attention, CacheGiven(points.attn.k))
            if (further := further_keys(layout.attention, self.stack.probe)) is not None:
                self._listen(further, FurtherKeys(points.attn.v))
        self._norm(points, "ln1_post", layout)
        if layout.attn_out:
            meaning = "what attention adds to the residual stream"
            points.attn_out = self._added(HookPoint(STREAM, meaning), layout.attn_out)
        if layout.mixer_out:
            meaning = "what a mixer of positions other than attention adds to the residual stream"
            points.mixer_out = self._added(HookPoint(STREAM, meaning), layout.mixer_out)
        if layout.mid_in or layout.mid_out:
            points.resid_mid = self._stream("residual stream between the two sublayers")
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
        points.resid_post = self._stream("residual stream leaving the block")
        self._listen(layout.block, Output(points.resid_post))
        return points

    def _stream(self, meaning: str) -> HookPoint:
        """Return a point of the residual stream."""
        axis = self.stack.stream_axis
        point = HookPoint(STREAM if axis is None else STREAMS, meaning)
        if axis == 0:
            vars(point)["streams_first"] = True
        return point

    def _cross(self, points: Any, layout: BlockLayout) -> None:
        """Add the points of attention to an encoder, and of the stream after it."""
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
        """Return the points of an MLP: of its experts, or else of its hidden layer."""
        if layout.experts is not None:
            return self._experts(layout.experts)
        points: Any = nn.Module()
        if (hidden := layout.hidden) is not None:
            points.pre = HookPoint(HIDDEN, "before the nonlinearity")
            self._listen(hidden.act, Input(points.pre))
            if hidden.linear:
                points.linear = HookPoint(HIDDEN, "what the gate is multiplied with")
                self._listen(hidden.linear, Output(points.linear))
            points.post = HookPoint(HIDDEN, "what the last map of the MLP reads")
            self._listen(hidden.post, Input(points.post))
        return points

    def _experts(self, experts: Experts) -> ExpertPoints:
        """Return the points of a mixture of experts."""
        points: Any = ExpertPoints(experts)
        module, shared = experts.module, experts.shared
        if module is not None and not experts.reads_copies:
            self._listen(module, Routing(points.routing, points.chosen, experts.n))
        if module is not None and experts.has_outputs and experts.reads_copies:
            self._listen(module, ExpertCopies(points.experts, experts.n, experts.factor))
        elif module is not None and experts.has_outputs:
            self._listen(module, ChosenOutputs(points.experts, experts.factor))
        if shared is not None and experts.gate is not None:
            self._listen(shared.module, GatedExpert(points.shared, experts.gate))
        elif shared is not None:
            self._added(points.shared, shared)
        return points

    def _norm(self, parent: nn.Module, name: str, layout: BlockLayout) -> None:
        """Add the points of a norm to `parent`, if the block has a norm of this name."""
        if name in layout.norms:
            setattr(parent, name, self._around(nn.Module(), layout.norms[name]))

    def _around(self, points: nn.Module, norm: TracedNorm) -> nn.Module:
        """Return `points` with the points of a norm: its scale and its output."""
        points.scale = HookPoint("batch pos 1", "what the norm divides by")
        points.normalized = HookPoint(STREAM, "the norm's output")
        self._listen(norm.module, Scale(points.scale, norm))
        self._listen(norm.module, Output(points.normalized))
        return points

    def final_norm(self) -> None:
        """Add `ln_final` at the norm that reads the stream from the last block, if there is one."""
        norm = self.stack.final_norm
        if norm is not None:
            self.owner.ln_final = self._around(HookPoints(norm.module), norm)


@dataclass(eq=False)
class Input(Wire):
    """Passes the input of a module through a point.

    Attributes:
        point: the point.
        is_shared: whether other modules read the same tensor later. An edit must then change the
            tensor for them too.
    """

    point: HookPoint
    is_shared: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with the result of the point.

        The result is None if the arguments stay the same objects. A shared tensor gets the result
        in place.
        """
        value = next(tensors_in((args, kwargs)))
        if not self.is_shared:
            new = fire(self.point, value)
            return None if new is value else with_first_tensor((args, kwargs), new)
        if is_listened_to(self.point):
            # Give hooks a copy. A hook may store the tensor, and the model may later write into the
            # original.
            shown = value.clone()
            new = fire(self.point, shown)
            if new is not shown:
                value.copy_(new)
        return None


@dataclass(eq=False)
class BlockInput(Input):
    """Passes the stream that enters a block through a point."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with the result of the point; None if they do not change."""
        if not torch.compiler.is_compiling():
            stream = rows_first(self.point, next(tensors_in((args, kwargs))))
            if stream.ndim > 2 or len(stream) != math.prod(texts_read.get()):
                texts_read.set(rows_and_positions(stream))
        return super().__call__(module, args, kwargs)


@dataclass(eq=False)
class Merged(Wire):
    """Passes the argument `inputs_embeds` of a module through the point `merged`.

    In a model that also reads images or sounds, this argument merges two kinds of vectors: the
    embeddings of the tokens and, in the places of images and sounds, the features of their towers.
    """

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with the result of the point; None if they do not change."""
        value = kwargs.get("inputs_embeds")
        new = value if value is None else fire(self.point, value)
        return None if new is value else (args, {**kwargs, "inputs_embeds": new})


@dataclass(eq=False)
class Projected(Output):
    """Passes the features of a tower, such as a vision encoder, through the point `projected`.

    The model inserts these features into the stream of a text. They have other rows and positions
    than the text: a text may have several images. So both are read from the shape of the features.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the result of the point; None if it does not change."""
        token = texts_read.set(rows_and_positions(next(tensors_in(output))))
        try:
            return super().__call__(module, args, output)
        finally:
            texts_read.reset(token)


@dataclass(eq=False)
class Scale(Wire):
    """Passes the scale by which a norm divides through a point.

    An edit rescales the norm's output.
    """

    point: HookPoint
    norm: TracedNorm

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Any:
        """Return the output, rescaled if the point changes the scale; None if it does not."""
        if not is_listened_to(self.point):
            return None
        scale = self.norm.scale(next(tensors_in((args, kwargs))))
        new = fire(self.point, scale)
        return None if new is scale else self.norm.rescaled(output, scale, new)


@dataclass(eq=False)
class PositionsWire(Computed):
    """Passes position vectors through a point, with a row for each text.

    In the model, all texts may share one row.
    """

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the result of the point."""
        vectors = output.view(-1, *output.shape[-2:]).expand(*texts_read.get(), -1)
        return fire(self.point, vectors)


def _keep_outputs_last(module: nn.Module) -> None:
    """Move the hooks with which `transformers` collects hidden states behind all other hooks.

    Otherwise the hidden states would not contain edits.
    """
    hooks_last(module, lambda hook: hook.__module__ == "transformers.utils.output_capturing")
