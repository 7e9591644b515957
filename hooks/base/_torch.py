"""The private parts of PyTorch that this project uses, each with its reason; no other module uses any."""

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

# A plan runs the model on tensors without numbers, and PyTorch documents no other kind.
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad

# Hooks that a user sets on all modules at once must act on an `Identity` too.
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

# PyTorch has no function that says whether activation checkpointing runs; its file on the stack does.
from torch.utils import checkpoint

# To count the bytes of tensors. And tensors that hold other tensors have no memory of their own.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

P = ParamSpec("P")
Result = TypeVar("Result")


class Identity(nn.Module):
    """Returns its input, like `nn.Identity`, at less cost while it has no hooks.

    >>> Identity()(torch.tensor([2.0, 3.0]))
    tensor([2., 3.])
    """

    def __call__(self, value: Tensor) -> Tensor:
        """`value`, unless a hook changes it."""
        # nn.Module.__call__ asks the same questions. A block has a dozen of these modules.
        if (
            self._forward_pre_hooks
            or self._forward_hooks_with_kwargs
            or self._forward_hooks_always_called
            or self._backward_hooks
            or self._backward_pre_hooks
            or _global_forward_hooks
            or _global_forward_pre_hooks
            or _global_backward_hooks
            or _global_backward_pre_hooks
            or (self._forward_hooks and torch.compiler.is_compiling())
        ):
            return super().__call__(value)
        if not self._forward_hooks:
            return value
        output = self.forward(value)
        for hook in [*self._forward_hooks.values()]:
            changed = hook(self, (value,), output)
            output = output if changed is None else changed
        return output

    def forward(self, value: Tensor) -> Tensor:
        """`value`."""
        return value


class Component(nn.Module):
    """An `nn.Module` that finds its children and weights in 0.1 instead of 0.7 microseconds.

    `nn.Module` finds them in `__getattr__`, which Python calls last. A block does this forty times in
    each step: a quarter of the time that a small model needs to generate a token. Here the class has
    a descriptor for each name. It reads the module's own dictionaries, so it is never out of date.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module | nn.Parameter) and not hasattr(type(self), name):
            kept_in = "_modules" if isinstance(value, nn.Module) else "_parameters"
            setattr(type(self), name, _Kept(kept_in, name))


class _Kept:
    """A descriptor without `__set__`, so an instance may also have an attribute of that name."""

    def __init__(self, kept_in: str, name: str) -> None:
        self.kept_in, self.name = kept_in, name

    def __get__(self, instance: Component | None, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self.kept_in][self.name]
        except KeyError:  # this instance may have it elsewhere: nn.Module.__getattr__ comes next
            raise AttributeError(self.name) from None


def children(module: nn.Module) -> list[nn.Module]:
    """The child modules. `named_children` also keeps a set of them, and that costs more than the rest."""
    return [child for child in module._modules.values() if child is not None]


def has_hooks(module: nn.Module) -> bool:
    """Return whether any hook is registered on `module`. No public function says so."""
    # torch.compile of PyTorch 2.9 cannot trace `bool` of these dictionaries.
    return not (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks registered on `module`, backward hooks last."""
    return [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]


def insert_hook(
    module: nn.Module, key: int, hook: Callable[..., Any], before: bool = False, first: bool = False
) -> None:
    """Register a forward hook under a key that the caller chooses.

    With `before` it is a pre-hook with kwargs instead, and runs before all others, as with `first` a hook
    does. A hook with an attribute `comes_last` stays behind those that are inserted later. Unlike PyTorch's own functions this needs no lock: each change of a dictionary is one step.
    """
    if before:
        module._forward_pre_hooks_with_kwargs[key] = True
        module._forward_pre_hooks[key] = hook
        module._forward_pre_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
    else:
        module._forward_hooks[key] = hook
        if first:
            module._forward_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
        if len(module._forward_hooks) > 1:
            hooks_last(module, lambda hook: getattr(hook, "comes_last", False))


def remove_hook(module: nn.Module, key: int) -> None:
    """Remove the hook that `insert_hook` registered under `key`, if it is there."""
    if module._forward_hooks.pop(key, None) is None:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def remove_hooks(module: nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Remove some forward hooks and pre-hooks of `module`, whoever holds their handles."""
    for key in [key for key, hook in module._forward_hooks.items() if chosen(hook)]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
        module._forward_hooks_always_called.pop(key, None)
    for key in [key for key, hook in module._forward_pre_hooks.items() if chosen(hook)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def hooks_last(module: nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Move some forward hooks of `module` behind its others."""
    # Of a copy, which is one step: another thread may add or remove a hook meanwhile.
    for key in [key for key, hook in [*module._forward_hooks.items()] if chosen(hook)]:
        with contextlib.suppress(KeyError):
            module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]


