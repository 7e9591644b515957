"""HookedRunner: runs a model, keeps what was asked for, and applies edits."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hooks import names as layered
from hooks import storage
from hooks.cache import ActivationCache
from hooks.capture import CaptureOptions, Positions, Recorder, require_fired
from hooks.context import HookContext, hint
from hooks.edit import Hook, backward_edit, forward_edit, places
from hooks.errors import ModeError
from hooks.lazy import LazyValues, blocks_of, divided, has_forward
from hooks.plan import Plan, planned
from hooks.point import HookPoint, Point
from hooks.select import Mode, Selector, flatten, resolve
from hooks.session import Session, edits_in_force

Hooks = Mapping[Any, Hook]
"""What to run where: a function for each `Selector`."""


class _Stop(BaseException):
    """Ends a forward pass whose last requested value has come; a model's `except` must not eat it."""

    def __init__(self, token: object) -> None:
        self.token = token


class HookedRunner:
    """Listens at a model's points with ordinary forward hooks, which live only inside a call or a `with`.

    Works on any `nn.Module`. Points are the model's `HookPoint`s; where it has none, all its modules are,
    and a module's value is its output, or the first tensor of an output that holds several. An exact
    name may always be any module. A selector is a name, a glob, a predicate on `Point`, a `Mode`, or a
    list of selectors.

    Args:
        model: the model; a runner made before its structure changes does not see the change.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = {
            name: module for name, module in model.named_modules(remove_duplicate=False) if name
        }
        self._all = {name: _point(name, module) for name, module in self._modules.items()}
        marked = {n: p for n, p in self._all.items() if isinstance(self._modules[n], HookPoint)}
        called = {n: p for n, p in self._all.items() if has_forward(self._modules[n])}
        self.points: Mapping[str, Point] = marked or called

    def run_with_cache(
        self,
        *args: Any,
        names: Selector | None = None,
        mode: Mode | str | None = None,
        positions: Positions | None = None,
        windows: Bool[Tensor, "batch pos"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        detach: bool = True,
        grads: bool = False,
        lazy: bool = False,
        run: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ActivationCache]:
        """Runs the model and returns its output with a cache of the chosen points.

        Args:
            args, kwargs: what the model is called with.
            names: a selector of points.
            mode: a `Mode` or its name; without `names` and `mode` it is `full`.
            positions: keep only these positions of the axes `pos` and `query`; nothing else is kept.
            windows: of the residual stream keep the vectors where this is True, under the point's
                name as [window, d_model], and the L2 norms of all, under `NAME.norm` as [batch, pos].
                The order of the windows is by row, then by position.
            device, dtype: where and as what to keep values; integers keep their type.
            detach: whether kept values are cut from the autograd graph.
            grads: whether `cache.grads` holds the gradients of the caller's last `backward()`.
            lazy: keep the input of each block (a child of a `ModuleList`), and run a block again, with
                the edits of this run (which must then not be random), when a value inside it is asked
                for. Equal to an eager cache up to rounding (1e-5 in float32), as the two may run
                different kernels. A model changed since is an error, but that an edit of a part of a
                matrix through `.data` may go unseen.
            run: what to call in the model's place: a function that runs it many times, such as a
                generation. The values of all runs are joined along their positions; what attention
                did not compute, scores of later keys, is zero.

        Raises:
            UnknownNameError: if the selector matches nothing.
            ModeError: if a mode other than `none` is asked of a model in training mode.
            NeverFiredError: if the forward pass did not reach a requested point.
        """
        options = CaptureOptions(positions, windows, device, dtype, detach, grads)
        if run is not None and (lazy or grads or positions is not None or windows is not None):
            raise ValueError("run= takes neither lazy=, grads=, positions= nor windows=")
        points = options.suited(self._choose(names, mode))
        if run is not None:
            return self._run(points, options, args, kwargs, run)
        return (self._run_lazily if lazy else self._run)(points, options, args, kwargs)

    def capture(
        self,
        *args: Any,
        names: Selector,
        positions: Positions | None = None,
        windows: Bool[Tensor, "batch pos"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        detach: bool = True,
        **kwargs: Any,
    ) -> ActivationCache:
        """Runs the model only until the last of the chosen points has fired, and returns the cache.

        Args:
            names: a selector of points.
            args, kwargs, positions, windows, device, dtype, detach: as for `run_with_cache`.

        Raises:
            UnknownNameError: if the selector matches nothing.
            NeverFiredError: if the forward pass ends without reaching a requested point.
        """
        options = CaptureOptions(positions, windows, device, dtype, detach)
        points, token = options.suited(self._choose(names, None)), object()

        def stop() -> None:
            raise _Stop(token)

        recorder = Recorder(points, options, when_complete=stop)
        with Session() as session:
            self._record(session, recorder)
            try:
                self.model(*args, **kwargs)
            except _Stop as stopped:
                if stopped.token is not token:
                    raise
        recorder.finish(hint(points, self._modules))
        return self._cache(recorder, recorder.values)

    def run_with_hooks(
        self, *args: Any, hooks: Hooks | None = None, backward: Hooks | None = None, **kwargs: Any
    ) -> Any:
        """Runs the model under edits and returns its output.

        Args:
            args, kwargs: what the model is called with.
            hooks: a function for each selector: `fn(activation, point)` returns the value to go on
                with. The activation is the function's own copy: it may write into it and return None.
            backward: likewise `fn(gradient, point)`, called when the caller runs `backward()` on this
                output; it stays with this run's graph, and the model is left without it.

        Raises:
            UnknownNameError: if a selector matches nothing.
            EditError: if a function returns another shape, dtype or device than the point's.
            NeverFiredError: if the forward pass did not reach an edited point.
        """
        with self.hooks(hooks, backward=backward):
            return self.model(*args, **kwargs)

    def hooks(self, hooks: Hooks | None = None, *, backward: Hooks | None = None) -> "HookContext":
        """A context in which every run of this model, in this thread, is edited; see `run_with_hooks`.

        Contexts nest: an inner hook sees what an outer one returned. A model that a hook function
        itself runs is run without hooks. On leaving, a point that no forward pass reached although
        one was completed raises NeverFiredError. With activation checkpointing the forward pass runs
        again in the backward pass: call `backward()` inside the `with`.
        """
        fired: set[str] = set()
        edits, watches = (
            [
                (point, make(hook, point, fired))
                for selector, hook in (given or {}).items()
                for point in places(selector, hook, self.points, self._all, self._modules)
            ]
            for make, given in ((forward_edit, hooks), (backward_edit, backward))
        )
        return HookContext(self.model, self._modules, edits, watches, fired)

    def plan(
        self,
        *args: Any,
        names: Selector | None = None,
        mode: Mode | str | None = None,
        positions: Positions | None = None,
        windows: Bool[Tensor, "batch pos"] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        lazy: bool = False,
        **kwargs: Any,
    ) -> Plan:
        """What a cached run would keep: shapes and bytes by name, exact, without doing its arithmetic.

        With `lazy=True` the bytes are what the run itself keeps, before anything is recomputed.

        Args:
            args, kwargs, names, mode, positions, windows, device, dtype, lazy: as for `run_with_cache`.

        Raises:
            HookError: if a shape depends on the numbers in the model's tensors.
        """
        options = CaptureOptions(positions, windows, device, dtype)
        run = self._run_lazily if lazy else self._run
        points = options.suited(self._choose(names, mode))
        return planned(self.model, run, points, options, args, kwargs)

    def table(self) -> str:
        """Every point with its axes and meaning; layers that have the same points share a line."""
        wide = max((len(" ".join(point.axes)) for point in self.points.values()), default=0)
        return layered.aligned(
            {n: f"{' '.join(p.axes):<{wide}}  {p.meaning}" for n, p in self.points.items()}
        )

    @functools.cached_property
    def config_hash(self) -> str:
        """A hash of the model's configuration; caches carry it."""
        return storage.config_hash(self.model)

    def _choose(self, names: Selector | None, mode: Mode | str | None) -> dict[str, Point]:
        if names is not None and mode is not None:
            raise ValueError("names= and mode= both choose points: give one of them")
        # Read once: the selector may be a generator.
        selector = flatten(Mode(mode or Mode.full) if names is None else names)
        extracts = [part for part in selector if isinstance(part, Mode) and part is not Mode.none]
        if extracts and self._is_training():
            raise ModeError(
                f"mode {extracts[0].value!r} extracts activations, and this model is in training "
                "mode: call model.eval() first, or choose points by name"
            )
        return resolve(selector, self.points, self._all)

    def _record(self, session: Session, recorder: Recorder) -> None:
        for name, point in recorder.points.items():
            session.after(self._modules[name], recorder.hook(point))

    def _run(
        self,
        points: dict[str, Point],
        options: CaptureOptions,
        args: Any,
        kwargs: Any,
        run: Any = None,
    ) -> tuple[Any, ActivationCache]:
        recorder = Recorder(points, options, joined=run is not None)
        with Session() as session:
            self._record(session, recorder)
            output = (run or self.model)(*args, **kwargs)
        recorder.finish(
            "run= returned an iterator, which may run the model only when it is read"
            if isinstance(output, Iterator)
            else hint(points, self._modules)
        )
        return output, self._cache(recorder, recorder.values)

    def _run_lazily(
        self, points: dict[str, Point], options: CaptureOptions, args: Any, kwargs: Any
    ) -> tuple[Any, ActivationCache]:
        if options.grads or not options.detach:
            raise ValueError(
                "lazy=True recomputes outside the graph: it has neither grads=True nor detach=False"
            )
        if self._is_training():
            raise ModeError(
                "lazy=True runs blocks again, and in training mode they may differ: call model.eval()"
            )
        blocks, outside = divided(points, blocks_of(self.model))
        recorder, edits = Recorder(outside, options), edits_in_force()
        with Session() as session:
            self._record(session, recorder)
            for lazy in blocks:
                session.before(lazy.block, lazy.remember)
            output = self.model(*args, **kwargs)
        recorder.finish(hint(outside, self._modules))
        require_fired(
            {name: point for lazy in blocks for name, point in lazy.points.items()},
            {name for lazy in blocks if lazy.fired for name in lazy.points},
        )
        everything = Recorder(points, options)
        values = LazyValues(everything.axes, recorder, blocks, edits)
        return output, self._cache(everything, values)

    def _cache(self, recorder: Recorder, values: dict[str, Tensor] | LazyValues) -> ActivationCache:
        grads = recorder.grads if recorder.options.grads else None
        return ActivationCache(values, recorder.axes, tuple(self._all), self.config_hash, grads)

    def _is_training(self) -> bool:
        return self.model.training or any(module.training for module in self._modules.values())


def _point(name: str, module: nn.Module) -> Point:
    if isinstance(module, HookPoint):
        return Point(name, module.axes, module.meaning)
    return Point(name, (), type(module).__name__)
