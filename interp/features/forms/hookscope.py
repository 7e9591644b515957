"""Read the file that `Dictionary.save` writes if SAELens has no architecture for a dictionary."""

from pathlib import Path

from hooks.base import storage
from interp.features.dictionary import Dictionary
from interp.features.saving import ACTIVATIONS, KIND, OWN_FILE, SETTINGS


def read(folder: Path) -> Dictionary:
    """Return the dictionary in `dictionary.safetensors`."""
    with storage.opened(folder / OWN_FILE, KIND) as (weights, facts):
        kind, _ = ACTIVATIONS[facts["activation"]]
        prefix = "activation."
        tensors = {
            name.removeprefix(prefix): weights.pop(name)
            for name in [*weights]
            if name.startswith(prefix)
        }
        settings = {name: facts[name] for name in SETTINGS}
        return Dictionary(**weights, activation=kind(**tensors, **facts["settings"]), **settings)
