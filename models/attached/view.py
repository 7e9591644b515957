"""A view of an attached decoder as blocks with branches and weights, for graphs and sums of components.

`models.from_hf` rewrites the families that it knows. For any other the view is made from a run on fourteen tokens:

1. Record what each module reads and gives (`recorded`).
2. The modules that read what attention reads are its projections, and the one that reads z is its output map. They are
   linear, so unit vectors give their weights (`weights_of`).
3. The columns of the projections on which a head's queries, keys or values depend are that head's, by autograd
   (`columns_of`).
4. A norm is one of ours with the same gain, bias and epsilon. The MLP is the module that reads its norm and gives what
   is added.
5. The view's attention puts its queries, keys and values in the place of the projections' outputs, runs the model's own
   module, and takes z from what the output map reads. So rotation, norms of queries, masks and kernels are the model's.
6. The view must give the model's logits. Otherwise it is refused.

The points of attention and of the embeddings are those of the attached model. Weights are copies.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import HookPoint, Identity, position_offset, start_of_piece
from hooks.base import without_gradients
from hooks.shared import carried
from models.attached.context import AttachedContext
from models.attached.example import tokens_for
from models.attached.layout import BlockLayout
from models.attached.probe import Call
from models.attached.sums import agree
from models.attached.view_parts import (
    ViewContext,
    missing,
    mlp_modules,
    norm_like,
    recorded,
    view_context_of,
    weights_of,
)
from models.attached.view_sublayers import ViewAttention, ViewMLP
from models.block import Branch
from models.mode import mode

STREAM = "batch pos d_model"
TOLERANCE = 1e-4
"""Of the largest logit, in float32. A part of another kind changes logits by far more."""


class PlainView(nn.Module):
    """The view of an attached model; see above.

    Args:
        language: the attached model's parts.

    Attributes:
        config: its sizes.
        blocks: with branches, as those of `models.Transformer`.
        ln_final: the norm that the unembedding reads.

    Raises:
        ValueError: naming the part that was not found, or if the view has other logits.
    """

    language: Any
    config: Any
    _model: Any
    _head: Any

    @without_gradients
    def __init__(self, language: Any) -> None:
        super().__init__()
        model, layouts = language.model, language.layouts
        # Not as submodules, whose points and parameters would be the view's.
        vars(self).update(_model=model, language=language, config=language.config)
        self.tokenizer = language.tokenizer
        for name in ("embed", "pos_embed"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        for n, layout in enumerate(layouts):
            if layout.mixer_out is not None:
                raise missing(n, "attention as its only mixer of positions, without mixer_out,")
            if layout.mid_out is not None:
                raise missing(
                    n, "norms of what its sublayers read, not of the sum with the stream,"
                )
            if layout.attention is None or layout.attn_out is None:
                raise missing(
                    n, "attention at points (attn.q, ...) whose output is added (attn_out)"
                )
            if shards := carried(model.blocks[n].attn.z, "shards"):
                rule = f"heads that are not split over {shards.mesh.size()} processes"
                raise missing(n, rule)
        if not language.has("unembed"):
            raise missing(None, "an unembedding that reads the stream alone")
        tokens = tokens_for(model)
        with mode(model, training=False):
            calls, logits = recorded(language, tokens)
            context = view_context_of(
                language, [layout.attention for layout in layouts], tokens, {}
            )
            self.blocks = nn.ModuleList(
                ViewBlock(n, layout, model.blocks[n], calls, context)
                for n, layout in enumerate(layouts)
            )
            modules = language.unembed.modules
            norm: Any = getattr(model, "ln_final", None)
            has_norm = norm is not None and norm.module is modules[0]
            self.ln_final = norm_like(calls[norm.module]) if has_norm else Identity()
            vars(self)["_head"] = modules[has_norm:]
            self.eval()
            ours = self(tokens)
        if not agree(ours, logits, TOLERANCE):
            raise missing(None, "blocks that are sums of their parts")

    def forward(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> Tensor:
        """The model's logits, from its parts."""
        context, mask = self.context(tokens, **arguments), arguments.get("attention_mask")
        real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        with position_offset(start_of_piece(), real):
            resid = self.input_resid(tokens, context)
            for block in self.blocks:
                resid = block(resid, context)
            return self.unembed(resid)

    def context(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> ViewContext:
        """Return what attention reads besides the stream, from a run of the model itself."""
        if isinstance(mask := arguments.get("attention_mask"), Tensor) and mask.ndim == 2:
            arguments = {**self.language.positions_of(mask), **arguments}
        layouts = self.language.layouts
        attention = [layout.attention for layout in layouts]
        return view_context_of(self.language, attention, tokens, arguments)

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: ViewContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters the first block."""
        return self.language.input_resid(tokens, AttachedContext(context.arguments))

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits from a residual stream."""
        resid = self.ln_final(resid)
        for module in self._head:
            resid = module(resid)
        return self.language.unembed.finished(resid)

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """The unembedding, with the model's factor of logits, a copy."""
        return self._unembedding()[0]

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """The bias of the unembedding, likewise."""
        return self._unembedding()[1]

    @without_gradients
    def _unembedding(self) -> tuple[Tensor, Tensor]:
        if len(self._head) != 1:
            raise missing(None, "one linear map from the final norm to the logits")
        like = next(self._model.parameters())
        weight, bias = weights_of(self._head[0], self.config.d_model, like)
        factor = self.language.unembed.factor
        return weight * factor, bias * factor

    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Logits of the `last` positions; 0 means all."""
        return self.unembed(resid)[:, -last:]


class ViewBlock(nn.Module):
    """A block of the view.

    Args:
        n: its index.
        layout: its modules.
        points: those of the attached block.
        calls: what each module read and gave.
        context: of the recorded run.
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
        self.ln1, self.ln1_post = (norm_like(norms.get(name)) for name in ("ln1", "ln1_post"))
        stream = calls[layout.block].inputs[0]
        read = norms["ln1"].output if "ln1" in norms else stream
        assert read is not None
        self.attn = ViewAttention(n, layout, points.attn, read, calls, context)
        self.is_parallel = layout.mid_in is None
        self.has_mlp = layout.mlp_out is not None
        if layout.mlp_out is None:
            return
        self.mlp_out = HookPoint(STREAM, "what the MLP adds to the residual stream")
        if not self.is_parallel:
            self.resid_mid = HookPoint(STREAM, "residual stream between the two sublayers")
        modules, read_norm = mlp_modules(n, layout, calls, [norms.get("ln2"), norms.get("ln1")])
        self.mlp = ViewMLP(modules, layout.mlp_out.factor)
        self.ln2, self.ln2_post = norm_like(read_norm), norm_like(norms.get("ln2_post"))

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
        """The residual stream leaving the block."""
        resid = self.resid_pre(resid)
        attention, *mlps = self.branches
        mid = resid + attention(resid, context)
        if not mlps:
            return self.resid_post(mid)
        if self.is_parallel:
            return self.resid_post(mid + mlps[0](resid))
        mid = self.resid_mid(mid)
        return self.resid_post(mid + mlps[0](mid))
