"""Hook points, a runner that registers hooks at them, and the cache of a run, for any `nn.Module`.

Read `point`, `names`, `session`, `edit`, `runner`, `capture`, `cache`, `lazy`, `replay`, `modes`,
`plan` and `receipts` in this order. The other files are modules that run directly after a point
(`parts`), the hooks of one step of a generation (`steps`), the inputs of a cached run (`origin`),
the warning of functions that change only padding (`padding_changes`), names that only `models` and
`interp` need (`shared`), and general parts without hooks (`base`).
"""

from hooks.base import missing_name as _missing_name
from hooks.base._torch import Identity
from hooks.base.errors import (
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
from hooks.base.pieces import position_offset, start_of_piece, token_mask
from hooks.base.selection import index_by_axis
from hooks.cache import ActivationCache
from hooks.edit import EditedPoint, HookContext, HookHandle, Hooks
from hooks.modes import Mode, Options
from hooks.names import Selector
from hooks.plan import Plan, Planned
from hooks.point import Hook, HookPoint, HookPoints, Point
from hooks.receipts import Receipt, Receipts
from hooks.runner import HookedRunner
from hooks.session import FusedUnlessHooked

__version__ = "0.1.0"

__all__ = [
    "ActivationCache",
    "CacheError",
    "ContextError",
    "EditError",
    "EditedPoint",
    "FusedUnlessHooked",
    "Hook",
    "HookContext",
    "HookError",
    "HookHandle",
    "HookPoint",
    "HookPoints",
    "HookedRunner",
    "Hooks",
    "Identity",
    "MemoryLimitError",
    "Mode",
    "ModeError",
    "NeverFiredError",
    "Options",
    "Plan",
    "Planned",
    "Point",
    "Receipt",
    "Receipts",
    "SelectionError",
    "Selector",
    "UnknownNameError",
    "index_by_axis",
    "position_offset",
    "start_of_piece",
    "token_mask",
]

__getattr__ = _missing_name(__name__, __all__)
