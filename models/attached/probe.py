"""One run of a model on a few inputs, with the inputs and outputs of each module.

1. Every module gets two hooks, which copy its tensors, and record when it began and ended.
2. The attention function is replaced by a function that records its caller, and calls the model's
   own function.
3. If a module computes attention in its own code, a mode that sees each call of a function of
   PyTorch records products of matrices and softmaxes instead (`Watching`).
4. All hooks are removed, and the record remains.
5. The run must equal the run of the unchanged model. Otherwise it is recorded again (`recorded`).
6. A stack of blocks may join rows and positions in one axis. `ProbeRun.apart` returns the record
   with two axes.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hooks import HookPoint
from hooks.base import memory_of, tensors_in, version, without_gradients
from hooks.shared import Session
from models.attached.original import (
    AttachError,
    ExampleArguments,
    is_encoder_decoder,
    kernel_of,
    logits_of,
)
from models.mode import mode

PRODUCTS = ("matmul", "bmm", "baddbmm")
ATTENTION, FUSED = ("product", "softmax", "product"), "fused"
"""The kinds of functions in a module with its own attention code: three in order, or one."""

MASKS = ("scatter", "scatter_", "masked_fill", "masked_fill_", "where")
"""The functions with which a model may hide keys, for example all keys but a few for each query.

