"""HookContext: edits that act inside one `with`, once."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hooks.capture import require_fired
from hooks.errors import ContextError
from hooks.point import Point
from hooks.session import Session


class HookContext:
    """Edits that act inside one `with`, once; made by `HookedRunner.hooks`.

    Raises:
        ContextError: on entering a second time.
        NeverFiredError: on leaving, if a forward pass was completed inside and missed an edited point.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        edits: list[tuple[Point, Callable[[Any], Any]]],
        watches: list[tuple[Point, Callable[[Any], Any]]],
        fired: set[str],
    ) -> None:
        self._model = model
        self._modules = modules
        self._edits = edits
        self._watches = watches
        self._fired = fired
        self._session: Session | None = None
        self._completed = False

    def __enter__(self) -> None:
        if self._session is not None:
            raise ContextError("a hook context serves one `with`; call hooks() again for another")
        self._session = Session()
        self._session.__enter__()
        try:
            for point, edit in self._edits:
                self._session.after(self._modules[point.name], edit, edit=True)
            for point, watch in self._watches:
                self._session.after(self._modules[point.name], watch)
            self._session.after(self._model, self._complete)
        except BaseException:
            self._session.__exit__()
            raise

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        assert self._session is not None
        self._session.__exit__()
        if kind is None and self._completed:
            points = {point.name: point for point, _ in self._edits + self._watches}
            require_fired(points, self._fired, hint(points, self._modules))

    def _complete(self, output: Any) -> None:
        self._completed = True


def hint(points: Mapping[str, Point], modules: Mapping[str, nn.Module]) -> str:
    """Why one of `points` may not have fired."""
    parts = [name.split(".") for name in points]
    parents = {".".join(part[:depth]) for part in parts for depth in range(1, len(part))}
    fast = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)
    if any(isinstance(modules.get(parent), fast) for parent in parents):
        return (
            "PyTorch's own attention layers skip submodules on their fast path; "
            "torch.backends.mha.set_fastpath_enabled(False) switches that off"
        )
    return (
        "a parent may compute it another way, this input may not lead there, or the model was "
        "compiled before the hooks were set; choose points that leave it out if that is meant"
    )
