"""Names from `transformers` and TransformerLens, each with our equivalent, for errors.

If a user writes a name of another library, the error contains our equivalent.
"""

import json
from collections.abc import Collection
from pathlib import Path

from hooks import UnknownNameError
from hooks.base import Hints, unknown_name

_MARKING = "models.attach(model) gives a model of transformers the names of points"


def _attached_first(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """Return the error for a name such as `blocks.3.attn.z`, if the model has no such names.

    The error says how to give these names to the points of a model of `transformers`. For any other
    name or model, the result is None.
    """
    if not name.startswith(("blocks.", "*.")) or any("blocks." in other for other in known):
        return None
    error = unknown_name(name, known, what)
    error.args = (f"{error.args[0]} ({_MARKING})",)
    return error


HINTS = Hints(
    names=(_attached_first,),
    **json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")),
    watchers=("transformers.utils.output_capturing",),
    marking=_MARKING,
)
