"""The private parts of PyTorch that this project uses, each with its reason.

No other module of the project uses private parts of PyTorch.
"""

import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

# A plan (`hooks.plan`) runs the model on fake tensors, which have a shape, a dtype and a device but
# no numbers. PyTorch documents no public module that contains them.
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad

# Global hooks, which a user registers for all modules, must also act on an `Identity`.
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

# PyTorch has no function that reports whether activation checkpointing runs, so we look for its
# file on the stack.
from torch.utils import checkpoint

# `PeakBytes` sees each new tensor in a dispatch mode. `has_storage` must recognise tensors that
# wrap other tensors, because the wrapper itself has no memory.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

P = ParamSpec("P")
R = TypeVar("R")

# Switches gradients on or off in one step that no keyboard interrupt can divide. PyTorch's public
# functions run Python code before and after the switch.
set_gradients = torch._C._set_grad_enabled


class Identity(nn.Module):
    """A module that returns its input, like `nn.Identity`, but is faster while it has no hooks.

    >>> Identity()(torch.tensor([2.0, 3.0]))
    tensor([2., 3.])
    """

    def __call__(self, value: Tensor) -> Tensor:
        """Return `value`, unless a hook changes it."""
        # In these cases nn.Module.__call__ must run: hooks of other kinds, global hooks, and hooks
        # during compilation. In all other cases the lines below are faster, which matters because a
        # block has a dozen of these modules.
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
        """Return `value`."""
        return value


class Component(nn.Module):
    """An `nn.Module` that finds its children and weights in 0.1 instead of 0.7 microseconds.

    `nn.Module` finds them in `__getattr__`, which Python calls only after all other look-ups have
    failed. A block looks up forty names in each step. For a small model, these look-ups take a
    quarter of the time of a generated token. A `Component` has a descriptor for each name instead.
    The descriptor reads the module's own dictionaries, so its value is never out of date.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module | nn.Parameter) and not hasattr(type(self), name):
            dictionary = "_modules" if isinstance(value, nn.Module) else "_parameters"
            setattr(type(self), name, _Entry(dictionary, name))


class _Entry:
    """A class attribute that finds a submodule or a parameter in its dictionary of the instance.

    Without it, Python searches the class in vain, and then calls the slow `nn.Module.__getattr__`.
    It has no `__set__`, so an instance may also have an ordinary attribute of the same name.

    Args:
        dictionary: the dictionary of the instance, `_modules` or `_parameters`.
        name: the name of the submodule or the parameter.
    """

    def __init__(self, dictionary: str, name: str) -> None:
        self.dictionary = dictionary
        self.name = name

    def __get__(self, instance: Component | None, owner: type) -> Any:
        if instance is None:
            return self
        try:
            return instance.__dict__[self.dictionary][self.name]
        # The instance may store the attribute elsewhere: Python calls nn.Module.__getattr__ next.
        except KeyError:
            raise AttributeError(self.name) from None


def children(module: nn.Module) -> list[nn.Module]:
    """Return the child modules.

    A child that is registered under two names appears twice. PyTorch's `module.children()` takes
    longer, because it removes duplicates.
    """
    return [child for child in module._modules.values() if child is not None]


def has_hooks(module: nn.Module) -> bool:
    """Return whether any hook is registered on `module`.

    PyTorch has no public function for this.
    """
    # torch.compile of PyTorch 2.9 cannot trace `bool` of these dictionaries.
    return not (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )


def hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks registered on `module`, backward hooks last."""
    return [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
        *module._backward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]


