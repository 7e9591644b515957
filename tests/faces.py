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
