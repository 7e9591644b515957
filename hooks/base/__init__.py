"""General parts for all packages: texts, selections, comparisons, errors, storage and memory.

Read `text_forms`, `pieces`, `text` and `selection` first, then `errors`, `padding_messages`,
`hints` and `kinds`, and the other files in any order. This module exports the names for `models`
and `interp`. `hooks` imports other names directly from their files.
"""

from hooks.base import padding_messages, storage, strict_json
from hooks.base._torch import (
    Component,
    FakeTensor,
    compiled,
    explains_calls,
    hooks_last,
    hooks_of,
    is_compiled,
    is_fully_sharded,
    is_unwatched,
    keep_in_place,
    memory_of,
    peak_bytes,
    remove_hooks,
    traced_as_constant,
    uncompiled,
    version,
    without_gradients,
)
from hooks.base.accessor import carried, language_of, writer_of
from hooks.base.arguments import axis_of_rows, is_listed, require_rows, without_rows
from hooks.base.calls import Calls, number_of_call
from hooks.base.closeness import (
    WRONG_SUM,
    agree,
    are_metric_rounding,
    block_rounding,
    code_rounding,
    file_rounding,
    float32_rounding,
    is_cancelled,
    is_close,
    is_rounding,
    is_same,
    is_same_metric,
    logits_rounding,
    model_gap,
    module_rounding,
    norm_rounding,
    run_rounding,
    stream_rounding,
    sum_error,
    sum_rounding,
)
from hooks.base.damage import damage_of
from hooks.base.draws import generator
from hooks.base.errors import (
    NEVER_FIRED,
    library,
    require_choice,
    require_fired,
    require_integer,
    requirement,
    unknown_name,
    warn,
)
from hooks.base.hashes import config_hash, weights_hash, without_hashes
from hooks.base.hints import HintedClass, Hints, HintsAtNames, attribute_hint, unknown_point
from hooks.base.kinds import (
    missing_name,
    require_callable,
    require_device,
    require_kind,
    require_module,
)
from hooks.base.memory import free_memory, require_room
from hooks.base.nested import mapped, tensors_in, with_first_tensor
from hooks.base.paths import layer_of
from hooks.base.pieces import Piece, piece_read, reading
from hooks.base.processes import Shards, is_whole, mesh_of, whole
from hooks.base.progress import Count, progress_bar, progress_of, shows_progress
from hooks.base.saying import number_of, shown
from hooks.base.scoped import Scoped
from hooks.base.selection import (
    POSITION_AXES,
    TEXT_AXES,
    Index,
    Rows,
    Selection,
    all_but,
    broadcast,
    columns_of_last,
    real_columns,
    real_of,
    real_positions,
    require_axes,
    sides_of_padding,
    taken,
    true_columns,
)
from hooks.base.text import Text, as_text, is_batch, named_spans, places_inside, text_of_inputs
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
    Placement,
    all_to_device,
    later,
    skip_token_checks,
    skips_token_checks,
    stacked,
    to_device,
)
from hooks.base.widening import HALF, at_least_float32, wide_dtype, widened, widened_module
from hooks.base.words import NoOthers, Words, forwards_in, hides_others, refuse