def insert_hook(
    module: nn.Module, key: int, hook: Callable[..., Any], before: bool = False, first: bool = False
) -> None:
    """Register a forward hook, or a forward pre-hook, under a key that the caller chooses.

    A forward hook with a true attribute `comes_last` also runs after hooks that this function
    inserts later. Unlike PyTorch's own functions, this function needs no lock, because each change
    of a dictionary is atomic.

    Args:
        module: the module.
        key: the key, for `remove_hook`.
        hook: the hook.
        before: True registers a pre-hook with kwargs, which runs before all other pre-hooks. False
            registers a forward hook.
        first: whether a forward hook runs before all other forward hooks.
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
    """Remove the hook that `insert_hook` registered under `key`, if it is still registered."""
    if module._forward_hooks.pop(key, None) is None:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def remove_hooks(module: nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Remove the forward hooks and pre-hooks of `module` for which `chosen(hook)` is True.

    PyTorch's own way needs the handles of the hooks.
    """
    for key in [key for key, hook in module._forward_hooks.items() if chosen(hook)]:
        del module._forward_hooks[key]
        module._forward_hooks_with_kwargs.pop(key, None)
        module._forward_hooks_always_called.pop(key, None)
    for key in [key for key, hook in module._forward_pre_hooks.items() if chosen(hook)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def hooks_last(module: nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Move the forward hooks for which `chosen(hook)` is true to the end of the module's hooks."""
    # Iterate over a copy, which is made atomically: another thread may add or remove a hook during
    # the loop.
    for key in [key for key, hook in [*module._forward_hooks.items()] if chosen(hook)]:
        with contextlib.suppress(KeyError):
            module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]


def state_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of `module` and of the modules inside it.

    `parameters()` and `buffers()` take ten times as long, because they build names and remove
    duplicates.
    """
    tensors: list[Tensor | None] = []
    modules: list[nn.Module | None] = [module]
    # The loop itself appends to the list.
    for inner in modules:
        if inner is None:
            continue
        # Most of these dictionaries are empty, and the check is faster than an update with nothing.
        attributes = inner.__dict__
        if members := attributes["_modules"]:
            modules += members.values()
        if members := attributes["_parameters"]:
            tensors += members.values()
        if members := attributes["_buffers"]:
            tensors += members.values()
    return [tensor for tensor in tensors if tensor is not None]


def contains_weights(module: nn.Module) -> bool:
    """Return whether a module inside `module` has parameters; its own parameters do not count.

    `parameters()` of each child takes ten times as long.
    """
    for child in module._modules.values():
        if child is None:
            continue
        for weight in child._parameters.values():
            if weight is not None:
                return True
        if contains_weights(child):
            return True
    return False


def marks(module: nn.Module) -> list[int]:
    """Return numbers that are different after a change of a parameter or buffer of `module`.

    They are the identity, `memory_of` and `version` of each tensor of `state_of`. Two equal results
    show that no tensor was replaced or written to in between, except for writes to inference
    tensors.

    Tensors on the meta device are left out, because offloading replaces them after each call.
    """
    # The bodies of `memory_of` and `version` are repeated here, and no tuples are built, because a
    # lazy run computes these numbers for every weight.
    tensors = [tensor for tensor in state_of(module) if not tensor.is_meta]
    memory = [storage._cdata for storage in map(Tensor.untyped_storage, tensors)]
    try:
        versions = [tensor._version for tensor in tensors]
    # Some tensors are inference tensors, which have no version.
    except RuntimeError:
        versions = [*map(version, tensors)]
    return [*map(id, tensors), *memory, *versions]


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is on for any device.

    PyTorch's public function answers for only one device in each call.
    """
    return torch._C._is_any_autocast_enabled()


def version(tensor: Tensor) -> int:
    """Return the number of in-place writes to a tensor; -1 for an inference tensor.

    PyTorch does not count the writes to inference tensors.
    """
    return -1 if tensor.is_inference() else tensor._version


def written(module: nn.Module) -> dict[int, int]:
    """Return the number of in-place writes to each parameter of `module`, by its identity.

    PyTorch does not count writes through `weight.data`.
    """
    parameters = [tensor for tensor in state_of(module) if isinstance(tensor, nn.Parameter)]
    try:
        return {id(parameter): parameter._version for parameter in parameters}
    # Some parameters are inference tensors, which have no version.
    except RuntimeError:
        return {id(parameter): version(parameter) for parameter in parameters}


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for two tensors in the same memory.

    A fake tensor has no public `data_ptr`, so this reads a private number.
    """
    return tensor.untyped_storage()._cdata


def has_storage(tensor: Tensor) -> bool:
    """Return whether the numbers of `tensor` lie in one storage, at places given by its strides.

    The result is False for sparse, nested and sharded tensors, and for tensors inside vmap and
    grad, which wrap other tensors. During compilation the result is always False.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or (type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor))
    )


