"""Pictures of caches, texts, lenses, results, circuits and curves; each function returns a `View`
with `.save("x.html")`, `.show()` and, for plots, `.figure`.

Read `view` (the page) and `parts` (the parts that its script draws) first, and then `texts`,
`stepped`, `tables`, `graphs` and `objects`, which make views. Matplotlib figures are in `figure`
and `matplotlib_figures`, which need the extra `plots` and are imported only when a figure is drawn.
"""

from hooks.base import missing_name as _missing_name
from interp.plots.graphs import attribution, circuit, features
from interp.plots.stepped import steps
from interp.plots.tables import curves, effects, image, together
from interp.plots.texts import lens, patterns, text
from interp.plots.view import Shown, View

__all__ = [
    "Shown",
    "View",
    "attribution",
    "circuit",
    "curves",
    "effects",
    "features",
    "image",
    "lens",
    "patterns",
    "steps",
    "text",
    "together",
]

__getattr__ = _missing_name(__name__, __all__)