In a short run, these few may be all keys. Then the logits do not show whether the functions ran.
"""


def attention_part(func: Any, *arguments: Any) -> str | None:
    """Return the part of attention that a function of PyTorch computes, if it is in attention.

    The parts are `product` (of two batches of matrices), `softmax` and `fused` (all of attention).
    For any other function, for example a product with a weight, the result is None.

    Args:
        func: the function.
        arguments: its arguments.
    """
    name = getattr(func, "__name__", "")
    if name == "softmax":
        return name
    if name == "scaled_dot_product_attention":
        return FUSED
    batches = name in PRODUCTS and all(part.ndim > 2 for part in tensors_in(arguments))
    return "product" if batches else None


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name, module: the name of the module, and the module.
        inputs: copies of the tensors among its arguments.
        output: a copy of the first tensor that it returned. It is None until the module returns, or
            if it returns no tensor.
        began, ended: when the call began and ended: the number of calls and returns of modules
            before.
        recorded: the number of parts of attention that were recorded in the run before the call
            began.
        maps: the number of columns of each linear map that the module's own code computes.
    """

    name: str
    module: nn.Module
    inputs: list[Tensor]
    began: int
    output: Tensor | None = None
    ended: int = -1
    recorded: int = 0
    maps: list[int] = field(default_factory=list)
    _returned: Tensor | None = None
    _written: int = 0

    @property
    def is_overwritten(self) -> bool:
        """True if the model later wrote into the output."""
        return self._returned is not None and version(self._returned) != self._written


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, because modules may be on several devices."""
    return tensor.detach().to("cpu", copy=True)


@dataclass(eq=False)
class ProbeRun:
    """A record of a run.

    Attributes:
        calls: every call of a module, in the order in which the calls began.
        attention: how many times each module called an attention function of `transformers`, or
            computed attention in its own code.
        logits: the model's logits.
        keys: for each call of an attention function of `transformers`, in order: the module that
            called it, and the keys that it passed.
        example: the arguments of the run.
        reference: the logits of the same run before the model was changed.
        copied: the function that copies tensors.
        parts: the parts of attention that any code computed, in order. They are None if PyTorch's
            functions were not watched.
        functions: the names of the functions that computed these parts or may change a mask.
    """

    calls: list[Call] = field(default_factory=list)
    attention: Counter[nn.Module] = field(default_factory=Counter)
    logits: Tensor | None = None
    keys: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    parts: list[str] | None = None
    functions: list[str] = field(default_factory=list)
    example: Any = None
    reference: Any = None
    copied: Callable[[Tensor], Tensor] = _on_cpu
    _open: list[Call] = field(default_factory=list)
    _recorded: int = 0
    _clock: int = 0

    @property
    def single(self) -> list[Call]:
        """The calls of modules that ran once.

        Only these modules get points. If a module runs several times, its hook does not know which
        of the runs it sees.
        """
        counts = Counter(call.module for call in self.calls)
        return [call for call in self.calls if counts[call.module] == 1]

    @property
    def sharing(self) -> set[nn.Module]:
        """The modules whose keys and values are also used by later modules."""
        lending: dict[int, list[nn.Module]] = {}
        for module, keys in self.keys:
            lending.setdefault(memory_of(keys), []).append(module)
        return {modules[0] for modules in lending.values() if len(modules) > 1}

    def apart(self, shape: tuple[int, int]) -> "ProbeRun":
        """Return the record with rows and positions as two axes of every tensor.

        Args:
            shape: the numbers of rows and of positions. If the first axis of a matrix has the
                length of their product, it is split in two.
        """

        def by_text(tensor: Tensor) -> Tensor:
            is_joined = tensor.ndim == 2 and len(tensor) == math.prod(shape)
            return tensor.unflatten(0, shape) if is_joined else tensor

        return self._changed(by_text)

    def with_streams_third(self, stream: Tensor) -> "ProbeRun":
        """Return the record with [batch, pos, stream, d_model] for [stream, batch, pos, d_model].

        Args:
            stream: a tensor with the axis of streams first. Tensors of this shape are changed.
        """

        def by_text(tensor: Tensor) -> Tensor:
            return tensor.movedim(0, 2) if tensor.shape == stream.shape else tensor

        return self._changed(by_text)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "ProbeRun":
        """Return the record with a function of each tensor instead of the tensor."""
        calls = [
            replace(
                call,
                inputs=[*map(change, call.inputs)],
                output=None if call.output is None else change(call.output),
            )
            for call in self.calls
        ]
        return replace(self, calls=calls)

    def is_as(self, before: "Alone") -> bool:
        """Return whether the logits and the functions of attention are the same as in `before`.

        Recording only copies tensors. So both runs call the same functions on the same tensors, and
        the logits are equal bit by bit.

        Args:
            before: the same run without recording.
        """
        same = self.logits is not None and torch.equal(self.logits, before.logits.cpu())
        return same and self.functions == before.functions

    def listen(self, session: Session, model: nn.Module) -> None:
        """Record the calls of a model's modules while a session is open."""
        for name, module in model.named_modules():
            if name and not isinstance(module, HookPoint):
                session.before(module, partial(self._enter, name, module))
                session.after(module, partial(self._leave, module))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the beginning of a call, with copies of its inputs."""
        tensors = tensors_in((args, kwargs))
        inputs = [self.copied(tensor) for tensor in tensors]
        self._open.append(
            Call(name, module, inputs=inputs, began=self._clock, recorded=len(self.parts or ()))
        )
        self.calls.append(self._open[-1])
        self._clock += 1

    def _leave(self, module: nn.Module, output: Any) -> None:
        """Record the end of the innermost open call, with a copy of its output."""
        call = self._open.pop()
        for tensor in tensors_in(output):
            call.output = self.copied(tensor)
            call._returned = tensor
            call._written = version(tensor)
            break
        call.ended = self._clock
        self._clock += 1
        parts = (self.parts or [])[call.recorded :]
        # Count these parts only for the innermost module that computed them.
        if call.recorded >= self._recorded and parts in ([*ATTENTION], [FUSED]):
            self.attention[module] += 1
            self._recorded = call.recorded + len(parts)

    def attend(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute attention, and record the module that called it."""
        self.attention[module] += 1
        self.keys.append((module, args[1]))
        output = kernel_of(module)(module, *args, **kwargs)
        # The kernel computed the parts that were recorded in this call, so do not count them for a
        # module's own code.
        self._recorded = len(self.parts or ())
        return output


