"""The parts of an attached model's blocks, found from what their modules read and gave in one run."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import Identity
from hooks.base import tensors_in
from hooks.shared import Session, hooks_disabled
from models.attached.example import logits_of
from models.attached.layout import BlockLayout
from models.attached.norms import norm_of
from models.attached.probe import Call, ProbeRun, arguments_of
from models.attached.sums import agree, is_same
from models.norm import LayerNorm, RMSNorm


class ViewContext(NamedTuple):
    """The values that attention reads besides the stream, in a run of some texts.

    Attributes:
        arguments: the model's, besides the tokens.
        calls: the arguments of each attention module, in the order of the blocks.
    """

    arguments: dict[str, Any]
    calls: tuple[tuple[Any, Any], ...]


def missing(n: int | None, what: str) -> ValueError:
    """The error for a part that was not found in block `n`, or in the model."""
    where = "a decoder" if n is None else f"block {n}"
    return ValueError(
        f"{where} must have {what} for graphs and sums of components; none was found, and models.from_hf does "
        "not know the family"
    )


def recorded(language: Any, tokens: Tensor) -> tuple[dict[nn.Module, Call], Tensor]:
    """Return what each module that runs once read and gave, and the logits."""
    probe = ProbeRun(copied=lambda tensor: tensor.detach().clone())

    def run() -> Tensor:
        with Session() as session:
            probe.listen(session, language.model)
            return logits_of(language.run(tokens))

    logits = hooks_disabled(run)
    return {call.module: call for call in probe.single}, logits


def view_context_of(
    language: Any, attention: Sequence[Any], tokens: Tensor, arguments: dict[str, Any]
) -> ViewContext:
    """The arguments of attention modules in a run of the model."""
    run = partial(language.run, tokens, **arguments)
    calls = hooks_disabled(arguments_of, attention, run)
    return ViewContext(arguments, tuple(calls[module] for module in attention))


def norm_like(call: Call | None) -> nn.Module:
    """One of our norms that gives what a module gave; an identity for None."""
    if call is None:
        return Identity()
    norm = norm_of(call)
    assert norm is not None
    assert call.output is not None
    size, weight = call.output.shape[-1], getattr(norm.module, "weight", None)
    # Some blocks see rows and positions as one axis.
    x, output = (part.view(1, -1, size) for part in (call.inputs[0], call.output))
    gains = [None] if weight is None else [weight, 1 + weight]
    bias: Any = norm.module.bias if norm.bias else None
    if bias is not None and not norm.centered:
        raise missing(None, "norms without a bias where no mean is subtracted")
    made = []
    for gain in gains:
        has_gain = gain is not None
        ours = (
            LayerNorm(size, norm.eps, has_gain, bias is not None)
            if norm.centered
            else RMSNorm(size, norm.eps, has_gain)
        ).to(x)
        for parameter, value in zip(ours.parameters(), (gain, bias), strict=False):
            parameter.copy_(value)
        made.append(ours.requires_grad_(False))
    return min(made, key=lambda ours: float((ours(x) - output).abs().max()))


def mlp_modules(
    n: int, layout: BlockLayout, calls: dict[nn.Module, Call], norms: Sequence[Call | None]
) -> tuple[list[nn.Module], Call | None]:
    """Return the chain of modules of an MLP, from its norm or the stream to what it adds, and that norm."""
    added, after = layout.mlp_out, layout.norms.get("ln2_post")
    assert added is not None
    wanted = calls[added.module].output if after is None else calls[after.module].inputs[0]
    stream = calls[layout.mid_in or layout.block].inputs[0]
    inside = [calls[part] for part in layout.block.modules() if part in calls]
    inside.sort(key=lambda call: call.began)
    for norm, read in [*((norm, norm.output) for norm in norms if norm), (None, stream)]:
        if modules := _chain(read, wanted, inside):
            return modules, norm
    raise missing(n, "modules that read the norm and give what the MLP adds")


def _chain(read: Tensor | None, wanted: Tensor | None, calls: Sequence[Call]) -> list[nn.Module]:
    """Modules, each of what the last one gave, from one that reads a value to one that gives another."""
    for n, call in enumerate(calls):
        if not call.inputs or call.output is None or not agree(call.inputs[0], read):
            continue
        if agree(call.output, wanted):
            return [call.module]
        if modules := _chain(call.output, wanted, calls[n + 1 :]):
            return [call.module, *modules]
    return []


def is_projection(call: Call, read: Tensor) -> bool:
    """Whether a module with weights read this, and gave a vector for each position."""
    fits = bool(call.inputs) and call.output is not None and call.output.ndim == 3
    # The same tensor: nothing is computed between.
    return fits and any(True for _ in call.module.parameters()) and is_same(call.inputs[0], read)


def outermost(calls: Sequence[Call]) -> list[Call]:
    """The calls of modules that are not inside another of these."""
    inner = {part for call in calls for part in call.module.modules() if part is not call.module}
    return [call for call in calls if call.module not in inner]


def columns_of(
    parts: Sequence[Float[Tensor, "batch pos _head d_head"]],
    outputs: Sequence[Float[Tensor, "batch pos _width"]],
) -> Int[Tensor, " column"] | None:
    """For each dimension of each head, of queries, keys and values in order, its column of the joined outputs.

    None if heads share columns, or a column belongs to none.
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
    every = torch.arange(sum(output.shape[-1] for output in outputs))
    return joined if torch.equal(joined.sort().values, every) else None  # whole numbers


def stream_among(tree: Any, width: int) -> Tensor:
    """The first tensor among arguments that is a vector of the stream for each position."""
    floats = (t for t in tensors_in(tree) if t.is_floating_point() and t.ndim == 3)
    return next(tensor for tensor in floats if tensor.shape[-1] == width)


def weights_of(module: nn.Module, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The weight [in, out] and the bias of a linear map."""
    bias = module(like.new_zeros(1, 1, size))[0, 0]
    unit = torch.eye(size, dtype=like.dtype, device=like.device)
    return (module(unit[None])[0] - bias).detach(), bias.detach()


def instead(value: Tensor, output: Any) -> Tensor:
    """The hook that puts a value in the place of an output."""
    return value


def linear_of(weight: Float[Tensor, "d_in d_out"], bias: Float[Tensor, " d_out"]) -> nn.Linear:
    """The linear map of a weight and a bias."""
    made = nn.utils.skip_init(nn.Linear, *weight.shape, device=weight.device, dtype=weight.dtype)
    made.weight.copy_(weight.T)
    made.bias.copy_(bias)
    return made.requires_grad_(False)
