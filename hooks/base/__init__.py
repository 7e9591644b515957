"""General parts that all packages build with. They know nothing about hooks.

They are errors and their hints, storage, progress bars, bounds of memory, random draws, copies between devices, selections
along an axis, and pieces of texts. Read `errors`, `selection` and `pieces` first; the other files can be read in any order.
"""

from hooks.base import _torch, storage, strict_json
from hooks.base._torch import (
    Component,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    Identity,
    PeakBytes,
    children,
    compiled_forms,
    has_hooks,
    has_storage,
    hooks_last,
    hooks_of,
    insert_hook,
    is_checkpointed,
    is_compiled,
    is_fully_sharded,
    is_unwatched,
    memory_of,
    peak_bytes,
    refuse_unbound,
    remove_hook,
    remove_hooks,
    state_of,
    traced_as_constant,
    uncompiled,
    version,
    without_gradients,
)
from hooks.base.accessor import carried, language_of
from hooks.base.arguments import axis_of_rows, is_listed, require_rows, without_rows
from hooks.base.calls import Calls, number_of_call
from hooks.base.damage import damage_of
from hooks.base.draws import Draws, generator
from hooks.base.errors import (
    NEVER_FIRED,
    CacheError,
    ContextError,
    EditError,
    HookError,
    MemoryLimitError,
    ModeError,
    NeverFiredError,
    SelectionError,
    UnknownNameError,
    library,
    require_choice,
    require_fired,
    require_integer,
    unknown_name,
    warn,
)
from hooks.base.hashes import config_hash, weights_hash
from hooks.base.hints import (
    HintedClass,
    Hints,
    HintsAtNames,
    how_to_mark,
    is_watcher,
    unknown_point,
)
from hooks.base.kinds import missing_name, require_device, require_kind, require_module
from hooks.base.memory import Bound, available, require_room
from hooks.base.nested import mapped, tensors_in, with_first_tensor
from hooks.base.paths import LAYER, layer_of
from hooks.base.pieces import (
    Piece,
    piece_is_known,
    piece_read,
    position_offset,
    reading,
    start_of_piece,
    token_mask,
)
from hooks.base.processes import Shards, is_whole, mesh_of
from hooks.base.progress import Count, progress_bar, progress_of, shows_progress
from hooks.base.saying import shown
from hooks.base.scoped import Entered, InContext, Scoped
from hooks.base.selection import (
    TEXT_AXES,
    Index,
    Rows,
    Selection,
    all_but,
    broadcast,
    index_by_axis,
    real_columns,
    real_of,
    require_axes,
    taken,
)
from hooks.base.storage import checksum
from hooks.base.text import Text, as_text, is_batch, named_spans, places_inside
from hooks.base.text_forms import (
    Texts,
    columns_of,
    each_text,
    is_columns,
    is_integer,
    is_one_text,
    number_of_texts,
)
from hooks.base.transfer import (
    Copies,
    Placement,
    all_to_device,
    is_trusted,
    later,
    private,
    stacked,
    to_device,
    trusted,
)
from hooks.base.words import NoOthers, Words, forwards_in, refuse