class Watching(TorchFunctionMode):
    """A context manager that records which parts of attention are computed.

    Args:
        probe: the record that stores the linear maps of open calls. Default: None, which does not
            store them.

    Attributes:
        parts: the kinds of the parts, in order.
        functions: the names of PyTorch's functions that computed the parts or may change a mask.
    """

    def __init__(self, probe: ProbeRun | None = None) -> None:
        super().__init__()
        self._probe = probe
        self.parts: list[str] = []
        self.functions: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch, record it if it computes a part of attention, and return its
        result.
        """
        if kind := attention_part(func, args, kwargs):
            self.parts.append(kind)
            self.functions.append(func.__name__)
        elif getattr(func, "__name__", "") in MASKS:
            self.functions.append(func.__name__)
        output = func(*args, **(kwargs or {}))
        if self._probe and self._probe._open and getattr(func, "__name__", "") == "linear":
            self._probe._open[-1].maps.append(output.shape[-1])
        return output


class Alone(NamedTuple):
    """A run of a model without points.

    Attributes:
        example: its arguments.
        logits: its logits.
        functions: the names of the functions that computed attention or may change a mask.
    """

    example: ExampleArguments
    logits: Tensor
    functions: list[str]


def seen_alone(model: nn.Module, example: ExampleArguments) -> Alone:
    """Run an example on a model without points, and return its logits and attention functions."""
    with Watching() as watching:
        logits = example.logits(model)
    return Alone(example, logits, watching.functions)


@without_gradients
def probed(model: Any, before: Alone, watch: bool = False) -> ProbeRun:
    """Return the record of a run of the model.

    Attention is recorded if its module calls `hooked_attention`. With `watch`, attention in a
    module's own code is recorded too.

    Args:
        model: the model.
        before: the same run of the unchanged model.
        watch: whether to watch PyTorch's functions, for attention in a module's own code.
    """
    probe = ProbeRun(example=before.example, reference=before.logits)
    watching = Watching(probe)
    probe.parts = watching.parts if watch else None
    probe.functions = watching.functions
    try:
        for module in model.modules():
            vars(module)["hook_points"] = probe
        with mode(model, training=False), watching, Session() as session:
            probe.listen(session, model)
            output = before.example.run(model)
    finally:
        for module in model.modules():
            vars(module).pop("hook_points", None)
    probe.logits = _on_cpu(logits_of(output))
    return probe


def arguments_of(
    modules: Sequence[nn.Module], run: Callable[[], object]
) -> dict[nn.Module, tuple[Any, Any]]:
    """Return the arguments of modules in a run."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}
    with Session() as session:
        for module in modules:
            session.before(module, lambda *call, module=module: calls.update({module: call}))
        run()
    return calls


def recorded(attached: Any, examples: Sequence[ExampleArguments]) -> list[ProbeRun]:
    """Return a record of each example: the model's run on it, with every call of a module.

    Each example first runs on the unchanged model. Then the configs of the modules are replaced by
    copies that ask for `hooked_attention`, which records its caller.

    Args:
        attached: the model's parts. Its `needed` and its configs are set.
        examples: the arguments of the runs.

    Raises:
        AttachError: if the logits are missing or NaN.
    """
    model = attached.model
    runs = [seen_alone(model, example) for example in examples]
    if runs[0].logits.is_meta or runs[0].logits.isnan().any():
        raise AttachError(
            f"logits must be numbers; {type(model).__name__} returned NaN, or no values"
        )
    if not examples[0].runs_with_cache(model):
        attached.needed = attached.uncached
    attached.take_over()
    return [_probed(attached, run, is_second=n > 0) for n, run in enumerate(runs)]


def _probed(attached: Any, before: Alone, is_second: bool) -> ProbeRun:
    """Return a record of the model's run on an example.

    If the run of the first example differs from `before`, the name of the attention with points is
    made equal to the name of the model's own kernel, because the model may compare it. If the run
    still differs, or shows no attention, the configs are restored, and the run is recorded again
    while PyTorch's functions are watched.

    Args:
        attached: the model's parts.
        before: the same run of the unchanged model.
        is_second: whether this is the second example, with images or sounds for the towers.
    """
    # Attention is found in one of two ways: its module calls `hooked_attention`, or PyTorch's
    # functions are watched. A tower or an encoder may need the other way than the text, so its run
    # is always watched.
    watch = is_second or is_encoder_decoder(attached.model)
    probe = probed(attached.model, before, watch)
    if probe.attention and not probe.is_as(before) and not is_second:
        attached.restore_configs()
        attached.take_over(is_equal=True)
        probe = probed(attached.model, before, watch)
    if not (probe.attention and probe.is_as(before)) and not is_second:
        attached.restore_configs()
        probe = probed(attached.model, before, watch=True)
    return probe
