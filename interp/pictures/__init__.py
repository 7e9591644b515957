"""Pictures of caches, texts, lenses, results, circuits and curves. Each function returns a `View`.

A `View` shows itself in a notebook, and has `.save("x.html")`, `.show()` and, where it is a plot, `.figure`.
Read `view` (a page) and `parts` (what its script draws) first; `texts`, `tables`, `graphs` and `objects` make views of them.
Figures of matplotlib, in `figure` and `plots`, need the extra `plots`, so they are imported only when one is drawn.
"""

from hooks.base import missing_name as _missing_name
from interp.pictures.graphs import attribution, circuit, features
from interp.pictures.tables import curves, effects, image, together
from interp.pictures.texts import lens, patterns, text
from interp.pictures.view import Shown, View

__all__ = [
    "Shown", "View", "attribution", "circuit", "curves", "effects", "features", "image", "lens",
    "patterns", "text", "together",
]  # fmt: skip

__getattr__ = _missing_name(__name__, __all__)