def state_of(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of `module` and of the modules inside it.

    `parameters()` and `buffers()` take ten times as long: they build names and remove duplicates.
    """
    tensors: list[Tensor | None] = []
    modules: list[nn.Module | None] = [module]
    for inner in modules:  # the loop itself adds to the list
        if inner is None:
            continue
        # Most of these are empty, and to ask is quicker than to add nothing.
        held = inner.__dict__
        if members := held["_modules"]:
            modules += members.values()
        if members := held["_parameters"]:
            tensors += members.values()
        if members := held["_buffers"]:
            tensors += members.values()
    return [tensor for tensor in tensors if tensor is not None]


def marks(module: nn.Module) -> list[int]:
    """The identity, `memory_of` and `version` of each tensor of `state_of`: they show later changes.

    Those on the meta device are left out: what offloads weights puts new ones there after each call.
    """
    # Not by those functions, and no tuples: a lazy run asks this of every weight.
    tensors = [tensor for tensor in state_of(module) if not tensor.is_meta]
    memory = [storage._cdata for storage in map(Tensor.untyped_storage, tensors)]
    try:
        versions = [tensor._version for tensor in tensors]
    except RuntimeError:  # some are inference tensors
        versions = [*map(version, tensors)]
    return [*map(id, tensors), *memory, *versions]


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is on for some device. The public function must be asked for each."""
    return torch._C._is_any_autocast_enabled()


def version(tensor: Tensor) -> int:
    """The number of in-place writes to `tensor`; -1 for an inference tensor, which has no count."""
    return -1 if tensor.is_inference() else tensor._version


def memory_of(tensor: Tensor) -> int:
    """A number that two tensors share if they use the same memory. Fake tensors have no `data_ptr`."""
    return tensor.untyped_storage()._cdata


def has_storage(tensor: Tensor) -> bool:
    """Return whether `tensor` is plain strided memory.

    Sparse, nested and sharded tensors are not, nor are any inside vmap and grad: they hold other tensors. During
    compilation the answer is always False.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or (type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor))
    )


def is_unwatched(tensor: Tensor) -> bool:
    """Return whether neither autograd (reverse or forward mode) nor vmap tracks operations on `tensor`."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (tensor.requires_grad or transformed)


def is_checkpointed() -> bool:
    """Return whether the caller runs inside activation checkpointing, at first or again in a backward pass."""
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether PyTorch's FSDP shards `module`. If a forward pass of it is cut short, later ones may fail."""
    # Importing the classes costs more than this package. Without them, nothing is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    return isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule))


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside the wrapper that `torch.compile` returns; another module as it is."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` returned this module, or its method `compile` was called."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def compiled_forms(module: nn.Module) -> list[nn.Module]:
    """The wrappers that `torch.compile` made of a module, or the module itself if it is one.

    Their own hooks run at each call, also where the compiled code runs no hook of the module inside. Nothing
    else knows the wrappers, so the garbage collector is asked, if a compiler is in use at all.
    """
    if uncompiled(module) is not module:
        return [module]
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return []
    # By its type, because `isinstance` would ask objects that pretend to be of another class.
    wrappers = (each for each in gc.get_objects() if type(each) is dynamo.OptimizedModule)
    return [wrapper for wrapper in wrappers if uncompiled(wrapper) is module]


def traced_as_constant(function: Callable[..., Result]) -> Callable[..., Result]:
    """Make torch.compile call `function` while it traces, and keep the answer.

    `torch.compiler.assume_constant_result` sets the same mark, but it also imports the compiler. That
    takes longer than all other imports here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # functions carry attributes
    return function


def refuse_unbound(function: Callable[..., Any], args: Any, kwargs: Any, error: TypeError) -> None:
    """After a TypeError of a call, not of what is called, say which arguments a function lacks or does not take.

    Raises:
        TypeError: naming the argument.
    """
    from hooks.base.words import Words

    signature, name = inspect.signature(function), getattr(function, "__name__", "the function")
    if f"{name}()" not in str(error):  # as Python says of a call
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as reason:
        Words(function).require(kwargs, (), name)
        takes = ", ".join(signature.parameters)
        raise TypeError(f"{name} must be called as {name}({takes}): {reason}") from None


def without_gradients(function: Callable[P, Result]) -> Callable[P, Result]:
    """A function that runs with gradients off, like one under `torch.no_grad()`.

    An interrupt cannot leave them off: nothing comes between these calls and the `try`. In the `with` of
    `no_grad` much does, and no public function that switches is a single step.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return function(*args, **kwargs)
        except TypeError as error:
            refuse_unbound(function, args, kwargs, error)
            raise
        finally:
            torch._C._set_grad_enabled(before)

    return run


def peak_bytes(run: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of `run()`, and the most bytes of tensors made there that were alive at one time."""
    mode = PeakBytes()
    # Not `with mode`: an interrupt could come while it begins or ends, and the mode would stay.
    try:
        torch._C._push_on_torch_dispatch_stack(mode)
        return run(), mode.peak
    finally:
        torch._C._pop_torch_dispatch_stack(None)


class PeakBytes(TorchDispatchMode):
    """Counts bytes; `peak` is the largest number so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no annotation there
        self.peak = self._alive = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views of what was there before, such as a transposed weight, are not new.
        inputs = (value for value in args if isinstance(value, Tensor))
        self._seen.update(value.untyped_storage() for value in inputs)
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(value, Tensor) and (memory := value.untyped_storage()) not in self._seen:
                self._seen.add(memory)
                self._alive += memory.nbytes()
                self.peak = max(self.peak, self._alive)
                weakref.finalize(memory, self._freed, memory.nbytes())
        return output

    def _freed(self, nbytes: int) -> None:
        self._alive -= nbytes
