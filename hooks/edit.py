"""Edits: hook functions, checks of their results, and the `with` in which they act.

An edit changes only the first tensor that a module returns. `Watch` raises an error if the model
reads another tensor of the output, because the edit would then be lost.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hooks.base import (
    NEVER_FIRED,
    Calls,
    FakeTensor,
    mapped,
    number_of_call,
    piece_read,
    require_callable,
    require_fired,
    shown,
    tensors_in,
    warn,
    with_first_tensor,
)
from hooks.base._torch import compiled_forms, has_storage, is_checkpointed
from hooks.base.errors import ContextError, EditError, HookError
from hooks.names import resolve
from hooks.padding_changes import PaddingChanges, changes_here
from hooks.point import Hook, HookPoint, Point, as_node, first_tensor, has_forward, require_unsplit
from hooks.receipts import Receipt, Receipts
from hooks.session import OutputHook, Session, edits_in_force, hooks_disabled, is_open

ELSEWHERE = (
    "the model ran to its end only in other threads; hooks act in the thread that enters the "
    "`with` or adds them, and in asyncio tasks that start inside the `with`: set them in the "
    "thread that runs the model"
)
Hooks = Mapping[Any, Hook] | Sequence[tuple[Any, Hook]]
"""Hook functions, each for a `Selector`, as a mapping or as pairs.

