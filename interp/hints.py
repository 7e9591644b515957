"""Hints for errors: names of TransformerLens, features without a dictionary, and the calls that
create objects.

`hooks.base.hints` reads `HINTS` when an error is raised.
"""

from collections.abc import Collection

from hooks import UnknownNameError
from hooks.base import Hints, unknown_name
from interp import transformer_lens

_MAKERS = {
    "Pairs": "Pairs(clean, corrupted, answers) makes them",
    "Graph": "interp.graph.Graph(model) makes one",
    "Circuit": "circuits.top(Graph(model), scores, n) or Circuit(Graph(model), edges) makes one",
    "Result": "an analysis such as activation_patching gives one",
    "Dictionary": "load_sae({}) reads one",
    "Crosscoder": "load_crosscoder({}) reads one",
    "Transcoders": "load_transcoders({}) reads them",
    "SVDTargets": "svd_targets(model, cache) gives them",
    "Steps": "Steps(model, prompt, answer) makes them",
    "Direction": "interp.directions.difference_of_means gives one",
}


def _features_hint(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """Return the error for the name of features; None for other names.

    Features exist only while a dictionary is spliced into the model.
    """
    if not name.endswith("features"):
        return None
    error = unknown_name(name, known, what)
    hint = "features of a dictionary are there inside `with interp.splice(model, sae)`"
    error.args = (f"{error.args[0]} ({hint})",)
    return error


HINTS = Hints(names=(transformer_lens.name_hint, _features_hint), makers=_MAKERS)
