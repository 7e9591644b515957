"""HookedRunner: runs a model, caches the requested values, and applies edits.

A cached run has these steps:

1. `_request` resolves a selector to points.
2. `_run_eagerly`, `_run_lazily` or `_run_joined` makes a recorder, and lists the hooks that the run
   needs.
3. `_recorded` registers the hooks, runs the model, and removes the hooks.
4. `_cache` combines the values with their origin and masks.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

from torch import Tensor, nn

from hooks import names as layered
from hooks.base import (
    NEVER_FIRED,
    HintedClass,
    HintsAtNames,
    Output,
    Returns,
    Words,
    config_hash,
    explains_calls,
    forwards_in,
    has_shards,
    mesh_of,
    number_of,
    require_module,
    shown,
    uncompiled,
    without_gradients,
)
from hooks.base._torch import state_of, written
from hooks.base.draws import Draws
from hooks.base.errors import ModeError, NeverFiredError
from hooks.base.hints import how_to_mark
from hooks.base.pieces import RowEnds, noting_ends
from hooks.cache import ActivationCache
from hooks.capture import Complete, Recorder, Request, memory_in
from hooks.edit import EditedPoint, HookContext, HookHandle, Hooks, edited_points
from hooks.lazy import LazyValues, divided
from hooks.modes import Mode, Options
from hooks.names import Blocks, Selector, blocks_of, flatten, resolve
from hooks.origin import JoinedInputs, Origin, inputs_of, prepared, signature_of
from hooks.parts import PartPoint
from hooks.plan import Plan, planned
from hooks.point import HookPoint, OptionalPoints, Point, has_forward, point_of
from hooks.session import Session, edits_in_force, is_listened_to, owners

R = TypeVar("R")


class Points(dict[str, Point]):
    """Points by name, in the model's order; printed as a table."""

    def __repr__(self) -> str:
        return _table_of(self, limit=40)


def _table_of(points: Mapping[str, Point], limit: int | None = None) -> str:
    """Return a table of points with their axes and meanings; see `names.lines_by_layer`."""
    width = max((len(" ".join(point.axes)) for point in points.values()), default=0)
    return layered.lines_by_layer(
        {
            name: f"{' '.join(point.axes):<{width}}  {point.meaning}"
            for name, point in points.items()
        },
        limit,
    )


_UNREAD = "run= returned an iterator, which may run the model only when it is read"
_REMOVED = (
    "they were removed from the model after HookedRunner(model), for example by detach; make a new "
    "HookedRunner(model)"
)


