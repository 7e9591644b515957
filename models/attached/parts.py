"""Parts of a model that the tensors of a run reveal: terms, norms, hidden layers and embeddings.

1. A term is the output of a module, times a factor, that was added to the stream (`summand`,
   `parallel`).
2. A norm is a module whose output is its input divided by a scale (`norm_of`).
3. A hidden layer is the output of a module without weights, with or without a gate, that a later
   linear map reads (`hidden_of`).
4. The stream that enters the first block is a term of the embedding of tokens, or the sum of this
   term and position vectors (`embeddings_of`).
5. A norm reads the stream from the last block (`final_norm_of`). In a text, this norm and a linear
   map compute the logits (`unembed_of`).
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import (
    HALF,
    WRONG_SUM,
    agree,
    at_least_float32,
    is_close,
    is_same,
    norm_rounding,
    sum_error,
    whole,
    widened,
)
from hooks.shared import hooks_disabled
from models.attached.original import base_of, embedding_of, text_config
from models.attached.probe import Call, ProbeRun
from models.attached.unchanged import Unchanged

_MOST = 0.5
"""A term explains a change if the rest has at most this share of the length of the change.

This is no limit of rounding: the right term leaves almost nothing, and another term leaves more
than the whole change.
"""
_STAYS = 0.1
"""If the input of a norm is doubled, or if its mean changes and the norm subtracts it, the output
differs by at most this share of the largest number.

This is no limit of rounding: the output of a norm hardly changes, and a copy of the input doubles.
"""


@dataclass(frozen=True)
class Summand:
    """A value that is added to the stream: `factor` times the output of a module.

    Attributes:
        module: the module.
        factor: the factor.
        is_overwritten: whether the model later writes into that output. A cache of the output would
            then contain the new numbers, so points show a copy.
    """

    module: nn.Module
    factor: float = 1.0
    is_overwritten: bool = False


def summand(
    before: Tensor, after: Tensor, calls: Iterable[Call], factors: Iterable[float] = (1.0,)
) -> tuple[Call, Summand] | None:
    """Return the call whose output, times one of the factors, turns `before` into `after`.

    The sum is computed again in the model's precision, so the right call gives the same bits. The
    call with the smallest error is returned. If several calls have this error, it is the call that
    ended last. The result is None if every error is more than rounding; see `sum_error`.

    Args:
        before, after: the stream before and after the addition.
        calls: the calls that may compute the term.
        factors: the possible factors of the output.
    """
    best = WRONG_SUM
    explained = None
    for factor in factors if before.shape == after.shape else ():
        for call in sorted(calls, key=lambda c: c.ended, reverse=True):
            output = call.output
            if output is None or output.shape != before.shape or output.dtype != before.dtype:
                continue
            term = output if factor == 1 else output * factor
            error = sum_error(after, before, term)
            if error < best and (error == 0 or _explains(term, after - before)):
                best = error
                explained = (call, Summand(call.module, factor, call.is_overwritten))
    return explained


def _explains(term: Tensor, change: Tensor) -> bool:
    """Return whether a term is most of a change of the stream.

    If the stream is large, its rounding in half precision is larger than the difference between two
    small terms. Then both terms fit the sum, so this function compares a term with the change of
    the stream.
    """
    rest = at_least_float32(change - term)
    return bool(rest.norm() <= _MOST * at_least_float32(change).norm())


def factors_of(*owners: Any) -> list[float]:
    """Return the numbers in modules and configs by which a model may multiply."""
    numbers = list[float]()
    for owner in owners:
        numbers += [value for value in vars(owner).values() if isinstance(value, float)]
    return [value for value in dict.fromkeys(numbers) if abs(value) > 1e-3 and value != 1]


def parallel(
    pre: Tensor, post: Tensor, calls: Iterable[Call], factors: Sequence[float] = (1.0,)
) -> list[tuple[Call, Summand]]:
    """Return the two calls, in order, whose outputs are added to the stream together.

    Each output is multiplied by one of the factors. The list is empty if no pair of calls explains
    the addition.

    Args:
        pre: the stream before the addition.
        post: the stream after the addition.
        calls: the calls that may be in the pair.
        factors: the possible factors of the outputs.
    """
    fitting = [
        call
        for call in sorted(calls, key=lambda call: call.ended, reverse=True)
        if call.output is not None and call.output.shape == pre.shape == post.shape
    ]
    best = WRONG_SUM
    explained = list[tuple[Call, Summand]]()
    for second, first in itertools.combinations(fitting, 2):
        if first.ended >= second.began:
            continue
        pair = first, second
        outputs = [call.output for call in pair if call.output is not None]
        scales = _factors(outputs, post - pre, factors)
        terms = [
            output if scale == 1 else output * scale
            for output, scale in zip(outputs, scales, strict=True)
        ]
        error = min(sum_error(post, *order) for order in itertools.permutations([*terms, pre]))
        if error < best:
            best = error
            explained = [
                (call, Summand(call.module, scale, call.is_overwritten))
                for call, scale in zip(pair, scales, strict=True)
            ]
    return explained


def _factors(terms: Sequence[Tensor], change: Tensor, factors: Sequence[float]) -> list[float]:
    """Return the likely factor of each term, if the change is the sum of factor times term.

    A least-squares fit of the change gives each term a coefficient. The factor of a term is the
    possible factor that is nearest to its coefficient.

    Args:
        terms: the terms.
        change: the change of the stream that the terms should explain.
        factors: the possible factors.
    """
    if len(factors) == 1:
        return [factors[0]] * len(terms)
    columns = torch.stack([term.double().flatten() for term in terms], 1)
    solution = torch.linalg.lstsq(columns, change.double().flatten()[:, None]).solution
    return [min(factors, key=lambda factor: abs(factor - best)) for best in solution[:, 0].tolist()]


@dataclass(frozen=True)
class TracedNorm:
    """A norm, `out = (x - mean) / scale * gain + bias` along the last axis.

    Attributes:
        module: the norm.
        centered: whether the mean is subtracted.
        eps: the number that is added to the mean square.
        bias: whether the module's bias is added.
    """

    module: nn.Module
    centered: bool
    eps: float
    bias: bool

    def scale(self, x: Tensor) -> Tensor:
        """Return the scale by which the norm divides, [batch, pos, 1], in float32 at least."""
        return (self._centered(x).square().mean(-1, keepdim=True) + self.eps).sqrt()

    def rescaled(self, output: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Return the output with the scale `after` instead of `before`."""
        float32 = at_least_float32(output)
        bias = at_least_float32(self.module.bias) if self.bias else 0.0  # type: ignore[arg-type]
        return ((float32 - bias) * (before / after) + bias).to(output.dtype)

    def _centered(self, x: Tensor) -> Tensor:
        """Return the input in float32 at least, minus its mean if the norm subtracts the mean."""
        x = at_least_float32(x)
        return x - x.mean(-1, keepdim=True) if self.centered else x


