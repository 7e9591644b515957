"""Names from `transformers` and TransformerLens, each with our equivalent, for errors.

If a user writes a name of another library, the error contains our equivalent.
"""

import json
from collections.abc import Collection
from pathlib import Path

from hooks import UnknownNameError
from hooks.base import Hints, unknown_name

# The last parts of the names of points of a block.
_PARTS = {
    *("q", "k", "v", "z", "scores", "pattern", "attn_out", "mlp_out"),
    *("resid_pre", "resid_mid", "resid_post"),
}
# Words of `transformers` and of users for values, each with the last part of a point's name.
_USUAL = {
    "attentions": "pattern",
    "attention": "pattern",
    "hidden_states": "resid_pre",
    "hidden_state": "resid_pre",
    "last_hidden_state": "resid_post",
    "head": "z",
    "heads": "z",
    "neuron": "mlp.post",
    "neurons": "mlp.post",
    "resid": "resid_post",
    "residual": "resid_post",
}
_MARKING = "models.attach(model) gives a model of transformers the names of points"


def _attached_first(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """Return the error for a name such as `blocks.3.attn.z`, if the model has no such names.

    The error says how to give these names to the points of a model of `transformers`. For any other
    name or model, the result is None.
    """
    is_of_block = name.startswith(("blocks.", "*.")) or name in _PARTS
    if not is_of_block or any("blocks." in other for other in known):
        return None
    error = unknown_name(name, known, what)
    error.args = (f"{error.args[0]} ({_MARKING})",)
    return error


def _usual_word(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """Return the error for a usual word for a value, with the name of the point.

    For any other name, or if the model has no such point, the result is None.
    """
    ours = _USUAL.get(name, "")
    if not ours or not any(other == ours or other.endswith(f".{ours}") for other in known):
        return None
    return UnknownNameError(f"no {what} is named {name!r}; here it is {ours!r}", name)


HINTS = Hints(
    names=(_attached_first, _usual_word),
    **json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")),
    watchers=(
        "transformers.utils.output_capturing",
        # `gradient_checkpointing_enable` registers this hook at the embedding.
        "transformers.modeling_utils.make_inputs_require_grads",
    ),
    marking=_MARKING,
)
