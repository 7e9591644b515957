"""Recorders, sessions, replays and parts of models, for `models` and `interp`.

`models` and `interp` import from three places only: `hooks`, `hooks.base` and this module.
"""

from hooks.capture import Recorder
from hooks.edit import edited_points_in_force
from hooks.names import blocks_of, names_by_layer, resolve
from hooks.padding_changes import one_warning
from hooks.parts import Part, PartPoint, parts_of, with_parts
from hooks.point import OptionalPoints, first_tensor, inside, point_of
from hooks.replay import plain_argument, replay
from hooks.session import (
    Edits,
    Session,
    Wire,
    edits_in_force,
    hooks_disabled,
    is_foreign,
    is_listened_to,
)
from hooks.steps import StepEdit, StepHooks, edits_of_step