def norm_of(call: Call) -> TracedNorm | None:
    """Return the norm that a module computed in this call; None if it is not a known norm."""
    module = call.module
    output = call.output
    if output is None or len(call.inputs) != 1 or call.inputs[0].shape != output.shape:
        return None
    if any(True for _ in module.children()):
        # This may be a sublayer with a norm inside, whose other parts change so little that half
        # precision hides them.
        return None
    x, output = _without_half(call)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    for part in (weight, bias):
        # A parameter is on `meta` if it is stored elsewhere until the module runs.
        if isinstance(part, Tensor) and (part.is_meta or part.shape != x.shape[-1:]):
            return None
    gains: list[Tensor | float] = [1.0]
    if isinstance(weight, Tensor):
        given_gain = at_least_float32(whole(weight).to(x.device))
        gains = [given_gain, 1 + given_gain]
    shift = at_least_float32(whole(bias).to(x.device)) if isinstance(bias, Tensor) else 0.0
    if _hands_on(call, x, output):
        return None
    fits: list[tuple[float, TracedNorm]] = []
    for centered, eps in itertools.product((True, False), _epsilons(module)):
        candidate = TracedNorm(module, centered, eps=eps, bias=isinstance(bias, Tensor))
        shape = candidate._centered(x) / candidate.scale(x)
        for gain in gains:
            normed = shape * gain + shift
            error = (normed - at_least_float32(output)).abs().max() / normed.abs().max().clamp(
                min=1e-30
            )
            if error < norm_rounding(output.dtype):
                fits.append((float(error.detach()), candidate))
    if len({candidate.centered for _, candidate in fits}) > 1:
        # The mean of every input is 0, so the output does not show whether the norm subtracts it.
        centered = _subtracts_mean(call, x, output)
        fits = [(error, norm) for error, norm in fits if norm.centered == centered]
    if len({candidate.eps for _, candidate in fits}) > 1:
        return _by_small_input(call.module, x, [norm for _, norm in fits], gains, shift)
    return fits[0][1] if fits else None