def is_unwatched(tensor: Tensor) -> bool:
    """Return whether neither vmap nor autograd, in reverse or forward mode, tracks a tensor."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (tensor.requires_grad or transformed)


def is_checkpointed() -> bool:
    """Return whether the caller runs inside activation checkpointing.

    The result is True in the first forward pass and also when backward recomputes it.
    """
    frame: FrameType | None = sys._getframe()
    while frame and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether PyTorch's FSDP shards `module`.

    A run of a sharded module must not stop early: later forward passes may then fail.
    """
    # Importing the classes of FSDP takes longer than importing this package. If the program has not
    # imported them, no module is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    return isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule))


def has_shards(module: nn.Module) -> bool:
    """Return whether PyTorch's FSDP shards `module` or a module inside it."""
    distributed = torch.distributed
    # FSDP needs a process group. Most programs have no process group, so the loop over modules is
    # not needed.
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return any(map(is_fully_sharded, module.modules()))


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of `torch.compile`.

    Return any other module unchanged.
    """
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` returned this module, or its method `compile` was called."""
    return uncompiled(module) is not module or module._compiled_call_impl is not None


def compiled_forms(module: nn.Module) -> list[nn.Module]:
    """Return the wrappers that `torch.compile` made of a module.

    If the module is itself a wrapper, only the module is returned. The hooks of a wrapper run at
    each call, even if the compiled code runs no hook of the module inside. PyTorch has no list of
    the wrappers, so they are searched among all objects of the garbage collector, but only if the
    program has imported the compiler.
    """
    if uncompiled(module) is not module:
        return [module]
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return []
    # Compare types: `isinstance` would call `__class__` of objects that imitate a different class.
    objects = gc.get_objects()
    wrappers = (value for value in objects if type(value) is dynamo.OptimizedModule)
    return [wrapper for wrapper in wrappers if uncompiled(wrapper) is module]


def compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Return a compiled copy of a function, which shares no compiled code with other copies.

    PyTorch stores compiled code by the code object of a function, and does not compare hooks before
    it uses the code again. So the copy has a new code object.

    Args:
        function: a function without variables of an enclosing function.
        options: the arguments of `torch.compile`.

    Raises:
        RuntimeError: from the returned function, if the function cannot be compiled, in one line.
    """
    code = function.__code__.replace()
    run = torch.compile(FunctionType(code, function.__globals__), **options)
    failure = sys.modules["torch._dynamo"].exc.TorchDynamoException

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return run(*args, **kwargs)
        except failure as error:
            reason = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"torch.compile failed: {reason}") from error

    return call


def keep_in_place(tensor: Tensor) -> None:
    """Promise that a tensor is always the same memory when compiled code writes into it.

    Without the promise, `mode="reduce-overhead"` of torch.compile has no effect. PyTorch documents
    the function in its guide of CUDA graphs only.
    """
    sys.modules["torch._dynamo"].mark_static_address(tensor)


def traced_as_constant(function: Callable[..., R]) -> Callable[..., R]:
    """Make torch.compile call `function` during tracing and treat the result as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, but it also imports the compiler.
    The import of the compiler is slower than all other imports of this package together.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def peak_bytes(run: Callable[[], R]) -> tuple[R, int]:
    """Return the result of `run()` and its peak memory in bytes.

    Only tensors that `run` creates count. The peak is the largest number of bytes of tensors that
    were alive at one time.
    """
    mode = PeakBytes()
    # A keyboard interrupt at the start or end of `with mode` would leave the mode active.
    try:
        torch._C._push_on_torch_dispatch_stack(mode)
        return run(), mode.peak
    finally:
        torch._C._pop_torch_dispatch_stack(None)


class PeakBytes(TorchDispatchMode):
    """A counter of the bytes of live tensors; `peak` is the largest number so far.

    Operators that call functions, such as flex_attention, count with their outputs only.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensors that existed before, such as weights, do not count. Their views do not count
        # either, because a view needs no new memory.
        inputs = (value for value in args if isinstance(value, Tensor))
        self._counted.update(value.untyped_storage() for value in inputs)
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else (output,):
            if (
                isinstance(value, Tensor)
                and (memory := value.untyped_storage()) not in self._counted
            ):
                self._counted.add(memory)
                self._alive += memory.nbytes()
                self.peak = max(self.peak, self._alive)
                weakref.finalize(memory, self._freed, memory.nbytes())
        return output

    def _freed(self, nbytes: int) -> None:
        """Subtract the bytes of a tensor that is no longer alive."""
        self._alive -= nbytes
