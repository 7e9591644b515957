"""A view of an attached decoder as blocks with branches and weights.

It is used for graphs and sums of components. `models.from_hf` converts the families that it
supports. For any other family, the view is created from a run on fourteen tokens:

1. Record the inputs and outputs of each module (`_recorded`).
2. Inside attention, the modules that read its input are its projections, and the module that reads
   z is its output map. They are linear, so unit vectors give their weights (`_weights_of`).
3. The columns of the projections on which a head's queries, keys or values depend belong to this
   head. They are found by autograd (`_columns_of`).
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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import HookPoint, Identity, position_offset, start_of_piece
from hooks.base import agree, carried, is_same, mapped, tensors_in, without_gradients
from hooks.shared import Session, hooks_disabled
from models.adapters import AdaptedMap, adapted_map
from models.attached.context import AttachedContext
from models.attached.layout import BlockLayout
from models.attached.original import logits_of, tokens_for
from models.attached.parts import norm_of
from models.attached.probe import Call, ProbeRun, arguments_of
from models.block import Branch
from models.mode import mode
from models.norm import LayerNorm, RMSNorm
from models.weights import QueryKeyValueWeights

STREAM = "batch pos d_model"
TOLERANCE = 1e-4
"""The tolerance in float32, relative to the largest logit.