def _by_small_input(
    module: nn.Module,
    x: Tensor,
    norms: Sequence[TracedNorm],
    gains: Sequence[Tensor | float],
    shift: Tensor | float,
) -> TracedNorm:
    """Return the norm with the right `eps`: the norm that predicts the module's outputs for small
    inputs.

    A norm divides by `sqrt(mean square + eps)`. For usual inputs the mean square is much larger
    than `eps`, so norms with different `eps` have the same output up to rounding. Therefore a copy
    of the module runs on the input times small factors. There is one factor for each candidate
    `eps` above 0; it makes the mean square of the input about as large as this `eps`. The norm
    whose output is closest to the output of the copy is returned. If the copy cannot run, the first
    norm is returned, whose `eps` is the likeliest.

    Args:
        module: the module.
        x: its input.
        norms: the norms that fit, the likely ones first.
        gains: the possible gains.
        shift: the bias.
    """
    square = norms[0].scale(x).square().mean()
    epsilons = {norm.eps for norm in norms} - {0.0}
    sizes = [(eps / square) ** 0.5 for eps in epsilons]
    small = torch.cat([x * size for size in sizes])
    output = _made_by_copy(module, small)
    if output is None:
        return norms[0]

    def error(norm: TracedNorm) -> float:
        """Return the largest error of a norm with the best gain."""
        shape = norm._centered(small) / norm.scale(small)
        gaps = [(shape * gain + shift - output.to(x.device)).abs().max() for gain in gains]
        return torch.stack(gaps).detach().nan_to_num(nan=torch.inf).min().item()

    return min(norms, key=error)


def _subtracts_mean(call: Call, x: Tensor, output: Tensor) -> bool:
    """Return whether the output of a norm stays the same if the mean of its input changes.

    If no copy of the module runs, the result is True.
    """
    moved = _made_by_copy(call.module, x + x.abs().max())
    return moved is None or agree(moved, output, _STAYS)


def _without_half(call: Call) -> tuple[Tensor, Tensor]:
    """Return the input and output of a module; in half precision, of a copy in float32.

    Rounding to half precision hides the operation of a norm.
    """
    x = call.inputs[0]
    output = call.output
    assert output is not None
    if output.dtype in HALF:
        precise_x = widened(x)
        precise = _made_by_copy(call.module, precise_x)
        if precise is not None and precise.dtype not in HALF:
            return precise_x, precise
    return x, output


def _hands_on(call: Call, x: Tensor, output: Tensor) -> bool:
    """Return whether a module returns its input, as dropout does, and is not a norm.

    A norm also returns its input, up to rounding, if the input is already normalized. To tell them
    apart, the input is doubled: the output of a norm stays the same.
    """
    if not is_close(output, x):
        return False
    twice = _made_by_copy(call.module, 2 * x)
    return twice is None or not agree(twice, output, _STAYS)


