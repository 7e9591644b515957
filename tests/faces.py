"""The modules whose names are public: see examples/guides/reference.md."""

FACES = (
    "hooks",
    "models",
    "interp",
    "interp.alignment",
    "interp.attribution_graphs",
    "interp.claims",
    "interp.diffing",
    "interp.directions",
    "interp.edits",
    "interp.features",
    "interp.graph.circuits",
    "interp.plots",
    "interp.spectral",
    "interp.store",
)

MODULES = (*FACES, "interp.graph")
"""All modules with public names."""

FORMER = ("interp.pictures", "interp.tracing")
"""Modules whose import raises an error with the new name."""

PACKAGES = {"hooks", "models", "interp"}


def is_ours(value):
    """Return whether a class or a function is defined in this project."""
    return (getattr(value, "__module__", None) or "").split(".")[0] in PACKAGES
