"""Parts of this package that `models` and `interp` build with, and no user needs.

Nothing else of `hooks` is imported there, but for what `hooks` itself exports.
"""

from hooks import storage, strict_json
from hooks._torch import (
    Component,
    FakeTensor,
    hooks_last,
    hooks_of,
    is_compiled,
    is_fully_sharded,
    is_unwatched,
    memory_of,
    peak_bytes,
    refuse_unbound,
    remove_hooks,
    traced_as_constant,
    uncompiled,
    version,
    without_gradients,
)
from hooks.calls import Calls, number_of_call
from hooks.capture import Recorder
from hooks.damage import damage_of
from hooks.draws import generator
from hooks.errors import (
    NEVER_FIRED,
    library,
    require_choice,
    require_fired,
    require_whole,
    unknown_name,
    warn,
)
from hooks.hints import HintedClass, HintsAtNames, register_hints, unknown_point
from hooks.kinds import missing_name, require_device, require_kind, require_module
from hooks.memory import require_room
from hooks.names import blocks_of, names_by_layer, resolve
from hooks.nested import mapped, tensors_in, with_first_tensor
from hooks.origin import config_hash, weights_hash
from hooks.parts import Part, PartPoint, parts_of, with_parts
from hooks.pieces import Piece, encoded, piece_read, reading, real_columns
from hooks.point import (
    POSITION_AXES,
    OptionalPoints,
    carried,
    first_tensor,
    inside,
    layer_of,
    point_at,
    require_axes,
)
from hooks.positions import TEXT_AXES, Index, Rows, Selection, all_but, broadcast, taken
from hooks.processes import Shards, is_whole, mesh_of
from hooks.progress import Count, progress_bar, progress_of, shows_progress
from hooks.replay import plain_argument, replay
from hooks.saying import shown
from hooks.scoped import Scoped
from hooks.session import (
    Edits,
    Session,
    Wire,
    edits_in_force,
    hooks_disabled,
    is_foreign,
    is_listened_to,
)
from hooks.transfer import all_to_device, is_trusted, later, stacked, to_device, trusted
from hooks.words import NoOthers, Words, forwards_in, refuse