def _made_by_copy(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a copy of a module on the CPU; None if the copy does not run.

    The copy has the precision of the input.
    """
    # Copying may fail in any way, for example because the weights have a quantized dtype.
    with contextlib.suppress(Exception):
        output = hooks_disabled(copy.deepcopy(module).cpu().to(x.dtype), x)
        if isinstance(output, Tensor):
            return output.detach()
    return None


def _epsilons(module: nn.Module) -> list[float]:
    """Return the possible values of a norm's `eps`, the likely ones first.

    They are the small numbers among the module's attributes, and then the constants that families
    usually have in their code.
    """
    small = [
        value for value in vars(module).values() if isinstance(value, float) and 0 <= value < 0.1
    ]
    return list(dict.fromkeys([*small, 1e-5, 1e-6, 0.0]))


class Hidden(NamedTuple):
    """The modules around the hidden layer of an MLP.

    Attributes:
        act: the nonlinearity.
        post: the map that reads the hidden layer.
        linear: the module whose output is multiplied by the output of the nonlinearity; None
            without a gate.
    """

    act: nn.Module
    post: nn.Module
    linear: nn.Module | None = None


def hidden_of(
    added: Call, calls: Sequence[Call], others: Sequence[Call], attention: nn.Module | None
) -> Hidden | None:
    """Return the hidden layer of an MLP; None if it is not found.

    Args:
        added: the call whose output the MLP adds to the stream.
        calls: the calls of the block.
        others: the calls whose outputs the other sublayers add.
        attention: the module that attends. Its calls are not part of a hidden layer.
    """
    began = max([call.ended for call in others if call.ended < added.began], default=-1)
    attending = [call for call in calls if call.module is attention]
    inside = [call for call in calls if began < call.began <= added.ended]
    for attends in attending:
        inside = [call for call in inside if not is_in(call, attends)]
    hidden = None
    for call in inside:
        if _is_nonlinearity(call, added):
            hidden = _around(call, inside, added) or hidden
    return hidden


def is_in(inner: Call, outer: Call) -> bool:
    """Return whether one call is part of another call, or the same call."""
    return outer.began <= inner.began and inner.ended <= outer.ended


def weights_in(module: nn.Module) -> Iterator[Tensor]:
    """Yield the weights of a module: its parameters, and its buffers of integers.

    Libraries such as GPTQ pack quantized weights into integers, and store them as buffers.
    """
    yield from module.parameters()
    for buffer in module.buffers():
        if not buffer.is_floating_point() and buffer.dtype != torch.bool:
            yield buffer


def _is_nonlinearity(call: Call, added: Call) -> bool:
    """Return whether a call computes a nonlinearity: no weights, the same shape, and not a norm."""
    read = call.inputs[0] if call.inputs else None
    output = call.output
    if read is None or output is None or read.shape != output.shape:
        return False
    if added.output is None or read.shape[:2] != added.output.shape[:2]:
        return False
    plain = all(weight.numel() == 1 for weight in weights_in(call.module))
    # A module that returns its input, as dropout does, does no arithmetic, so there is no rounding.
    return plain and not is_same(read, output) and norm_of(call) is None


def _around(act: Call, calls: Sequence[Call], added: Call) -> Hidden | None:
    """Return the hidden layer after a nonlinearity; None if no map reads it.

    Args:
        act: the call of the nonlinearity.
        calls: the calls among which the map and the gate are found.
        added: the call whose output the MLP adds to the stream.
    """
    activated = act.output
    assert activated is not None
    for last in calls:
        hidden = last.inputs[0] if last.inputs else None
        has_weights = any(True for _ in weights_in(last.module))
        if hidden is None or hidden.shape != activated.shape:
            continue
        if last.began < act.ended or not has_weights:
            continue
        # The output of the map must be all that the MLP adds. If it is only a part, as next to
        # experts, these are not all neurons of the MLP.
        if not any(is_same(last.output, value) for value in (added.output, *added.inputs)):
            continue
        linear = None
        for factor in calls:
            if factor is act or factor.output is None or factor.output.shape != activated.shape:
                continue
            if is_close(activated * factor.output, hidden) and not is_same(activated, hidden):
                linear = factor.module
        return Hidden(act.module, last.module, linear)
    return None


class Embeddings(NamedTuple):
    """The embeddings whose sum enters the first block.

    Attributes:
        tokens: the term of the embedding of tokens.
        positions: the module that returns position vectors; None if there is no such module.
        is_inside: whether the embedding of tokens runs inside the module that runs the blocks.
    """

    tokens: Summand
    positions: nn.Module | None
    is_inside: bool


def embeddings_of(
    model: Any, root: nn.Module, probe: ProbeRun, first: Call, stream: Tensor
) -> Embeddings | None:
    """Return the embeddings of a stack; None if the embedding of tokens does not enter the stream.

    Args:
        model: the model.
        root: the module that runs the blocks.
        probe: the run in which the blocks were called.
        first: the call of the first block.
        stream: the stream that enters the first block, [batch, pos, d_model].
    """
    embedding = embedding_of(root)
    before = [call for call in probe.single if call.ended < first.began and call.output is not None]
    tokens = next((call for call in before if call.module is embedding), None)
    if tokens is None or tokens.output is None or tokens.output.shape != stream.shape:
        return None
    term, positions = _embedding_terms(model, tokens, before, stream)
    began = next((call.began for call in probe.calls if call.module is root), -1)
    return Embeddings(term, positions, is_inside=tokens.began >= began)


def _embedding_terms(
    model: Any, tokens: Call, before: Sequence[Call], stream: Tensor
) -> tuple[Summand, nn.Module | None]:
    """Return the term of the embedding, and the module that returns the position vectors.

    The module is None if the stream is not the sum of the term and the output of a module.

    Args:
        model: the model.
        tokens: the call of the embedding.
        before: the calls before the first block.
        stream: the stream that enters the first block.
    """
    factors = [1.0, *factors_of(text_config(model)), stream.shape[-1] ** 0.5]
    alone = summand(torch.zeros_like(stream), stream, calls=[tokens], factors=factors)
    if alone is not None:
        return alone[1], None
    for call in before:
        vectors = _for_each_text(call.output, stream)
        if vectors is None:
            continue
        explained = summand(vectors, stream, calls=[tokens], factors=factors)
        if explained is not None:
            return explained[1], call.module
    return Summand(tokens.module, 1.0, tokens.is_overwritten), None


def _for_each_text(vectors: Tensor | None, like: Tensor) -> Tensor | None:
    """Return position vectors with a row for each text.

    The result is None if the tensor does not have the shape of position vectors.

    Args:
        vectors: the output of a module, [pos, d_model] or with axes in front.
        like: the stream, [batch, pos, d_model].
    """
    if vectors is None or vectors.ndim < 2 or vectors.shape[-2:] != like.shape[-2:]:
        return None
    return vectors.view(-1, *vectors.shape[-2:]).expand_as(like)


def final_norm_of(
    root: nn.Module, probe: ProbeRun, last: Call, has_streams: bool
) -> TracedNorm | None:
    """Return the norm that reads the stream from the last block; None without a single such norm.

    Args:
        root: the module that runs the blocks.
        probe: the run in which the blocks were called.
        last: the call of the last block.
        has_streams: whether the stream has several vectors for each token. If it has, the norm may
            read the sum of these vectors.
    """
    end = next((call.ended for call in probe.calls if call.module is root), math.inf)
    for call in probe.single:
        if not last.ended < call.began < end:
            continue
        # Nothing is computed between the last block and its norm, so there is no rounding.
        if call.inputs and is_same(call.inputs[0], last.output) and (norm := norm_of(call)):
            return norm
    return _norm_before_logits(probe, last) if has_streams else None


def _norm_before_logits(probe: ProbeRun, last: Call) -> TracedNorm | None:
    """Return the norm after the last block whose output the map to the logits reads."""
    later = [call for call in probe.single if call.began > last.ended and call.inputs]
    logits = probe.logits
    assert logits is not None
    heads = [
        call for call in later if call.output is not None and call.output.shape == logits.shape
    ]
    for call in later:
        for head in heads:
            # The map reads the same tensor, so there is no rounding.
            if is_same(head.inputs[0], call.output) and (norm := norm_of(call)):
                return norm
    return None


@dataclass(frozen=True)
class Unembedding:
    """A sequence of modules, whose last output is multiplied by a factor and gets a soft cap.

    Attributes:
        modules: the modules from the final norm, if there is one, to the unembedding.
        factor: the number by which the last output is multiplied.
        cap: the soft cap of the logits; 0 means no cap.
        unchanged: the modules and numbers that must not change; None while `attach` runs.
    """

    modules: tuple[nn.Module, ...]
    factor: float
    cap: float
    unchanged: Unchanged | None = None

    def __call__(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of a residual stream, with the final norm applied.

        Raises:
            HookError: if a module was replaced, or a number has changed, since `attach`.
        """
        if self.unchanged is not None and not torch.compiler.is_compiling():
            self.unchanged.require()
        for module in self.modules:
            resid = module(resid)
        return self.finished(resid)

    def finished(self, logits: Tensor) -> Tensor:
        """Return the logits, from the output of the last module: times the factor, with the cap."""
        logits = logits if self.factor == 1 else logits * self.factor
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def unembed_of(model: Any, probe: ProbeRun, last: Call) -> Unembedding | None:
    """Return the modules after the blocks, if they compute the logits.

    The result is None if the model has no logits, or if these modules do not compute them.

    Args:
        model: the model.
        probe: the run in which the blocks were called.
        last: the call of the last block.
    """
    if hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is None:
        return None
    modules: list[nn.Module] = []
    before = last
    for call in probe.single:
        # Each module reads the same tensor that the module before returned.
        if call.began > before.ended and call.inputs and is_same(call.inputs[0], before.output):
            modules.append(call.module)
            before = call
    logits = probe.logits
    output = before.output
    if output is None or logits is None or output.shape != logits.shape:
        return None
    config = text_config(model)
    config_cap = getattr(config, "final_logit_softcapping", None) or 0.0
    factors = factors_of(config, base_of(model))
    fitting: list[Unembedding] = []
    for factor in (1.0, *factors, *(1 / factor for factor in factors)):
        for cap in dict.fromkeys((config_cap, 0.0)):
            # Try the cap of the config first. If it is far above all logits of this run, it changes
            # less than rounding, so the run fits both with and without it.
            unembedding = Unembedding(tuple(modules), factor, cap)
            if is_close(unembedding.finished(output), logits, output * factor):
                fitting.append(unembedding)
    if not fitting:
        return None

    def error(unembedding: Unembedding) -> float:
        """Return the mean error of the logits."""
        finished = unembedding.finished(output).double()
        return float((finished - logits.double()).abs().mean())

    # In half precision, several factors are close, such as 0.7 and 2/3.
    best = min(fitting, key=error).factor
    return next(unembedding for unembedding in fitting if unembedding.factor == best)
