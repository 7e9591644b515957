"""Hook points, a runner that listens at them, and the cache it returns. Works on any `nn.Module`."""

from hooks._torch import Identity
from hooks.cache import ActivationCache
from hooks.edit import EditedPoint, HookContext, HookHandle, Hooks
from hooks.errors import (
    CacheError,
    ContextError,
    EditError,
    HookError,
    MemoryLimitError,
    ModeError,
    NeverFiredError,
    SelectionError,
    UnknownNameError,
)
from hooks.kinds import missing_name as _missing_name
from hooks.modes import Mode, Options
from hooks.names import Selector
from hooks.pieces import position_offset, start_of_piece, token_mask
from hooks.plan import Plan, Planned
from hooks.point import Hook, HookPoint, HookPoints, Point, index_by_axis
from hooks.receipts import Receipt, Receipts
from hooks.runner import HookedRunner
from hooks.session import FusedUnlessHooked

__version__ = "0.1.0"

__all__ = [
    "ActivationCache", "CacheError", "ContextError", "EditError", "EditedPoint",
    "FusedUnlessHooked", "Hook", "HookContext", "HookError", "HookHandle", "HookPoint",
    "HookPoints", "HookedRunner", "Hooks", "Identity", "MemoryLimitError", "Mode", "ModeError",
    "NeverFiredError", "Options", "Plan", "Planned", "Point", "Receipt", "Receipts",
    "SelectionError", "Selector", "UnknownNameError", "index_by_axis", "position_offset",
    "start_of_piece", "token_mask",
]  # fmt: skip

__getattr__ = _missing_name(__name__, __all__)