At a point they act in the given order.
"""


@dataclasses.dataclass(frozen=True)
class EditedPoint:
    """A point and the hooks that act there, in order; see `HookedRunner.edits`.

    >>> hooks = (lambda value, point: value * 3, lambda value, point: value + 1)
    >>> EditedPoint(Point("embed"), hooks).apply(torch.tensor([2.0, 5.0]))
    tensor([ 7., 16.])
    """

    point: Point
    hooks: tuple[Hook, ...]

    def apply(
        self, value: Shaped[Tensor, "*axes"], call: int | None = None
    ) -> Shaped[Tensor, "*axes"]:
        """Apply the hooks to `value` in order, each to a separate copy, and return the result.

        While a hook runs, no hooks act: if the hook itself runs a model, this run is not edited.

        Args:
            value: the value.
            call: the number of the call of the module, if known.

        Warns:
            UserWarning: if hooks that are functions of the user change only padding in a text.

        Raises:
            EditError: if a hook returns no tensor, or changes the shape, dtype or device.
        """
        if torch.compiler.is_compiling():
            return self._apply(value, call, None)
        changes = changes_here() or PaddingChanges()
        new = self._apply(value, call, changes)
        if changes is not changes_here():
            changes.report()
        return new

    def _apply(self, value: Tensor, call: int | None, changes: PaddingChanges | None) -> Tensor:
        """Apply the hooks as `apply` does, and note it if they change only padding in a text.

        Edits of `interp.edits` know the padding, and so does a function that calls `token_mask`, so
        they are not checked.

        Args:
            value: the value.
            call: the number of the call of the module, if known.
            changes: the object that collects the changes of padding. None if the changes are not
                collected, as in compiled code.
        """
        # A hook may write into its copy. Two points of the residual stream can share one tensor,
        # and writing into the original would change the cached value of the other point.
        new = value.clone()
        piece = piece_read()
        has_mask = piece.real is not None
        if has_mask:
            piece.is_asked = False
        for hook in self.hooks:
            # torch.compile cannot trace `hooks_disabled` and `number_of_call.set`.
            if torch.compiler.is_compiling():
                changed = hook(new, self.point)
            else:
                changed = self._changed(hook, new, call)
            # If the hook returned None, its copy is the result and is checked too, because the hook
            # may have reshaped it in place.
            new = new if changed is None else changed
            if not isinstance(new, Tensor):
                raise EditError(
                    f"a hook at {self.point} must return a tensor or None; got {shown(new)}"
                )
            for attribute in ("shape", "dtype", "device"):
                if (got := getattr(new, attribute)) != (expected := getattr(value, attribute)):
                    if attribute == "shape":
                        got, expected = list(new.shape), list(value.shape)
                    rule = f"must keep the {attribute} {expected}"
                    raise EditError(f"a hook at {self.point} {rule}; got {got}")
            # The hook may have stored its result, and the next hook or the model may write into it.
            new = new.clone()
        if changes is None or (has_mask and piece.is_asked):
            return new
        if any(not hasattr(hook, "acts_at_end") for hook in self.hooks) and _has_numbers(value):
            changes.note(self.point, value, new)
        return new

    def _changed(self, hook: Hook, value: Tensor, call: int | None) -> Tensor | None:
        """Return the result of a hook, which runs while no hooks act.

        An error of the hook gets a note with the name of the point. Errors of this package have no
        note, because their messages name the point.

        Args:
            hook: the hook.
            value: the value for the hook.
            call: the number of the call of the module, if known.
        """
        try:
            with number_of_call.set(call):
                return hooks_disabled(hook, value, self.point)
        except Exception as error:
            if not isinstance(error, HookError):
                error.add_note(f"this error was raised in a hook at {self.point}")
                if isinstance(error, TypeError) and "not callable" in str(error):
                    error.add_note("point.layer and point.name are values, without parentheses")
            raise


class HookContext:
    """Edits that act inside one `with` statement, made by `HookedRunner.hooks`.

    Raises:
        ContextError: on entering a second time.
        NeverFiredError: at the end of the `with`, if the model ran inside, and an edited point did
            not fire in any of these runs.

    >>> from hooks import HookedRunner
    >>> model = nn.Sequential(nn.ReLU())
    >>> hooks = {"0": lambda value, point: value * 3}
    >>> with HookedRunner(model).hooks(hooks, receipts=True) as context:
    ...     model(torch.tensor([2.0, 5.0]))
    tensor([ 6., 15.])
    >>> context.receipts[0].largest
    10.0
    """

    _stays = False

    def __init__(
        self,
        model: nn.Module,
        edits: Sequence[EditedPoint],
        backward: Sequence[EditedPoint],
        receipts: bool,
    ) -> None:
        self._model = model
        self._edits = edits
        self._backward = backward
        self._fired: set[str] = set()
        self._has_warned = False
        self._changes = PaddingChanges()
        self._receipts: list[list[Receipt]] = []
        for edited in edits if receipts else ():
            self._receipts.append([Receipt(hook, edited.point) for hook in edited.hooks])
        self._session: Session | None = None
        # For each forward pass that ended inside the `with`, whether the hooks acted there.
        self._acted: set[bool] = set()

    @property
    def receipts(self) -> Receipts:
        """The receipts of the changes so far, one for each hook.

        Raises:
            ContextError: if the context was made without `receipts=True`.
        """
        if self._edits and not self._receipts:
            raise ContextError(
                "receipts are missing; request them with runner.hooks(..., receipts=True)"
            )
        receipts = list(chain.from_iterable(self._receipts))
        order = [id(receipt.hook) for receipt in receipts]
        return Receipts(sorted(receipts, key=lambda receipt: order.index(id(receipt.hook))))

    def __enter__(self) -> "HookContext":
        if self._session is not None:
            raise ContextError(
                "a hook context can be entered only once: call hooks() again to make a new context"
            )
        session = Session(self if self._stays else None)
        try:
            session.__enter__()
            calls = Calls()
            changes = self._changes

            def begin(args: Any, kwargs: Any) -> None:
                calls.clear()
                changes.begin(kwargs)

            session.count(self._model, begin)
            for edited, receipts in zip_longest(self._edits, self._receipts):
                # The run itself has noted changes of padding.
                again = edit_at(edited, self._fired, changes=PaddingChanges())
                noting = edited
                if receipts:
                    hooks = tuple(receipt.noting for receipt in receipts)
                    noting = EditedPoint(edited.point, hooks)
                # A HookPoint returns only one tensor, so there are no other tensors to watch.
                watch = None
                if not isinstance(edited.point.module, HookPoint):
                    watch = Watch(edited.point, self._model)
                    session.after(watch.parent, watch.end, first=True)
                edit = edit_at(
                    noting,
                    self._fired,
                    watch=watch,
                    receipts=receipts or (),
                    calls=calls,
                    changes=changes,
                )
                # Receipts count each call, so they must see each call.
                applies = edited if not receipts and watch is None else None
                session.after(edited.point.module, edit, again, applies=applies)
            for edited in self._backward:
                listener = gradient_edit_at(edited, self._fired)
                session.after(edited.point.module, listener)
            session.note(self._model, self._acted)
            if self._stays:
                session.look(self._model, lambda output: changes.report())
            for compiled in compiled_forms(self._model) if self._stays else ():
                session.look(compiled, self._warn_if_missed)
        except BaseException:
            session.__exit__()
            raise
        # Store the session last. If an interrupt comes before this line, nothing keeps the session
        # alive, and its end removes the hooks, even if the user keeps this context.
        self._session = session
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        assert self._session is not None
        self._session.__exit__(kind, error, traceback)
        if kind is None:
            self._changes.report()
        if kind is None and (True in self._acted or (self._acted and not self._fired)):
            reason = NEVER_FIRED if True in self._acted else ELSEWHERE
            require_fired(self._names(), self._fired, reason)

    def _warn_if_missed(self, output: Any) -> None:
        """Warn once after a run of the compiled model in which no hook acted."""
        if not self._fired and not self._has_warned:
            self._has_warned = True
            warn(
                f"the hooks at {', '.join(self._names())} did not act in this run, because the "
                "model was compiled and called before they were added: call "
                "torch.compiler.reset(), which makes the next run compile again"
            )

    def _names(self) -> list[str]:
        """Return the names of the edited points."""
        return [edited.point.name for edited in (*self._edits, *self._backward)]


class HookHandle(HookContext):
    """Edits that act until `remove()`, made by `HookedRunner.add`.

    >>> from hooks import HookedRunner
    >>> runner, x = HookedRunner(nn.Sequential(nn.ReLU())), torch.tensor([2.0, 5.0])
    >>> handle = runner.add({"0": lambda value, point: value * 3})
    >>> runner.model(x)
    tensor([ 6., 15.])
    >>> runner.handles
    [HookHandle(0)]
    >>> handle.remove()
    >>> runner.model(x)
    tensor([2., 5.])
    """

    _stays = True

    def remove(self) -> None:
        """Remove the hooks, from any thread. A second call does nothing.

        Raises:
            NeverFiredError: if forward passes ended since `add` and all missed an edited point.
        """
        if is_open(self._session):
            self.__exit__(None, None, None)

    def __repr__(self) -> str:
        removed = "" if is_open(self._session) else ", removed"
        return f"HookHandle({', '.join(self._names())}{removed})"


_FORM = "a mapping or pairs of selectors and functions, as {'blocks.0.attn.z': function}"


def edited_points(
    hooks: Hooks, known: Mapping[str, Point], points: Mapping[str, Point]
) -> list[EditedPoint]:
    """Return the points where hooks act.

    A module with two names is one point, under its first name.

    Args:
        hooks: the hook functions with their selectors.
        known, points: all modules, and the candidates for globs and predicates; see `resolve`.

    Raises:
        TypeError: if a hook is not callable, or `hooks` is neither a mapping nor pairs.
        UnknownNameError: if a selector matches nothing.
    """
    if isinstance(hooks, str) or callable(hooks) or not isinstance(hooks, Iterable):
        raise TypeError(f"hooks must be {_FORM}; got {shown(hooks)}")
    pairs = hooks.items() if isinstance(hooks, Mapping) else hooks
    edited: dict[nn.Module, tuple[Point, list[Hook]]] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"hooks must be {_FORM}; got {shown(pair)} among them")
        selector, hook = pair
        if not callable(hook):
            several = "several are pairs: [(point, first), (point, second)]"
            hint = f"; {several}" if isinstance(hook, list | tuple) else ""
            if isinstance(hook, Tensor):
                hint = "; interp.edits.replace(tensor) writes a tensor"
            raise TypeError(
                f"the hook at {selector!r} must be one function; got {shown(hook)}{hint}"
            )
        _require_two_arguments(hook, selector)
        first_points: dict[nn.Module, Point] = {}
        for point in resolve(selector, known, points).values():
            first_points.setdefault(point.module, point)
        for module, point in first_points.items():
            edited.setdefault(module, (point, []))[1].append(hook)
    return [EditedPoint(point, tuple(point_hooks)) for point, point_hooks in edited.values()]


def _require_two_arguments(hook: Hook, selector: object) -> None:
    """Check that a function accepts an activation and a point.

    Raises:
        TypeError: if it does not; the error names the selector.
    """
    # Other callables are edits of this project, which have the right form. A run can have many of
    # them, so they are not checked.
    if not inspect.isfunction(hook):
        return
    example = "for example: lambda activation, point: activation * 0"
    require_callable(f"the hook at {selector!r}", hook, ("activation", "point"), example=example)


def edit_at(
    edited: EditedPoint,
    fired: set[str],
    watch: "Watch | None" = None,
    receipts: Sequence[Receipt] = (),
    calls: Calls | None = None,
    changes: PaddingChanges | None = None,
) -> OutputHook:
    """Return a forward hook that edits the value at a point.

    Args:
        edited: the point and its hooks.
        fired: the set of names to which the point is added when it fires.
        watch: raises an error if the model reads another tensor of the edited output.
        receipts: the receipts of the hooks, whose `beside` becomes the number of other tensors in
            the output.
        calls: the number of times that each point has fired in this run; None if calls are not
            counted.
        changes: collects changes of padding by functions of the user. Default: each is reported
            at once.

    Raises:
        HookError: from the returned function, if a process has only a part of the value; or in the
            model, if it reads another tensor of an edited output.
        EditError: from the returned function; see `EditedPoint.apply`.
    """
    point = edited.point

    def edit(output: Any) -> Any:
        value = _reached(output, point, fired)
        # A compiler traces a run again whenever a number that the run reads has changed, as this
        # number would.
        number = None
        if calls is not None and not torch.compiler.is_compiling():
            number = calls.next(point.name)
        if changes is None or torch.compiler.is_compiling():
            new = edited.apply(value, number)
        else:
            new = edited._apply(value, number, changes)
        edited_output = with_first_tensor(output, new)
        if watch is None or isinstance(output, Tensor) or not _has_numbers(new):
            return edited_output
        for receipt in receipts:
            receipt.beside = sum(1 for _ in tensors_in(output)) - 1
        # If the hook only read the value, nothing is watched. No arithmetic lies between the two
        # values then, so they are compared exactly. NaN equals NaN here.
        is_same = torch.equal(torch.nan_to_num(new), torch.nan_to_num(value))
        return edited_output if is_same else watch.handed_on(edited_output, new)

    # `edited_points_in_force` reads the attribute.
    edit.edited = edited  # type: ignore[attr-defined]
    return edit


def edited_points_in_force(model: nn.Module) -> list[EditedPoint]:
    """Return the edits that act on a model in this context, outermost first.

    Args:
        model: the model.
    """
    modules = {*model.modules()}
    hooks = [hook for module, hook in edits_in_force() if module in modules]
    return [hook.edited for hook in hooks if hasattr(hook, "edited")]


def gradient_edit_at(edited: EditedPoint, fired: set[str]) -> OutputHook:
    """Return a forward hook that lets the backward pass edit the gradient at a point.

    The hook adds a node to the graph, and the node edits the gradient.

    Args:
        edited: the point and its hooks.
        fired: the set of names to which the point is added when it fires.

    Raises:
        HookError: from the returned function, if no gradient can reach the point, or a process has
            only a part of its value.
        EditError: in the backward pass; see `EditedPoint.apply`.
    """
    point = edited.point

    def edit(output: Any) -> Any:
        value = as_node(_reached(output, point, fired), point)
        value.register_hook(lambda grad: None if grad is None else edited.apply(grad))
        return with_first_tensor(output, value)

    return edit


def _reached(output: Any, point: Point, fired: set[str]) -> Tensor:
    """Return the value of a point that has fired, after checks that the value can be edited."""
    if not torch.compiler.is_compiling() and is_checkpointed():
        rule = "which runs it again in backward(), where its hooks may no longer act"
        where = f"{point.name} is inside activation checkpointing"
        raise HookError(f"{where}, {rule}: switch checkpointing off")
    value = first_tensor(output, point)
    fired.add(point.name)
    require_unsplit(value, point)
    return value


def _has_numbers(value: Tensor) -> bool:
    """Return True if the numbers of a value can be compared.

    They cannot be compared if the value has only a shape and a dtype, as in `HookedRunner.plan`,
    nor inside vmap, during compilation, or for sparse, nested and sharded tensors.
    """
    return has_storage(value) and not (value.is_meta or isinstance(value, FakeTensor))


class Watch:
    """A check that raises an error if the model reads a tensor that an edit should have changed.

    For example, a router returns logits, and the weights and numbers of experts, which were
    computed from the logits. An edit of only the logits has no effect, because the block reads the
    other two tensors. In contrast, attention returns its output and its pattern, and the block
    reads only the output, which is edited.

    1. An edit replaces the first tensor of a module's output. The other tensors are replaced by
       watched tensors.
    2. If code reads the numbers of a watched tensor before the parent module returns, a `HookError`
       is raised, because the edit does not change these numbers.
    3. At the end of the parent, the watched tensors become plain tensors again.

    Args:
        point: the edited point.
        model: the model.
    """

    def __init__(self, point: Point, model: nn.Module) -> None:
        self.point = point
        self.is_open = False
        name = point.name
        while name:
            name = name.rpartition(".")[0]
            self.parent = model.get_submodule(name)
            if has_forward(self.parent):
                break

    def handed_on(self, output: Any, edited: Tensor) -> Any:
        """Return the output with watched tensors in place of all tensors but the edited one.

        Tensors in lists are not watched, because they are states of the model, such as a cache.
        """
        self.is_open = True
        if isinstance(output, tuple):
            parts = [self.handed_on(part, edited) for part in output]
            return output._make(parts) if hasattr(output, "_make") else type(output)(parts)
        if isinstance(output, Tensor):
            return output if output is edited else self._watched(output)
        if isinstance(output, Mapping) or dataclasses.is_dataclass(output):
            return mapped(output, lambda leaf: self.handed_on(leaf, edited))
        return output

    def _watched(self, tensor: Tensor) -> Tensor:
        """Return a watched tensor with the same memory. Subclasses of `Tensor` are not watched."""
        if type(tensor) is not Tensor:
            return tensor
        watched = tensor.as_subclass(Beside)
        watched.watch = self
        return watched

    def end(self, output: Any) -> Any:
        """End the watch, and return the parent's output with plain tensors."""
        self.is_open = False
        new = unwatched(output)
        return None if new is output else new


