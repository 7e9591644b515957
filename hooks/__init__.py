"""Hook points, a runner that listens at them, and the cache it hands back. Knows no transformer."""

from hooks._torch import Identity
from hooks.cache import ActivationCache
from hooks.context import HookContext
from hooks.edit import Hook
from hooks.errors import (
    CacheError,
    ContextError,
    EditError,
    HookError,
    ModeError,
    NeverFiredError,
    UnknownNameError,
)
from hooks.fused import FusedUnlessHooked
from hooks.plan import Plan, Planned
from hooks.point import HookPoint, Point, index_by_axis
from hooks.runner import HookedRunner
from hooks.select import Mode, Selector

__all__ = [
    "ActivationCache",
    "CacheError",
    "ContextError",
    "EditError",
    "FusedUnlessHooked",
    "Hook",
    "HookContext",
    "HookError",
    "HookPoint",
    "HookedRunner",
    "Identity",
    "Mode",
    "ModeError",
    "NeverFiredError",
    "Plan",
    "Planned",
    "Point",
    "Selector",
    "UnknownNameError",
    "index_by_axis",
]