A wrong part changes the logits by far more.
"""


class ViewContext(NamedTuple):
    """The values that attention reads besides the stream, in a run of some texts.

    Attributes:
        arguments: the model's arguments besides the tokens.
        calls: the arguments of each attention module, in the order of the blocks.
    """

    arguments: dict[str, Any]
    calls: tuple[tuple[Any, Any], ...]


class PlainView(nn.Module):
    """An attached model as a plain transformer: a sum of branches with weights.

    See the docstring of the file.

    Args:
        language: the attached model's parts (`Attached`).

    Attributes:
        config: its sizes.
        blocks: the blocks, with branches as in `models.Transformer`.
        ln_final: the norm that the unembedding reads.

    Raises:
        ValueError: if a part is not found, or if the view has other logits than the model. The
            error names the part.
    """

    language: Any
    config: Any
    _model: Any
    _head: Any

    @without_gradients
    def __init__(self, language: Any) -> None:
        super().__init__()
        model = language.model
        layouts = language.layouts
        # Do not register these as submodules. Otherwise their points and parameters would belong to
        # the view.
        vars(self).update(_model=model, language=language, config=language.config)
        self.tokenizer = language.tokenizer
        for name in ("embed", "pos_embed"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        _require_parts(language)
        tokens = tokens_for(model)
        with mode(model, training=False):
            calls, logits = _recorded(language, tokens)
            context = _view_context_of(
                language, [layout.attention for layout in layouts], tokens=tokens, arguments={}
            )
            self.blocks = nn.ModuleList(
                ViewBlock(n, layout, points=model.blocks[n], calls=calls, context=context)
                for n, layout in enumerate(layouts)
            )
            modules = language.unembed.modules
            norm: Any = getattr(model, "ln_final", None)
            has_norm = norm is not None and norm.module is modules[0]
            self.ln_final = _norm_like(calls[norm.module]) if has_norm else Identity()
            vars(self)["_head"] = modules[has_norm:]
            self.eval()
            ours = self(tokens)
        if not agree(ours, logits, TOLERANCE):
            raise _not_found(None, "blocks that are sums of their parts")

    def forward(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> Tensor:
        """Return the model's logits, computed from its parts."""
        context = self.context(tokens, **arguments)
        mask = arguments.get("attention_mask")
        real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        with position_offset(start_of_piece(), real):
            resid = self.input_resid(tokens, context)
            for block in self.blocks:
                resid = block(resid, context)
            return self.unembed(resid)

    def context(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> ViewContext:
        """Run the model, and return the arguments of its attention modules besides the stream."""
        if isinstance(mask := arguments.get("attention_mask"), Tensor) and mask.ndim == 2:
            arguments = {**self.language.positions_of(mask), **arguments}
        layouts = self.language.layouts
        attention = [layout.attention for layout in layouts]
        return _view_context_of(self.language, attention, tokens=tokens, arguments=arguments)

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: ViewContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that enters the first block."""
        return self.language.input_resid(tokens, AttachedContext(context.arguments))

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of a residual stream."""
        resid = self.ln_final(resid)
        for module in self._head:
            resid = module(resid)
        return self.language.unembed.finished(resid)

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
        factor = self.language.unembed.factor
        return weight * factor, bias * factor

    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Return the logits of the `last` positions; 0 means all."""
        return self.unembed(resid)[:, -last:]


def _require_parts(language: Any) -> None:
    """Require that every block is a sum of attention with heads and an MLP.

    Raises:
        ValueError: if it is not. The error names the missing part.
    """
    for n, layout in enumerate(language.layouts):
        if layout.mixer_out is not None:
            raise _not_found(n, "attention as its only mixer of positions, without mixer_out,")
        if layout.mid_out is not None:
            raise _not_found(
                n, "norms of the inputs of its sublayers, not of the sum with the stream,"
            )
        has_points = hasattr(language.model.blocks[n], "attn")
        if layout.attention is None or layout.attn_out is None or not has_points:
            raise _not_found(
                n, "attention at points (attn.q, ...) whose output is added (attn_out)"
            )
        if shards := carried(language.model.blocks[n].attn.z, "shards"):
            raise _not_found(n, f"heads that are not split over {shards.mesh.size()} processes")
    if not language.has("unembed"):
        raise _not_found(None, "an unembedding that reads only the stream")


class ViewBlock(nn.Module):
    """A block of the view.

    Args:
        n: its index.
        layout: its modules.
        points: the points of the attached block.
        calls: the recorded inputs and outputs of each module.
        context: the context of the recorded run.
    """

    def __init__(
        self,
        n: int,
        layout: BlockLayout,
        points: Any,
        calls: dict[nn.Module, Call],
        context: ViewContext,
    ) -> None:
        super().__init__()
        norms = {name: calls[norm.module] for name, norm in layout.norms.items()}
        self.resid_pre, self.resid_post = HookPoint(STREAM), HookPoint(STREAM)
        self.attn_out = HookPoint(STREAM, "what attention adds to the residual stream")
        self.ln1, self.ln1_post = (_norm_like(norms.get(name)) for name in ("ln1", "ln1_post"))
        stream = calls[layout.block].inputs[0]
        read = norms["ln1"].output if "ln1" in norms else stream
        assert read is not None
        self.attn = ViewAttention(
            n, layout, points=points.attn, read=read, calls=calls, context=context
        )
        self.is_parallel = layout.mid_in is None
        self.has_mlp = layout.mlp_out is not None
        if layout.mlp_out is None:
            return
        self.mlp_out = HookPoint(STREAM, "what the MLP adds to the residual stream")
        if not self.is_parallel:
            self.resid_mid = HookPoint(STREAM, "residual stream between the two sublayers")
        modules, read_norm = _mlp_modules(
            n, layout, calls=calls, norms=[norms.get("ln2"), norms.get("ln1")]
        )
        self.mlp = ViewMLP(modules, layout.mlp_out.factor)
        if layout.hidden is not None:
            adapter = _adapted(n, layout.hidden.post, layout.mlp_out.factor)
            if adapter is not None:
                self.mlp.adapter, self.mlp.post = adapter, points.mlp.post
        self.ln2, self.ln2_post = _norm_like(read_norm), _norm_like(norms.get("ln2_post"))

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The sublayers whose outputs `forward` adds to the stream, in order."""
        attention = Branch(self.resid_pre, self.ln1, self.attn, self.ln1_post, self.attn_out)
        if not self.has_mlp:
            return (attention,)
        reads = self.resid_pre if self.is_parallel else self.resid_mid
        return attention, Branch(reads, self.ln2, self.mlp, self.ln2_post, self.mlp_out)

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ViewContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that leaves the block."""
        resid = self.resid_pre(resid)
        attention, *mlps = self.branches
        mid = resid + attention(resid, context)
        if not mlps:
            return self.resid_post(mid)
        if self.is_parallel:
            return self.resid_post(mid + mlps[0](resid))
        mid = self.resid_mid(mid)
        return self.resid_post(mid + mlps[0](mid))


class ViewAttention(QueryKeyValueWeights, nn.Module):
    """Attention of the view: the model's own module between linear maps of the view.

    Args:
        layer: the index of the block.
        layout: the block's modules.
        points: the attached model's points of this attention, which fire as the module runs.
        read: the input of attention in the recorded run, [batch, pos, d_model].
        calls: the recorded inputs and outputs of each module.
        context: the context of the recorded run.

    Attributes:
        qkv: the joined projections: query heads, key heads, value heads.
        output: the output map, with the factor of the term. It contains the adapter.
        adapter: the output map as a map with an adapter; None without an adapter.
    """

    module: Any
    projections: list[nn.Module]
    map: nn.Module

    def __init__(
        self,
        layer: int,
        layout: BlockLayout,
        points: Any,
        read: Tensor,
        calls: dict[nn.Module, Call],
        context: ViewContext,
    ) -> None:
        super().__init__()
        self.layer = layer
        module = layout.attention
        assert module is not None
        for name, point in points.named_children():
            setattr(self, name, point)
        inside = [calls[part] for part in module.modules() if part in calls and part is not module]
        projections = _outermost([call for call in inside if _is_projection(call, read)])
        if not projections:
            raise _not_found(layer, "projections that read the input of attention")
        # Do not register this as a submodule, because its parameters do not belong to the view.
        vars(self).update(module=module, projections=[call.module for call in projections])
        leaves = [
            call.output.to(read).requires_grad_() for call in projections if call.output is not None
        ]
        values = self._values(leaves, read, context)
        q, k, v, z = (values[name] for name in "qkvz")
        self.heads = [part.shape[2] for part in (q, k, v)]
        joined_z = z.detach().flatten(2)
        # The parts of a map with an adapter read z too.
        parts_of_adapters = set[nn.Module]()
        for part in module.modules():
            if _adapted(layer, part):
                parts_of_adapters |= {*part.modules()} - {part}
        maps = [
            call
            for call in inside
            if call.module not in parts_of_adapters
            and call.inputs
            and agree(call.inputs[0], joined_z)
        ]
        if len({part.shape[3] for part in (q, k, v, z)}) > 1 or not maps:
            raise _not_found(layer, "heads of one size and a map that reads z")
        vars(self)["map"] = maps[-1].module
        columns = _columns_of((q, k, v), leaves)
        if columns is None:
            raise _not_found(layer, "projections in which each column belongs to one head")
        self.places = columns.argsort().split([leaf.shape[-1] for leaf in leaves])
        parts = [_weights_of(call.module, read.shape[-1], q) for call in projections]
        weight, bias = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        self.qkv = _linear_of(weight[:, columns], bias[columns])
        factor = layout.attn_out.factor if layout.attn_out else 1.0
        weight, bias = _weights_of(self.map, z.shape[2] * z.shape[3], q)
        self.output = _linear_of(weight * factor, bias * factor)
        self.adapter = _adapted(layer, self.map, factor)

    def _values(
        self, leaves: Sequence[Tensor], x: Tensor, context: ViewContext
    ) -> dict[str, Float[Tensor, "batch pos _head d_head"]]:
        """Return queries, keys, values and z, if the projections return the given outputs.

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
        args, kwargs = context.calls[self.layer]
        stream = _stream_among((args, kwargs), x.shape[-1])
        args, kwargs = mapped((args, kwargs), lambda leaf: x if leaf is stream else leaf)
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
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """The output projections."""
        return self.output.weight.T.unflatten(0, (self.heads[0], -1))

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """The output bias."""
        return self.output.bias

    def _weights(self) -> list[Tensor]:
        """Return the weights of queries, keys and values, each [head, d_model, d_head]."""
        rows = self.qkv.weight.unflatten(0, (sum(self.heads), -1))
        return [part.mT for part in rows.split(self.heads)]

    def _biases(self) -> list[Tensor]:
        """Return the biases of queries, keys and values, each [head, d_head]."""
        return list(self.qkv.bias.unflatten(0, (sum(self.heads), -1)).split(self.heads))


class ViewMLP(nn.Module):
    """The model's MLP: modules that run one after another.

    The output of the last module is multiplied by a factor.

    Attributes:
        adapter: the map that reads the hidden layer, if it has an adapter; otherwise None.
        post: the point of the hidden layer, if there is an adapter.
    """

    parts: Sequence[nn.Module]
    factor: float
    adapter: AdaptedMap | None

    def __init__(self, modules: Sequence[nn.Module], factor: float) -> None:
        super().__init__()
        vars(self).update(parts=modules, factor=factor, adapter=None)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the output of the MLP."""
        shape = x.shape
        for module in self.parts:
            x = next(tensors_in(module(x)))
        # Experts may see rows and positions as one axis, so restore the shape.
        x = x.view(shape)
        return x if self.factor == 1 else x * self.factor


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
    language: Any, attention: Sequence[Any], tokens: Tensor, arguments: dict[str, Any]
) -> ViewContext:
    """Run the model, and return the arguments of its attention modules as a context.

    Args:
        language: the attached model's parts.
        attention: the attention modules.
        tokens: the texts.
        arguments: the model's arguments besides the tokens.
    """
    run = partial(language.run, tokens, **arguments)
    calls = hooks_disabled(arguments_of, attention, run)
    return ViewContext(arguments, tuple(calls[module] for module in attention))


def _norm_like(call: Call | None) -> nn.Module:
    """Return a norm of `models` with the same gain, bias and epsilon as a recorded norm.

    The gain is the weight, or 1 + weight: the one that gives the recorded output. For None, the
    result is an identity.
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
    return min(candidates, key=lambda candidate: float((candidate(x) - output).abs().max()))


def _mlp_modules(
    n: int, layout: BlockLayout, calls: dict[nn.Module, Call], norms: Sequence[Call | None]
) -> tuple[list[nn.Module], Call | None]:
    """Return the modules of an MLP in the order in which they run, and the norm before them.

    The first module reads the output of this norm. If no norm fits, the norm is None, and the first
    module reads the residual stream. Each further module reads the output of the module before. The
    last module returns the output of the MLP, before a norm `ln2_post`.

    Args:
        n: the index of the block.
        layout: the parts of the block.
        calls: the calls of a run, by module.
        norms: the calls of the norms that the MLP may read.
    """
    added = layout.mlp_out
    after = layout.norms.get("ln2_post")
    assert added is not None
    wanted = calls[added.module].output if after is None else calls[after.module].inputs[0]
    stream = calls[layout.mid_in or layout.block].inputs[0]
    inside = [calls[part] for part in layout.block.modules() if part in calls]
    inside.sort(key=lambda call: call.began)
    for norm in [*filter(None, norms), None]:
        read = stream if norm is None else norm.output
        if modules := _chain(read, wanted, inside):
            return modules, norm
    raise _not_found(n, "modules that read the norm and return the output of the MLP")


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
    return fits and any(True for _ in call.module.parameters()) and is_same(call.inputs[0], read)


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
    of values. It is None unless each column belongs to exactly one head.

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


def _linear_of(weight: Float[Tensor, "d_in d_out"], bias: Float[Tensor, " d_out"]) -> nn.Linear:
    """Return the linear map of a weight and a bias."""
    linear = nn.utils.skip_init(nn.Linear, *weight.shape, device=weight.device, dtype=weight.dtype)
    linear.weight.copy_(weight.T)
    linear.bias.copy_(bias)
    return linear.requires_grad_(False)
