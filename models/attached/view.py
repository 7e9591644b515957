"""A view of an attached decoder as blocks with branches and weights.

It is used for graphs and sums of components. `models.from_hf` converts the families that it
supports. For any other family, the view is created from a run on fourteen tokens:

1. Record the inputs and outputs of each module (`_recorded`).
2. Inside attention, the modules that read its input are its projections, and the module that reads
   z is its output map. These modules are linear, so their outputs for unit vectors are their
   weights (`_weights_of`).
3. The columns of the projections on which a head's queries, keys or values depend belong to this
   head. They are found by autograd (`_columns_of`).
   Attention in which one of these parts is missing, and any other mixer of positions, is one
   sublayer (`ViewSublayer`): the modules that lead from its norm to its term.
4. A norm is replaced by a norm of `models` with the same gain, bias and epsilon. The MLP is the
   module that reads its norm and returns the term for the stream.
5. The view's attention computes queries, keys and values with its own linear maps. It then runs the
   model's own attention module, in which the outputs of the projections are replaced by these
   values, and reads z from the input of the output map. So rotation, norms of queries, masks and
   kernels are the model's.
6. The view must return the model's logits. Otherwise an error is raised.

Only the linear maps of attention and the norms are copies. `ViewAttention` runs the attached
attention module with its points, and `ViewMLP` runs the model's own modules. They are separate
classes because graphs need two things that no attached module has. First, a sublayer must be called
on only the normalized stream, while a block of `transformers` calls it with masks and positions.
Second, attention must be available as a linear map to queries, keys and values (`project`), the
rest (`mix`), and the output weights (`W_O`). The points of attention show queries and keys after
rotation, where they are no longer a linear map of the stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import HookPoint, Identity, position_offset, start_of_piece
from hooks.base import (
    agree,
    carried,
    code_rounding,
    is_same,
    language_of,
    mapped,
    mark_padding,
    tensors_in,
    with_first_tensor,
    without_gradients,
)
from hooks.shared import Session, hooks_disabled
from models.adapters import AdaptedMap, adapted_map
from models.attached.context import AttachedContext
from models.attached.layout import BlockLayout
from models.attached.original import AttachedSizes, logits_of, tokens_for
from models.attached.parts import Summand, norm_of, weights_in
from models.attached.probe import Call, ProbeRun, arguments_of
from models.block import Branch
from models.linear import Linear
from models.mode import mode
from models.norm import LayerNorm, RMSNorm
from models.text.texts import ReadsText
from models.weights import AttentionWeights

STREAM = "batch pos d_model"


class ViewContext(NamedTuple):
    """The values that attention reads besides the stream, in a run of some texts.

    Attributes:
        arguments: the arguments of the model, without the tokens.
        calls: the arguments of each module that the view calls.
    """

    arguments: dict[str, Any]
    calls: dict[nn.Module, tuple[Any, Any]]


class PlainView(ReadsText, nn.Module):
    """An attached model as a plain transformer: a sum of branches with weights. It reads strings
    with the tokenizer of the attached model.

    See the docstring of the file.

    Args:
        model: the attached model.

    Attributes:
        config: its sizes.
        tokenizer: the tokenizer of the attached model, or None.
        blocks: the blocks, with branches as in `models.Transformer`.
        is_scaled: whether blocks multiply the stream by numbers. The view's stream is then the
            model's stream times `entering` before the first block, and equal to it after the last.
        entering: the number by which the stream of the model is multiplied.
        ln_final: the norm that the unembedding reads.

    Raises:
        ValueError: if a part is not found, or if the view has other logits than the model. The
            error names the part.
    """

    _language: Any
    config: AttachedSizes
    blocks: nn.ModuleList
    is_scaled: bool
    entering: float
    ln_final: nn.Module
    _model: Any
    _head: Any

    @without_gradients
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        language: Any = language_of(model)
        layouts = language.layouts
        points: Any = model.blocks
        # Do not register these as submodules. Otherwise their points and parameters would belong to
        # the view.
        vars(self).update(_model=model, _language=language, config=language.config)
        self.tokenizer = language.tokenizer
        for name in ("embed", "pos_embed"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        _require_parts(language)
        tokens = tokens_for(model)
        with mode(model, training=False):
            calls, logits = _recorded(language, tokens)
            modules = [part for layout in layouts for part in layout.block.modules()]
            context = _view_context_of(language, modules, tokens=tokens, arguments={})
            recorded = _scaled(
                [
                    RecordedBlock(n, layout, points[n], calls=calls, context=context)
                    for n, layout in enumerate(layouts)
                ]
            )
            self.blocks = nn.ModuleList(map(ViewBlock, recorded))
            self.is_scaled = any(block.entering != block.leaving for block in recorded)
            self.entering = recorded[0].entering
            modules = language.unembed.modules
            norm: Any = getattr(model, "ln_final", None)
            has_norm = norm is not None and norm.module is modules[0]
            self.ln_final = _norm_like(calls[norm.module]) if has_norm else Identity()
            vars(self)["_head"] = modules[has_norm:]
            self.eval()
            ours = self(tokens)
        if not agree(ours, logits, code_rounding(logits.dtype)):
            raise _not_found(None, "blocks that are sums of their parts")

    @property
    def pad_token(self) -> int:
        """The token that is used as padding."""
        padding: int = self._language.pad_token
        return padding

    @property
    def is_causal(self) -> bool:
        """True if the logits at a position do not depend on later tokens."""
        causal: bool = self._language.is_causal
        return causal

    def _text_device(self) -> torch.device | None:
        device: torch.device | None = self._language._text_device()
        return device

    def forward(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> Tensor:
        """Return the model's logits, computed from its parts."""
        context = self.context(tokens, **arguments)
        mask = arguments.get("attention_mask")
        real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        with position_offset(start_of_piece(), real):
            resid = self.input_resid(tokens, context)
            for block in self.blocks:
                resid = block(resid, context)
            logits = self.unembed(resid)
        mark_padding(logits, real)
        return logits

    def context(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> ViewContext:
        """Run the model, and return the arguments of the modules that blocks call."""
        if isinstance(mask := arguments.get("attention_mask"), Tensor) and mask.ndim == 2:
            arguments = {**self._language.positions_of(mask), **arguments}
        blocks: list[Any] = [*self.blocks]
        called = [module for block in blocks for module in block.called]
        return _view_context_of(self._language, called, tokens=tokens, arguments=arguments)

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: ViewContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that enters the first block."""
        stream = self._language.input_resid(tokens, AttachedContext(context.arguments))
        return stream * self.entering if self.is_scaled else stream

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of a residual stream."""
        resid = self.ln_final(resid)
        for module in self._head:
            resid = module(resid)
        return self._language.unembed.finished(resid)

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """A copy of the unembedding, times the number that multiplies the logits."""
        return self._unembedding()[0]

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """A copy of the unembedding's bias, times the number that multiplies the logits."""
        return self._unembedding()[1]

    @without_gradients
    def _unembedding(self) -> tuple[Tensor, Tensor]:
        """Return the weight [d_model, vocab] and the bias of the unembedding.

        Both are multiplied by the number by which the model multiplies its logits.

        Raises:
            ValueError: if several modules compute the logits.
        """
        if len(self._head) != 1:
            raise _not_found(None, "one linear map from the final norm to the logits")
        like = next(self._model.parameters())
        weight, bias = _weights_of(self._head[0], self.config.d_model, like)
        factor = self._language.unembed.factor
        return weight * factor, bias * factor

    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Return the logits of the `last` positions; 0 means all."""
        return self.unembed(resid)[:, -last:]


def _scaled(blocks: Sequence["RecordedBlock"]) -> list["RecordedBlock"]:
    """Return blocks with the numbers by which their streams are multiplied in the view.

    The view's stream is a sum: each term is multiplied by the numbers with which all later blocks
    multiply the stream. So the view's stream before a block is the model's stream times the numbers
    of this block and of all later blocks.
    """
    scaled: list[RecordedBlock] = []
    leaving = 1.0
    for block in reversed(blocks):
        entering = leaving * carried_by(block)
        scaled.insert(0, block._replace(entering=entering, leaving=leaving))
        leaving = entering
    return scaled


def _require_parts(language: Any) -> None:
    """Require that every block adds terms to the stream, and that logits are read from the stream.

    Raises:
        ValueError: if a part is missing. The error names the part.
    """
    if language.n_streams > 1:
        raise _not_found(
            None, f"one vector of the stream for each token, not {language.n_streams},"
        )
    for n, layout in enumerate(language.layouts):
        if layout.mid_out is not None:
            raise _not_found(
                n, "norms of the inputs of its sublayers, not of the sum with the stream,"
            )
        attn = getattr(language.model.blocks[n], "attn", None)
        if attn is not None and (shards := carried(attn.z, "shards")):
            raise _not_found(n, f"heads that are not split over {shards.mesh.size()} processes")
    if not language.has("unembed"):
        raise _not_found(None, "an unembedding that reads only the stream")


class RecordedBlock(NamedTuple):
    """A block of the attached model, with the calls of a run.

    Attributes:
        n: its index.
        layout: its modules.
        points: its points.
        calls: the recorded inputs and outputs of each module.
        context: the context of the recorded run.
        entering, leaving: the numbers by which the model's stream before and after the block is
            multiplied in the view.
    """

    n: int
    layout: BlockLayout
    points: Any
    calls: dict[nn.Module, Call]
    context: ViewContext
    entering: float = 1.0
    leaving: float = 1.0

    @property
    def stream(self) -> Tensor:
        """The stream that entered the block."""
        return self.calls[self.layout.block].inputs[0]

    @property
    def inside(self) -> list[Call]:
        """The calls of the modules of the block, in the order in which they began."""
        inside = [self.calls[part] for part in self.layout.block.modules() if part in self.calls]
        return sorted(inside, key=lambda call: call.began)

    def norm(self, name: str) -> Call | None:
        """Return the call of a norm; None if the block has no norm of this name."""
        norm = self.layout.norms.get(name)
        return None if norm is None else self.calls[norm.module]

    def norm_before(self, norm: Call | None) -> nn.Module:
        """Return a norm of the view that reads the stream."""
        return _norm_like(norm, before=self.entering)

    def norm_after(self, name: str) -> nn.Module:
        """Return a norm of the view whose output is added to the stream."""
        return _norm_like(self.norm(name), after=self.entering)

    def factor(self, added: Summand, after: str) -> float:
        """Return the factor by which the view multiplies the output of a sublayer.

        If a norm reads the output, the factor comes before the norm.

        Args:
            added: the term of the sublayer.
            after: the name of the norm.
        """
        return added.factor * (1.0 if self.norm(after) else self.entering)

    def output(self, added: Summand, after: str) -> Tensor:
        """Return the recorded output of a sublayer times its factor.

        If a norm reads the output, the result is the input of the norm.
        """
        norm = self.norm(after)
        output = self.calls[added.module].output if norm is None else norm.inputs[0]
        assert output is not None
        return output * self.factor(added, after)

    @property
    def first(self) -> Summand | None:
        """The first term of a block whose other terms are not known; None for other blocks."""
        layout = self.layout
        has_rest = layout.mlp_out is None and layout.reads_first
        return (layout.attn_out or layout.mixer_out) if has_rest else None

    @property
    def is_whole(self) -> bool:
        """True if no term of the block is known, so that the block is one sublayer."""
        layout = self.layout
        return not (layout.attn_out or layout.mixer_out or layout.mlp_out)


class ViewBlock(nn.Module):
    """A block of the view.

    Args:
        recorded: the attached block.

    Attributes:
        why_undivided: the reason why attention is one sublayer without heads; empty if it has
            heads.
    """

    why_undivided = ""

    def __init__(self, recorded: RecordedBlock) -> None:
        super().__init__()
        layout = recorded.layout
        self.resid_pre, self.resid_post = HookPoint(STREAM), HookPoint(STREAM)
        self.is_parallel = layout.mid_in is None and recorded.first is None
        if not self.is_parallel:
            self.resid_mid = HookPoint(STREAM, "residual stream between the two sublayers")
        if layout.attn_out is not None:
            self.attn_out = HookPoint(STREAM, "what attention adds to the residual stream")
            self._add_attention(recorded, layout.attn_out)
        if layout.mixer_out is not None:
            meaning = "what another mixer of positions adds to the residual stream"
            self.mixer_out = HookPoint(STREAM, meaning)
            mixer, self.mixer_ln = _undivided(recorded, layout.mixer_out)
            self.mixer: ViewSublayer | ViewRest = mixer
        if recorded.is_whole:
            self.mixer_out = HookPoint(STREAM, "what the block adds to the residual stream")
            self.mixer, self.mixer_ln = ViewRest(recorded), Identity()
        if layout.mlp_out is not None:
            self.mlp_out = HookPoint(STREAM, "what the MLP adds to the residual stream")
            self._add_mlp(recorded, layout.mlp_out)
        elif recorded.first is not None:
            meaning = "what the block adds to the residual stream after its first sublayer"
            self.mlp_out = HookPoint(STREAM, meaning)
            self.mlp: ViewMLP | ViewRest = ViewRest(recorded, recorded.first)
            self.ln2: nn.Module = Identity()
            self.ln2_post: nn.Module = Identity()

    def _add_attention(self, recorded: RecordedBlock, added: Summand) -> None:
        """Add attention: with heads if it can be divided, and otherwise as one sublayer."""
        try:
            self.attn: ViewAttention | ViewSublayer = ViewAttention(recorded)
            self.ln1 = recorded.norm_before(recorded.norm("ln1"))
            self.ln1_post = recorded.norm_after("ln1_post")
        except Undivided as reason:
            self.why_undivided = str(reason)
            self.attn, self.ln1 = _undivided(recorded, added)
            self.ln1_post = Identity()

    def _add_mlp(self, recorded: RecordedBlock, added: Summand) -> None:
        """Add the MLP."""
        modules, norm = _mlp_modules(recorded, added)
        factor = recorded.factor(added, "ln2_post")
        self.mlp = mlp = ViewMLP(modules, factor, 1.0 if norm else recorded.entering)
        hidden = recorded.layout.hidden
        points: Any = getattr(recorded.points, "mlp", None)
        # The points of a mixture of experts have no hidden layer.
        if hidden is not None and hasattr(points, "post"):
            size = recorded.calls[hidden.post].inputs[0].shape[-1]
            adapter = _adapted(recorded.n, hidden.post, factor)
            mlp.read_hidden(points.post, HiddenMap(hidden.post, size, factor), adapter)
        self.ln2, self.ln2_post = recorded.norm_before(norm), recorded.norm_after("ln2_post")

    @property
    def called(self) -> list[nn.Module]:
        """The modules of the model that the block calls with arguments of the context."""
        sublayers = [getattr(self, name, None) for name in ("attn", "mixer", "mlp")]
        return [module for part in sublayers for module in getattr(part, "called", ())]

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The sublayers whose outputs `forward` adds to the stream, in order."""
        branches = []
        if hasattr(self, "attn"):
            attn = (self.resid_pre, self.ln1, self.attn, self.ln1_post, self.attn_out)
            branches.append(Branch(*attn, kind="attn"))
        if hasattr(self, "mixer"):
            mixer = (self.resid_pre, self.mixer_ln, self.mixer, Identity(), self.mixer_out)
            branches.append(Branch(*mixer, kind="mixer"))
        if hasattr(self, "mlp"):
            reads = self.resid_pre if self.is_parallel else self.resid_mid
            mlp = (reads, self.ln2, self.mlp, self.ln2_post, self.mlp_out)
            branches.append(Branch(*mlp, kind="mlp"))
        return tuple(branches)

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ViewContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that leaves the block."""
        resid = total = self.resid_pre(resid)
        for branch in self.branches:
            if branch.kind == "mlp" and not self.is_parallel:
                resid = total = self.resid_mid(total)
            needs_context = branch.kind != "mlp" or isinstance(self.mlp, ViewRest)
            total = total + branch(resid, *([context] if needs_context else []))
        return self.resid_post(total)


class Undivided(ValueError):
    """Attention cannot be divided into heads that read queries, keys and values separately."""


def _undivided(recorded: RecordedBlock, added: Summand) -> tuple["ViewSublayer", nn.Module]:
    """Return a sublayer as a single part, and the norm before it.

    Such a sublayer is not divided into heads: it maps the stream to the vector that it adds, and
    its queries, keys and values are unknown. It is a mixer, or attention that cannot be divided.

    Args:
        recorded: the block, as recorded in one run.
        added: the output of the sublayer, which is added to the stream.

    Raises:
        ValueError: if no modules lead from the stream to the term.
    """
    wanted = recorded.calls[added.module].output
    for norm in (recorded.norm("ln1"), None):
        read = recorded.stream if norm is None else norm.output
        if modules := _chain(read, wanted, recorded.inside):
            reading = 1.0 if norm else recorded.entering
            sublayer = ViewSublayer(modules, added.factor * recorded.entering, reading)
            return sublayer, recorded.norm_before(norm)
    raise _not_found(
        recorded.n, "modules that read the stream and return the term of its attention or mixer"
    )


class ViewModules(nn.Module):
    """Modules of the model that run one after another, between the streams of the view.

    Attributes:
        parts: the modules, in order.
        factor: the factor of the output.
        entering: the number by which the input is multiplied in the view.
    """

    parts: Sequence[nn.Module]
    factor: float
    entering: float

    def __init__(self, parts: Sequence[nn.Module], factor: float, entering: float = 1.0) -> None:
        super().__init__()
        # Do not register these as submodules, because their parameters do not belong to the view.
        vars(self).update(parts=parts, factor=factor, entering=entering)

    @property
    def weight(self) -> Tensor:
        """A weight of the modules, which has their dtype and their device."""
        return _weight_of(self.parts)

    def _run(self, x: Tensor, call: Callable[[nn.Module, Tensor], Any]) -> Tensor:
        """Return the output of the last module times the factor.

        Args:
            x: the input in the view.
            call: a function that calls a module on a tensor.
        """
        x = x if self.entering == 1 else x / self.entering
        for module in self.parts:
            x = next(tensors_in(call(module, x)))
        return x if self.factor == 1 else x * self.factor


class ViewSublayer(ViewModules):
    """A sublayer of the model that is not divided: attention, or another mixer of positions."""

    @property
    def called(self) -> Sequence[nn.Module]:
        """The modules, which get the other arguments of the context."""
        return self.parts

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], context: ViewContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector that the sublayer adds to the stream."""

        def call(module: nn.Module, stream: Tensor) -> Any:
            args, kwargs = _arguments(context.calls[module], stream)
            return module(*args, **kwargs)

        return self._run(x, call)


class ViewRest(nn.Module):
    """The rest: everything that a block adds to the stream, except its first term.

    It is used if the other terms of the block are not known. The block runs on the stream after the
    first term, with zeros in place of this term. The rest is the stream that leaves the block,
    minus the stream that entered times the number by which the block multiplies the stream. If no
    first term is known either, the rest is the sum of all that the block adds.

    Args:
        recorded: the block.
        first: the first term.

    Attributes:
        called: the block.
    """

    called: tuple[nn.Module]
    first: list[nn.Module]
    reads_context = True

    def __init__(self, recorded: RecordedBlock, first: Summand | None = None) -> None:
        super().__init__()
        self.entering, self.leaving = recorded.entering, recorded.leaving
        # Do not register these as submodules, because their parameters do not belong to the view.
        removed = [] if first is None else [first.module]
        vars(self).update(called=(recorded.layout.block,), first=removed)

    @property
    def weight(self) -> Tensor:
        """A weight of the block, which has its dtype and its device."""
        return _weight_of(self.called)

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], context: ViewContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector that the block adds to the stream."""
        left = _run_without(self.called[0], self.first, x / self.entering, context)
        return left * self.leaving - x


def carried_by(recorded: RecordedBlock) -> float:
    """Return the number by which a block multiplies the stream that enters it.

    It is 1 for a block that only adds its terms to the stream. If terms are not known, the block
    runs with zeros as the outputs of all modules inside it, so that only the stream passes through.

    Raises:
        ValueError: if the block does not multiply the stream by one number other than 0.
    """
    if recorded.first is None and not recorded.is_whole:
        return 1.0
    block, x = recorded.layout.block, recorded.stream
    removed: list[nn.Module] = []
    for child in block.children():
        removed += child.children() if isinstance(child, nn.ModuleList) else [child]
    # The block may add a bias of its own, which does not depend on the stream.
    left, bias = (_run_without(block, removed, stream, recorded.context) for stream in (x, 0 * x))
    left = left - bias
    number = float((left * x).sum() / x.square().sum())
    if number == 0 or not agree(left, number * x, code_rounding(x.dtype)):
        raise _not_found(recorded.n, "a stream that is kept, up to a number, and not normalized,")
    return number


def _run_without(
    block: nn.Module, removed: Sequence[nn.Module], x: Tensor, context: ViewContext
) -> Tensor:
    """Return the stream after a block, with zeros instead of the outputs of some modules.

    Args:
        block: the block.
        removed: the modules.
        x: the stream before the block.
        context: the other arguments of the block.
    """

    def zeros(output: Any) -> Any:
        return with_first_tensor(output, torch.zeros_like(next(tensors_in(output))))

    def run() -> Tensor:
        with Session() as session:
            for module in removed:
                session.after(module, zeros)
            args, kwargs = _arguments(context.calls[block], x)
            return next(tensors_in(block(*args, **kwargs)))

    # The points of the removed attention must not fire again.
    return hooks_disabled(run)


class ViewAttention(AttentionWeights, nn.Module):
    """Attention of the view: the model's own module between linear maps of the view.

    Args:
        recorded: the block. The points of its attention fire as the module runs.

    Attributes:
        qkv, output, heads, d_head: see `AttentionWeights`. `output` is multiplied by the factor of
            the term, and contains the adapter.
        adapter: the output map as a map with an adapter; None without an adapter.
    """

    module: Any
    projections: list[nn.Module]
    map: nn.Module

    def __init__(self, recorded: RecordedBlock) -> None:
        super().__init__()
        layout, calls, context = recorded.layout, recorded.calls, recorded.context
        module = layout.attention
        points = getattr(recorded.points, "attn", None)
        if module is None or points is None:
            raise Undivided("attention must have points (attn.q, ...)")
        norm = recorded.norm("ln1")
        read = recorded.stream if norm is None or norm.output is None else norm.output
        for name, point in points.named_children():
            setattr(self, name, point)
        inside = [calls[part] for part in module.modules() if part in calls and part is not module]
        projections = _outermost([call for call in inside if _is_projection(call, read)])
        if not projections:
            raise Undivided("attention must have projections that read its input")
        # Do not register this as a submodule, because its parameters do not belong to the view.
        vars(self).update(module=module, projections=[call.module for call in projections])
        leaves = [
            call.output.to(read).requires_grad_() for call in projections if call.output is not None
        ]
        values = self._values(leaves, read, context)
        q, k, v, z = (values[name] for name in "qkvz")
        self.heads = [part.shape[2] for part in (q, k, v)]
        self.d_head = z.shape[3]
        output_map = _reader_of_heads(recorded.n, module, inside, z.detach().flatten(2))
        if len({part.shape[3] for part in (q, k, v, z)}) > 1 or output_map is None:
            raise Undivided("attention must have heads of one size and a map that reads z")
        vars(self)["map"] = output_map
        columns = _columns_of((q, k, v), leaves)
        if columns is None:
            raise Undivided("each column of a projection must belong to one head")
        self.places = columns.argsort().split([leaf.shape[-1] for leaf in leaves])
        parts = [_weights_of(call.module, read.shape[-1], q) for call in projections]
        weight, bias = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        self.qkv = _linear_of(weight[:, columns], bias[columns])
        assert layout.attn_out is not None
        factor = recorded.factor(layout.attn_out, "ln1_post")
        weight, bias = _weights_of(output_map, z.shape[2] * z.shape[3], q)
        self.output = _linear_of(weight * factor, bias * factor)
        self.adapter = _adapted(recorded.n, output_map, factor)
        added = recorded.output(layout.attn_out, "ln1_post")
        if not agree(self(read, context), added, code_rounding(added.dtype)):
            raise Undivided("the output of attention must be a linear map of z")

    def _values(
        self, leaves: Sequence[Tensor], x: Tensor, context: ViewContext
    ) -> dict[str, Float[Tensor, "batch pos _head d_head"]]:
        """Return queries, keys, values and z, from given outputs of the projections.

        Autograd can differentiate the result by these outputs.

        Args:
            leaves: the outputs of the projections, in order.
            x: the input of attention.
            context: the context of the recorded run.
        """
        values: dict[str, Tensor] = {}
        with torch.enable_grad(), Session() as session:
            for module, leaf in zip(self.projections, leaves, strict=True):
                session.after(module, partial(_instead, leaf))
            for name in "qkvz":
                session.after(getattr(self, name), partial(values.__setitem__, name))
            self._run(x, context)
        return values

    def _run(self, x: Tensor, context: ViewContext) -> None:
        """Call the model's own attention module on `x`, with the other arguments of the context."""
        args, kwargs = _arguments(context.calls[self.module], x)
        self.module(*args, **kwargs)

    def project(self, x: Float[Tensor, "batch pos d_model"]) -> tuple[Tensor, ...]:
        """Return queries, keys and values [batch, pos, head, d_head] of the normalized stream.

        They are linear in `x`.
        """
        return self.qkv(x).unflatten(-1, (sum(self.heads), -1)).split(self.heads, 2)

    def mix(
        self,
        q: Float[Tensor, "batch pos head d_head"],
        k: Float[Tensor, "batch pos kv_head d_head"],
        v: Float[Tensor, "batch pos kv_head d_head"],
        context: ViewContext,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the output of attention, from its queries, keys and values.

        Args:
            q, k, v: the results of `project`, before rotation.
            context: the context of the run.
        """
        joined = torch.cat([q, k, v], 2).flatten(2)
        read: list[Tensor] = []
        with Session() as session:
            for module, place in zip(self.projections, self.places, strict=True):
                session.after(module, partial(_instead, joined[..., place]))
            session.before(
                self.map, lambda args, kwargs: read.append(next(tensors_in((args, kwargs))))
            )
            self._run(joined.new_zeros(*q.shape[:2], self.qkv.in_features), context)
        return self.output(read[0])

    def forward(self, x: Float[Tensor, "batch pos d_model"], context: ViewContext) -> Tensor:
        """Return the output of attention for the residual stream."""
        q, k, v = self.project(x)
        return self.mix(q, k, v, context)

    @property
    def called(self) -> tuple[nn.Module]:
        """The model's own attention module."""
        return (self.module,)


class ViewMLP(ViewModules):
    """The model's MLP.

    Attributes:
        adapter: the map that reads the hidden layer, if it has an adapter; otherwise None.
        post: the point of the hidden layer. An MLP without a hidden layer, such as a mixture of
            experts, does not have this attribute.
    """

    adapter: AdaptedMap | None = None
    _map: "HiddenMap"

    def read_hidden(
        self, post: nn.Module, read_by: "HiddenMap", adapter: AdaptedMap | None
    ) -> None:
        """Set the hidden layer.

        Args:
            post: its point.
            read_by: the map that reads it.
            adapter: the same map, if it has an adapter; otherwise None.
        """
        self.post, self.adapter = post, adapter
        vars(self)["_map"] = read_by

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """The weight of the map that reads the hidden layer."""
        return self._map.weight(self.weight)

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """The bias of the map that reads the hidden layer."""
        return self._map.bias(self.weight)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the output of the MLP."""
        output = self._run(x, lambda module, stream: module(stream))
        # Experts may see rows and positions as one axis, so restore the shape.
        return output.view(x.shape)


class HiddenMap(NamedTuple):
    """The map that reads the hidden layer of an MLP.

    Attributes:
        module: the module of the model.
        size: the number of neurons.
        factor: a number that multiplies the output of the module.
    """

    module: nn.Module
    size: int
    factor: float

    @without_gradients
    def weight(self, like: Tensor) -> Float[Tensor, "d_mlp d_model"]:
        """Return the weight times the factor.

        Args:
            like: a tensor with the precision and the device of the hidden layer.
        """
        return _weights_of(self.module, self.size, like)[0] * self.factor

    @without_gradients
    def bias(self, like: Tensor) -> Float[Tensor, " d_model"]:
        """Return the bias times the factor.

        Args:
            like: a tensor with the precision and the device of the hidden layer.
        """
        output: Tensor = self.module(like.new_zeros(1, 1, self.size))
        return output[0, 0] * self.factor


def _weight_of(modules: Sequence[nn.Module]) -> Tensor:
    """Return the first weight of some modules.

    If all weights are quantized, the result is an empty tensor in float32 on their device, because
    masks of circuits get the dtype of the weight.
    """
    weights = [weight for module in modules for weight in weights_in(module)]
    # Numbers of one byte are packed, or lack their scales.
    plain = (weight for weight in weights if weight.dtype.is_floating_point and weight.itemsize > 1)
    return next(plain, weights[0].new_empty(0, dtype=torch.float32))


def _adapted(n: int, module: nn.Module, factor: float = 1.0) -> AdaptedMap | None:
    """Return an output map with an adapter that acts; None without an adapter.

    Args:
        n: the index of the block.
        module: the output map of a sublayer.
        factor: the factor of the output.

    Raises:
        ValueError: if the adapter is of a kind that is not supported.
    """
    adapted = adapted_map(module, f"block {n}")
    if adapted is None or not adapted.names:
        return None
    return replace(adapted, factor=factor)


def _not_found(n: int | None, what: str) -> ValueError:
    """Return the error for a part that was not found.

    Args:
        n: the index of the block; None if the part belongs to the model.
        what: the part.
    """
    where = "a decoder" if n is None else f"block {n}"
    return ValueError(
        f"{where} must have {what} for graphs and sums of components; this part was not found, and "
        "models.from_hf does not support the family"
    )


def _recorded(language: Any, tokens: Tensor) -> tuple[dict[nn.Module, Call], Tensor]:
    """Return the inputs and outputs of each module that runs once, and the logits."""
    probe = ProbeRun(copied=lambda tensor: tensor.detach().clone())

    def run() -> Tensor:
        with Session() as session:
            probe.listen(session, language.model)
            return logits_of(language.run(tokens))

    logits = hooks_disabled(run)
    return {call.module: call for call in probe.single}, logits


def _view_context_of(
    language: Any, modules: Sequence[nn.Module], tokens: Tensor, arguments: dict[str, Any]
) -> ViewContext:
    """Run the model, and return the arguments of some modules as a context.

    Args:
        language: the attached model's parts.
        modules: the modules.
        tokens: the texts.
        arguments: the arguments of the model, without the tokens.
    """
    run = partial(language.run, tokens, **arguments)
    return ViewContext(arguments, hooks_disabled(arguments_of, modules, run))


def _norm_like(call: Call | None, before: float = 1.0, after: float = 1.0) -> nn.Module:
    """Return a norm of `models` with the same gain, bias and epsilon as a recorded norm.

    The gain is the weight, or 1 + weight: the one that gives the recorded output. For None, the
    result is an identity.

    Args:
        call: the call of the norm.
        before: the number by which the input is multiplied in the view. The output is the same,
            because epsilon is multiplied by its square.
        after: the number by which the output is multiplied in the view.
    """
    if call is None:
        return Identity()
    norm = norm_of(call)
    assert norm is not None
    assert call.output is not None
    size = call.output.shape[-1]
    weight = getattr(norm.module, "weight", None)
    # Some blocks join rows and positions in one axis, so give all tensors three axes.
    x, output = (part.view(1, -1, size) for part in (call.inputs[0], call.output))
    gains = [None] if weight is None else [weight, 1 + weight]
    bias: Any = norm.module.bias if norm.bias else None
    if bias is not None and not norm.centered:
        raise _not_found(None, "norms without a bias if they subtract no mean")
    candidates = []
    for gain in gains:
        has_gain = gain is not None
        candidate: nn.Module
        if norm.centered:
            candidate = LayerNorm(size, norm.eps, learned=has_gain, bias=bias is not None)
        else:
            candidate = RMSNorm(size, norm.eps, has_gain)
        candidate = candidate.to(x)
        for parameter, value in zip(candidate.parameters(), (gain, bias), strict=False):
            parameter.copy_(value)
        candidates.append(candidate.requires_grad_(False))
    best = min(candidates, key=lambda candidate: float((candidate(x) - output).abs().max()))
    best.eps *= before**2
    if after != 1 and best.weight is None:
        best.weight = nn.Parameter(x.new_ones(size), requires_grad=False)
    for parameter in best.parameters():
        parameter.mul_(after)
    return best


def _mlp_modules(recorded: RecordedBlock, added: Summand) -> tuple[list[nn.Module], Call | None]:
    """Return the modules of an MLP in the order in which they run, and the norm before them.

    The first module reads the output of this norm. If no norm fits, the norm is None, and the first
    module reads the residual stream. Each further module reads the output of the module before. The
    last module returns the output of the MLP, before a norm `ln2_post`.

    Args:
        recorded: the block.
        added: the term of the MLP.
    """
    after = recorded.norm("ln2_post")
    wanted = recorded.calls[added.module].output if after is None else after.inputs[0]
    stream = recorded.stream
    if recorded.layout.mid_in is not None:
        stream = recorded.calls[recorded.layout.mid_in].inputs[0]
    for norm in [*filter(None, map(recorded.norm, ("ln2", "ln1"))), None]:
        read = stream if norm is None else norm.output
        if modules := _chain(read, wanted, recorded.inside):
            return modules, norm
    raise _not_found(recorded.n, "modules that read the norm and return the output of the MLP")


def _chain(read: Tensor | None, wanted: Tensor | None, calls: Sequence[Call]) -> list[nn.Module]:
    """Return a chain of modules from the tensor `read` to the tensor `wanted`.

    Each module reads the output of the module before. Without a chain, the list is empty.
    """
    for n, call in enumerate(calls):
        if not call.inputs or call.output is None or not agree(call.inputs[0], read):
            continue
        if agree(call.output, wanted):
            return [call.module]
        if modules := _chain(call.output, wanted, calls[n + 1 :]):
            return [call.module, *modules]
    return []


def _is_projection(call: Call, read: Tensor) -> bool:
    """Return whether a module with weights read this tensor, and returned a vector per position."""
    fits = bool(call.inputs) and call.output is not None and call.output.ndim == 3
    # Nothing is computed between, so there is no rounding.
    return fits and any(True for _ in weights_in(call.module)) and is_same(call.inputs[0], read)


def _reader_of_heads(
    n: int, attention: nn.Module, calls: Sequence[Call], joined_z: Tensor
) -> nn.Module | None:
    """Return the output map of attention: the last module that reads z. None without one.

    The parts of a map with an adapter read z too, but they are not the map.

    Args:
        n: the index of the block.
        attention: the attention module.
        calls: the calls inside it.
        joined_z: z with all heads in one axis.
    """
    parts_of_adapters = set[nn.Module]()
    for part in attention.modules():
        if _adapted(n, part):
            parts_of_adapters |= {*part.modules()} - {part}
    readers = [call for call in calls if call.inputs and call.module not in parts_of_adapters]
    maps = [call.module for call in readers if agree(call.inputs[0], joined_z)]
    return maps[-1] if maps else None


def _outermost(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of modules that are not inside the module of another call."""
    inner = set[nn.Module]()
    for call in calls:
        inner |= {*call.module.modules()} - {call.module}
    return [call for call in calls if call.module not in inner]


def _columns_of(
    parts: Sequence[Float[Tensor, "batch pos _head d_head"]],
    outputs: Sequence[Float[Tensor, "batch pos _width"]],
) -> Int[Tensor, " column"] | None:
    """Return the columns of the projections' outputs on which each head depends.

    The outputs are joined along their last axis, and columns are counted in the joined tensor. The
    result contains d_head columns for each head: first for the heads of queries, then of keys, then
    of values. The result is None if a column belongs to no head, or to several heads.

    Args:
        parts: the queries, the keys and the values.
        outputs: the outputs of the projections.
    """
    columns = []
    generator = torch.Generator().manual_seed(0)
    for part in parts:
        for head in range(part.shape[2]):
            factors = torch.zeros_like(part)
            factors[:, :, head] = torch.randn(factors[:, :, head].shape, generator=generator)
            grads = torch.autograd.grad(
                part, outputs, factors, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            sizes = torch.cat([grad.abs().sum((0, 1)).float().cpu() for grad in grads])
            columns.append(sizes.topk(part.shape[3]).indices.sort().values)
    joined = torch.cat(columns)
    n_columns = sum(output.shape[-1] for output in outputs)
    # The columns are integers, so an exact comparison is right.
    return joined if torch.equal(joined.sort().values, torch.arange(n_columns)) else None


def _arguments(call: tuple[Any, Any], x: Tensor) -> tuple[Any, Any]:
    """Return the arguments of a recorded call with `x` instead of the stream."""
    stream = _stream_among(call, x.shape[-1])
    args, kwargs = mapped(call, lambda leaf: x if leaf is stream else leaf)
    return args, kwargs


def _stream_among(tree: Any, width: int) -> Tensor:
    """Return the stream among arguments: the first tensor of floats [batch, pos, `width`]."""
    floats = (tensor for tensor in tensors_in(tree) if tensor.is_floating_point())
    return next(tensor for tensor in floats if tensor.ndim == 3 and tensor.shape[-1] == width)


def _weights_of(module: nn.Module, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight [in, out] and the bias of a linear map, from its outputs for unit vectors.

    Args:
        module: the map.
        size: the size of its input.
        like: a tensor with the precision and the device of its input.
    """
    bias = module(like.new_zeros(1, 1, size))[0, 0]
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    return (module(unit[None])[0] - bias).detach(), bias.detach()


def _instead(value: Tensor, output: Any) -> Tensor:
    """Return `value` instead of an output. This function is used as a hook."""
    return value


def _linear_of(weight: Float[Tensor, "d_in d_out"], bias: Float[Tensor, " d_out"]) -> Linear:
    """Return the linear map of a weight and a bias."""
    linear = nn.utils.skip_init(Linear, *weight.shape, device=weight.device, dtype=weight.dtype)
    linear.weight.copy_(weight.T)
    linear.bias.copy_(bias)
    return linear.requires_grad_(False)