class Beside(Tensor):
    """A watched tensor: a module returned it together with an edited tensor.

    Attributes:
        watch: the watch, which raises an error if the tensor is read too early.
    """

    watch: Watch | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch with plain tensors and return its result.

        Raises:
            HookError: if the function reads a watched tensor.
        """
        for tensor in tensors_in((args, kwargs)):
            watch = tensor.watch if isinstance(tensor, Beside) else None
            if watch is not None and watch.is_open and not _is_size(func):
                raise HookError(
                    f"an edit at {watch.point.name} changes only the first tensor that the module "
                    f"returns, but {type(watch.parent).__name__} reads another (a router's experts "
                    "read its weights, not its logits): edit a value that is read"
                )
        return func(*mapped(args, _plain), **mapped(kwargs or {}, _plain))


def unwatched(output: Any) -> Any:
    """Return an output with a plain tensor in place of each watched tensor."""
    is_watched = any(isinstance(tensor, Beside) for tensor in tensors_in(output))
    return mapped(output, _plain) if is_watched else output


def _plain(leaf: Any) -> Any:
    """Return a plain tensor for a watched tensor; any other value is returned unchanged."""
    return leaf.as_subclass(Tensor) if isinstance(leaf, Beside) else leaf


# Attributes and functions that do not read the numbers of a tensor.
_SIZES = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta"),
    *("size", "dim", "numel", "stride", "is_floating_point", "__len__"),
}


def _is_size(func: Any) -> bool:
    """Return whether a function reads no numbers of its tensors."""
    # For an attribute such as `shape`, `func` is a method of the attribute, which has the name.
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", None) in _SIZES or getattr(func, "__name__", "") in _SIZES