class HookedRunner(HintsAtNames, Generic[Output], metaclass=HintedClass):
    """A runner that reads and edits the values of a model.

    Its forward hooks exist only inside a call or a `with`. It works on any `nn.Module`. The points
    are the model's `HookPoint`s, or all modules of a model without `HookPoint`s. The value at a
    module is its output. If the module returns several tensors, the value is the first tensor. A
    selector is a name, a glob, a predicate on `Point`, a `Mode`, or a list of selectors. An exact
    name may be the name of any module.

    For type checkers, `HookedRunner[Tensor]` is a runner of a model whose output is a tensor. The
    type of the output is Any if the class of the model does not give it.

    Args:
        model: the model. Make a new runner if its structure changes.

    Attributes:
        points: the points by name, in the model's order.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 5), nn.ReLU()).eval()
    >>> runner, x = HookedRunner(model), torch.ones(2, 3)
    >>> output, cache = runner.run_with_cache(x)
    >>> torch.equal(cache["1"], output)
    True
    >>> runner.run_with_hooks(x, hooks={"0": lambda value, point: value * 0}).sum()
    tensor(0., grad_fn=<SumBackward0>)
    """

    model: nn.Module
    points: Points

    @overload
    def __init__(self, model: Returns[Output]) -> None: ...

    @overload
    def __init__(self: "HookedRunner[Any]", model: nn.Module) -> None: ...

    # The first form also fits other functions, which `require_module` refuses.
    @explains_calls  # type: ignore[misc]
    def __init__(self, model: nn.Module) -> None:
        require_module(model)
        self.model = model
        # The names of a compiled model are the names of the model inside.
        self._inner = uncompiled(model)
        modules = self._inner.named_modules(remove_duplicate=False)
        mesh = mesh_of(self._inner)
        self._known = {name: point_of(name, module, mesh) for name, module in modules if name}
        marked = self._points_where(lambda module: isinstance(module, HookPoint))
        callable_points = self._points_where(has_forward)
        self._is_marked = any(not isinstance(point.module, PartPoint) for point in marked.values())
        self.points = Points(marked if self._is_marked else callable_points)
        self._modules = [model, *(point.module for point in self._known.values())]
        may_not_run = set[nn.Module]()
        for module in self._modules:
            if isinstance(module, OptionalPoints):
                may_not_run |= {*module.modules()}
        self._optional = {
            name for name, point in self.points.items() if point.module in may_not_run
        }
        self._has_warned = False

    @overload
    def run_with_cache(
        self,
        *args: Any,
        names: Selector | None = None,
        mode: Mode | str | None = None,
        lazy: bool = False,
        run: None = None,
        **kwargs: Any,
    ) -> tuple[Output, ActivationCache]: ...

    @overload
    def run_with_cache(
        self,
        *args: Any,
        names: Selector | None = None,
        mode: Mode | str | None = None,
        lazy: bool = False,
        run: Callable[..., R],
        **kwargs: Any,
    ) -> tuple[R, ActivationCache]: ...

    def run_with_cache(
        self,
        *args: Any,
        names: Selector | None = None,
        mode: Mode | str | None = None,
        lazy: bool = False,
        run: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ActivationCache]:
        """Run the model and return its output with a cache of the chosen points.

        The model runs without gradients, except with `grads=True` or `detach=False`. Later writes
        into the model's input, output, weights or buffers do not change the cached values, except
        with `detach=False`. Values are copies, unless the model has an attribute
        `overwrites_values = False`, which declares that the model never writes into the value of a
        point. Then values are copied only while hooks act on the model.

        Args:
            args: the model's arguments.
            names: a selector of points.
            mode: a `Mode` or its name. Default: `full`, if `names` is not given either.
            lazy: cache only the input of each block. A block is a child of a `ModuleList`, or a
                module outside one that contains only `HookPoint`s, such as a final norm. The block
                runs again, with the edits of this run, when a value inside it is read. Values equal
                the values of an eager cache up to rounding (1e-5 of the largest in float32),
                because the two may run different kernels. A CacheError is raised if the block has
                changed since the run.
            run: a function to call instead of the model. It may run the model many times, like a
                generation. The values of all runs are joined along their positions. Scores of later
                keys, which attention did not compute, are zero.
            kwargs: `pos=`, `device=`, `dtype=`, `calls=`, `detach=` and `grads=` control how
                values are cached; see `hooks.Options`. All other keywords are passed to the model.

        Raises:
            UnknownNameError: if the selector matches nothing.
            ValueError: if options contradict each other.
            ModeError: if the model is in training mode and the mode is not `none`.
            CacheError: if the model overwrote, in place, a value that was not copied.
            NeverFiredError: if the forward pass did not reach a requested point. In a model without
                `HookPoint`s this is true only for points chosen by their exact names. Other
                selectors skip modules that did not run exactly once or returned no tensor, unless
                all points are skipped; `cache.skipped` contains the skipped points and the reasons.
        """
        options, kwargs = self._options(kwargs, self.run_with_cache, run)
        if run is None:
            args, kwargs = self._prepared("run_with_cache", args, kwargs)
        if run is not None and (lazy or options.grads or options.pos is not None):
            raise ValueError("run= cannot be combined with lazy=, grads= or pos=")
        request = self._request(names, mode, options=options, lazy=lazy)
        if run is not None:
            return self._run_joined(request, run, args=args, kwargs=kwargs)
        if lazy:
            return self._run_lazily(request, args, kwargs)
        return self._run_eagerly(request, args, kwargs)

    @explains_calls
    def capture(self, *args: Any, names: Selector, **kwargs: Any) -> ActivationCache:
        """Run the model only until the last of the chosen points has fired, and return the cache.

        If a point never fires, the model runs to its end. Only the first value of a point is
        cached, if the point would fire again after the stop. Models in PyTorch's
        `FullyShardedDataParallel` always run to their end.

        Args:
            names: a selector of points.
            args, kwargs: the model's arguments, and options of `run_with_cache`. `grads=` is not
                allowed, because there is no output.

        Raises:
            UnknownNameError: if the selector matches nothing.
            ValueError: if options contradict each other, or `grads=True`.
            NeverFiredError: if the forward pass ends without reaching a point; see
                `run_with_cache`.
        """
        options, kwargs = self._options(kwargs, self.capture)
        if options.grads:
            raise ValueError("capture returns no output to call backward() on; got grads=True")
        args, kwargs = self._prepared("capture", args, kwargs)
        request = self._request(flatten(names), None, options)
        stops = not has_shards(self.model)
        return self._run_eagerly(request, args, kwargs=kwargs, stops=stops)[1]

    @explains_calls
    def run_with_hooks(
        self, *args: Any, hooks: Hooks | None = None, backward: Hooks | None = None, **kwargs: Any
    ) -> Output:
        """Run the model under edits and return its output.

        As in an ordinary call of the model, autograd records the run. To save time and memory
        without gradients, call it inside `torch.no_grad()`.

        Args:
            args, kwargs: the model's arguments.
            hooks: a mapping from selectors to functions, or pairs of them. `fn(activation, point)`
                returns the value to continue with, or writes into `activation`, its own copy, and
                returns None. Several functions at a point act in the given order. A function
                receives the whole value with padding, so `activation[:, -1]` may be padding in the
                shorter texts of a batch. `token_mask()` returns the mask of real tokens.
            backward: likewise `fn(gradient, point)`, called by `backward()` on this output. These
                functions belong to the graph of this run, not to the model.

        Warns:
            UserWarning: if functions change only padding in a text. The warning names the points
                and the texts. It needs the mask of the texts; at a module without a point, it also
                needs an output [batch, pos, size].

        Raises:
            UnknownNameError: if a selector matches nothing.
            EditError: if a function changes the shape, dtype or device of its value.
            NeverFiredError: if the forward pass did not reach an edited point.
        """
        self._refuse_unknown(kwargs, self.run_with_hooks)
        draws = self._draws()
        with self.hooks(hooks, backward=backward):
            try:
                output: Output = self.model(*args, **kwargs)
            except TypeError:
                self._require_fit("run_with_hooks", args, kwargs)
                raise
        self._has_warned |= draws.warn(f"the {type(self.model).__name__}")
        return output

    @explains_calls
    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Run the model and return its output, as `run_with_hooks` does without `hooks=`.

        Active hooks act in the run: `with runner.hooks(...): runner(text)`.

        Args:
            args, kwargs: the model's arguments.

        Raises:
            TypeError: if `hooks=`, `backward=` or an unknown argument is given.
        """
        for name in ("hooks", "backward"):
            if name in kwargs:
                raise TypeError(
                    f"a call of a runner takes no argument {name}=; write "
                    f"runner.run_with_hooks(..., {name}=...)"
                )
        return self.run_with_hooks(*args, **kwargs)

    @explains_calls
    def hooks(
        self, hooks: Hooks | None = None, *, backward: Hooks | None = None, receipts: bool = False
    ) -> HookContext:
        """Return a context manager inside which all runs of this model are edited.

        The edits are the same as in `run_with_hooks`. They act in the thread that enters the
        `with`, and in asyncio tasks that start inside it while it is open. They do not act in other
        threads or tasks. Contexts can be nested: an inner hook receives the result of an outer
        hook. No hooks act on a model that a hook function itself runs.

        Args:
            hooks: a mapping from selectors to functions, or pairs of them; see `run_with_hooks`.
            backward: likewise functions of the gradients at points.
            receipts: record the changes of each hook in `hooks`, at the cost of one more copy of
                its value: `with runner.hooks(..., receipts=True) as context:`, then
                `context.receipts`.

        Raises:
            UnknownNameError: if a selector matches nothing.
            NeverFiredError: at the end of the `with`, if forward passes ran inside and none reached
                an edited point.
        """
        edits, backward_edits = self.edits(hooks or {}), self.edits(backward or {})
        return HookContext(self.model, edits, backward=backward_edits, receipts=receipts)

    @explains_calls
    def add(
        self, hooks: Hooks | None = None, *, backward: Hooks | None = None, receipts: bool = False
    ) -> HookHandle:
        """Edit every run of this model in this thread until `handle.remove()`.

        This is for notebooks.

        The edits also act in runs of the model inside analyses of `interp`. `runner.handles` lists
        all handles of the model, so no handle is lost.

        Args:
            hooks: a mapping from selectors to functions, or pairs of them; see `run_with_hooks`.
            backward: likewise functions of the gradients at points.
            receipts: record the changes of each hook in `hooks`. They are in `handle.receipts`.

        Raises:
            UnknownNameError: if a selector matches nothing.
        """
        edits, backward_edits = self.edits(hooks or {}), self.edits(backward or {})
        handle = HookHandle(self.model, edits, backward_edits, receipts)
        handle.__enter__()
        return handle

    @property
    def handles(self) -> list[HookHandle]:
        """The handles of all hooks that were added to this model, by any runner, in this thread."""
        return owners({*self._modules})

    def __repr__(self) -> str:
        added = "".join(f"\n  added: {handle}" for handle in self.handles)
        n_points = number_of(len(self.points), "point")
        return f"HookedRunner({type(self.model).__name__}, {n_points}){added}"

    def edits(self, hooks: Hooks) -> list[EditedPoint]:
        """Return the points where `hooks` act, each with its hooks in the given order.

        The method is for code that applies the hooks itself.

        Raises:
            UnknownNameError: if a selector matches nothing.
        """
        return edited_points(hooks, self._known, self.points)

    def plan(
        self,
        *args: Any,
        names: Selector | None = None,
        mode: Mode | str | None = None,
        lazy: bool = False,
        **kwargs: Any,
    ) -> Plan:
        """Return the exact shapes and bytes that a cached run would store, without its arithmetic.

        A copy of the model runs on tensors without numbers. With `lazy=True` the bytes are the
        memory of the run itself, before any value is recomputed. They may include a mask that the
        real run does not need: without numbers, some models cannot see that the texts have no
        padding.

        Args:
            args, names, mode, lazy, kwargs: see `run_with_cache`.

        Raises:
            HookError: if the model cannot be copied, or needs numbers, for example to compute a
                shape.
        """
        options, kwargs = self._options(kwargs, self.plan)
        args, kwargs = self._prepared("plan", args, kwargs)
        request = self._request(names, mode, options=options, lazy=lazy)

        def run(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ActivationCache]:
            runner = HookedRunner(model)
            points = {name: runner._known[name] for name in request.points}
            copied = replace(request, points=points)
            if lazy:
                return runner._run_lazily(copied, args, kwargs)
            return runner._run_eagerly(copied, args, kwargs)

        return planned(self.model, run, args=args, kwargs=kwargs)

    def table(self) -> str:
        """Return a table of all points with their axes and meanings.

        Layers with the same points share a line.
        """
        return _table_of(self.points)

    def _points_where(self, condition: Callable[[nn.Module], bool]) -> dict[str, Point]:
        """Return the points whose module satisfies a condition, by name."""
        return {name: point for name, point in self._known.items() if condition(point.module)}

    @functools.cached_property
    def _blocks(self) -> Blocks:
        """The block of each module inside a block, by the name of the module."""
        return blocks_of(self._inner)

    @functools.cached_property
    def _signature(self) -> inspect.Signature | None:
        """The signature of the model's `forward`; None if Python does not know it."""
        return signature_of(self._inner)

    @functools.cached_property
    def config_hash(self) -> str:
        """The hash of the model's configuration, which each cache contains."""
        return config_hash(self._inner)

    @functools.cached_property
    def _words(self) -> Words:
        """The keywords that the model accepts."""
        return Words(self._inner.forward, *forwards_in(self._inner))

    def _options(
        self,
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        run: Callable[..., Any] | None = None,
    ) -> tuple[Options, dict[str, Any]]:
        """Split the keywords of a method into the method's options and the arguments of the run.

        Args:
            kwargs: the keywords.
            call: the method.
            run: the function that the method calls with the arguments, instead of the model, if
                any.

        Raises:
            TypeError: if neither the method nor the model (with `run`, this function) accepts a
                keyword. Also, without `run`, if a keyword is both an option and a parameter of the
                model's `forward`.
        """
        options, others = Options.taken_from(kwargs)
        if run is None and self._signature is not None:
            parameters = self._signature.parameters
            in_both = [name for name in kwargs if name in Options.names() and name in parameters]
            if in_both:
                raise TypeError(
                    f"{in_both[0]}= is an option of {call.__name__} and an argument of "
                    f"{type(self.model).__name__}.forward; pass the argument without its name, or "
                    f"as in run=lambda x: model(x, {in_both[0]}=...)"
                )
        self._refuse_unknown(others, call, run=run, options=Options.names())
        return options, others

    def _refuse_unknown(
        self,
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        run: Callable[..., Any] | None = None,
        options: Collection[str] = (),
    ) -> None:
        """Check that the method or the model accepts each keyword.

        Args:
            kwargs: the keywords.
            call: the method.
            run: the function that the method calls instead of the model, if any.
            options: the names of the options that the method accepts.

        Raises:
            TypeError: if a keyword is unknown; the error contains the first unknown keyword and
                close matches.
        """
        if run is not None and not callable(run):
            raise TypeError(f"run must be a function that runs the model; got {shown(run)}")
        words = self._words if run is None else Words(run)
        if unknown := [name for name in kwargs if name not in words.known]:
            target = type(self.model).__name__ if run is None else "run="
            method_words = {*Words(call).known, *options} - {"self", "args", "kwargs"}
            words.require(unknown, method_words, f"{call.__name__} of a {target}")

    def _prepared(self, call: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a run after the model has prepared them.

        Raises:
            TypeError: if they do not fit the model's `forward`; the error names the method `call`.
        """
        try:
            return prepared(self._inner, args, kwargs)
        except (TypeError, AttributeError):
            self._require_fit(call, args, kwargs)
            raise

    def _require_fit(self, call: str, args: Any, kwargs: Any) -> None:
        """Check that arguments fit the model's `forward`, to explain a TypeError of the model.

        Raises:
            TypeError: naming the method and the parameters of the model.
        """
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as reason:
            form = "hooks=" if call == "run_with_hooks" else "names= or mode="
            raise TypeError(
                f"{call} passes its arguments to {type(self.model).__name__}.forward, which does "
                f"not accept them: {reason} ({form} must be passed by keyword)"
            ) from None
        reads_texts = callable(getattr(self._inner, "prepare_inputs", None))
        texts = [value for value in args if isinstance(value, str)]
        if texts and not reads_texts:
            raise TypeError(
                f"{call} passes its arguments to {type(self.model).__name__}.forward, which "
                f"accepts no text; got {shown(texts[0])}: pass tokens{how_to_mark()}"
            )

    def _overwrites_nothing(self) -> bool:
        """Return whether no code writes into the value of a point in a run.

        This is true if the model declares `overwrites_values = False` and no hook acts on it.
        """
        is_declared = not getattr(self._inner, "overwrites_values", True)
        return is_declared and not is_listened_to(self.model)

    def _draws(self) -> Draws:
        """Return an object that warns, once for this runner, if dropout acts in a run."""
        return Draws(() if self._has_warned else self._modules)

    def _request(
        self, names: Selector | None, mode: Mode | str | None, options: Options, lazy: bool = False
    ) -> Request:
        """Return the request for a cached run: its points, its optional points and its options.

        If a run does not reach an optional point, the value of this point is missing in the cache,
        without an error. In a model with HookPoints, the points inside `OptionalPoints` are
        optional; in any other model, all points are. A point that `names` contains as an exact name
        is never optional.

        Args:
            names: the names of the points. Default: None, for the points of `mode`.
            mode: the mode that chooses the points. Default: None, for `full` without names.
            options: the positions, device, dtype and so on of the values.
            lazy: whether the values are computed when they are read.

        Raises:
            ValueError: if both `names` and `mode` are given.
            UnknownNameError: if the selector matches nothing.
            ModeError: if the model is in training mode, but a mode or a lazy run needs evaluation
                mode.
        """
        if names is not None and mode is not None:
            raise ValueError("names= and mode= both choose points; pass only one of them")
        if names is None:
            names = Mode.full if mode is None else Mode(mode)
        # Iterate over the selector only once: it may be a generator.
        selector = flatten(names)
        modes = [part for part in selector if isinstance(part, Mode) and part is not Mode.none]
        # Parts of the model may be in training mode when the model is not.
        if (modes or lazy) and any(map(attrgetter("training"), self._modules)):
            demand = f"mode {modes[0].value!r}" if modes else "lazy=True"
            raise ModeError(f"{demand} needs a model in evaluation mode: call model.eval() first")
        points = resolve(selector, self._known, self.points)
        exact = {part for part in selector if isinstance(part, str)}
        optional = {*(self._optional if self._is_marked else points)} - exact
        return Request(points, optional, options)

    def _run_eagerly(
        self, request: Request, args: Any, kwargs: Any, stops: bool = False
    ) -> tuple[Any, ActivationCache]:
        """Run the model and record the values.

        With `stops`, end the run once every point has fired.
        """
        options = request.options
        recorder = Recorder(
            request.points,
            options,
            optional=request.optional,
            stops=stops and not options.keeps_calls,
            memory_of_others=self._memory_of_others(options, args, kwargs),
            bound=options.memory_bound(request.points),
        )
        # Copy the arguments before the run, which may write into them.
        inputs = inputs_of(self._signature, args, kwargs)
        output = self._recorded(
            self.model, args, kwargs=kwargs, recorder=recorder, listeners=[recorder.listen]
        )
        recorder.finish(self._why_not_reached(recorder), output)
        return output, self._cache(recorder, recorder.values, inputs)

    def _run_lazily(self, request: Request, args: Any, kwargs: Any) -> tuple[Any, ActivationCache]:
        """Run the model and store the arguments of its blocks, which run again for each read."""
        options = request.options
        if options.grads or not options.detach:
            raise ValueError("lazy=True keeps no graph: leave out grads=True and detach=False")
        if options.keeps_calls:
            raise ValueError("calls='all' cannot be combined with lazy= or run=")
        calls = divided(request.points, self._blocks)
        outside = [name for name in request.points if name not in self._blocks]
        limit = options.memory_bound(
            [*outside, *(call.name for call in calls)], otherwise="use fewer or shorter texts"
        )
        recorder = Recorder(
            request.points,
            options,
            optional=request.optional,
            unkept=self._blocks,
            memory_of_others=self._memory_of_others(options, args, kwargs),
            bound=limit,
        )
        edits = edits_in_force()
        inputs = inputs_of(self._signature, args, kwargs)
        listeners: list[Callable[[Session], None]]
        listeners = [recorder.listen, *(partial(call.listen, bound=limit) for call in calls)]
        output = self._recorded(
            self.model, args, kwargs=kwargs, recorder=recorder, listeners=listeners
        )
        for call in calls:
            call.report(recorder)
        recorder.finish(self._why_not_reached(recorder), output)
        return output, self._cache(recorder, LazyValues(recorder, calls, edits), inputs)

    def _run_joined(
        self, request: Request, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, ActivationCache]:
        """Call a function that runs the model, and join the values of all runs by position."""
        options = request.options
        if options.keeps_calls:
            raise ValueError("calls='all' cannot be combined with lazy= or run=")
        recorder = Recorder(
            request.points,
            options,
            optional=request.optional,
            joined=True,
            bound=options.memory_bound(request.points, otherwise="keep fewer points"),
        )
        inputs = JoinedInputs(self._inner, self._signature)

        def note_inputs(session: Session) -> None:
            session.before(self.model, inputs.note)

        ends = RowEnds(self._modules)
        with noting_ends(ends):
            output = self._recorded(
                run,
                args,
                kwargs=kwargs,
                recorder=recorder,
                listeners=[note_inputs, recorder.listen],
            )
        is_unread = isinstance(output, Iterator)
        recorder.finish(_UNREAD if is_unread else self._why_not_reached(recorder), output)
        if (new := ends.new_columns()) is not None:
            recorder.end_rows(new)
        return output, self._cache(recorder, recorder.values, inputs.joined(new, ends.mask))

    def _recorded(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        recorder: Recorder,
        listeners: Iterable[Callable[[Session], None]],
    ) -> Any:
        """Run the model, or a function, with the hooks registered.

        Return its output, or None if the recorder ended the run.
        """
        draws = self._draws()
        output = None
        call = run
        if recorder.options.detach and not recorder.options.grads:
            call = without_gradients(run)
        with Session() as session:
            for listen in listeners:
                listen(session)
            try:
                output = call(*args, **kwargs)
            except Complete as stopped:
                if stopped.args[0] is not recorder:
                    raise
            except (TypeError, AttributeError):
                if run is self.model:
                    self._require_fit("a cached run", args, kwargs)
                raise
        self._has_warned |= draws.warn(f"the {type(self.model).__name__}")
        return output

    def _why_not_reached(self, recorder: Recorder) -> str:
        """Return a possible reason why a run did not reach some points, for an error."""
        if len(recorder.fired) == len(recorder.points):
            return NEVER_FIRED
        missing = [name for name in recorder.points if name not in recorder.fired]
        modules = {*self._inner.modules()}
        are_removed = any(self._known[name].module not in modules for name in missing)
        return _REMOVED if are_removed else NEVER_FIRED

    def _memory_of_others(self, options: Options, args: Any, kwargs: Any) -> Collection[int] | None:
        """Return numbers that identify the memory of the arguments and weights (see `memory_in`).

        A cached value in this memory must be copied, because the caller may write into it later.
        None if every value must be copied.
        """
        needs_copies = options.grads or not options.detach or options.keeps_calls
        if needs_copies or not self._overwrites_nothing():
            return None
        return memory_in((args, kwargs, state_of(self.model)))

    def _cache(
        self,
        recorder: Recorder,
        values: dict[str, Tensor] | LazyValues,
        inputs: Mapping[str, Any],
    ) -> ActivationCache:
        """Return the cache of a run whose recorder has finished.

        Raises:
            NeverFiredError: if none of the chosen points has a value.
        """
        if recorder.skipped and not recorder.axes:
            raise NeverFiredError(
                f"all points were skipped: {next(iter(recorder.skipped.values()))}"
            )
        origin = Origin(
            known=tuple(self._known),
            config_hash=self.config_hash,
            inputs=inputs,
            skipped=recorder.skipped,
            model=weakref.ref(self._inner),
            # A lazy cache compares the weights itself, when it computes a value.
            written={} if isinstance(values, LazyValues) else written(self._inner),
        )
        grads = recorder.grads if recorder.options.grads else None
        return ActivationCache(values, recorder.axes, origin, grads=grads, masks=recorder.masks())
