"""View: a picture as one page of HTML, which needs no other file and no network.

1. A picture is a list of parts, `grid`, `text`, `steps`, `bars`, `histogram`, `lines`,
   `network` or `attribution`, with their numbers as tensors.
2. The numbers become typed arrays in base64. They are exact or, in a page larger than `BUDGET`,
   have 8 bits.
3. The page contains them as JSON, with a style and a script. Its content security policy contains
   the hashes of this style and this script, so a browser runs no other script. In the JSON, a
   number outside of an array is null if it is NaN or infinite.
"""

import base64
import hashlib
import html
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hooks.base import HintsAtNames, storage, strict_json, unknown_name, without_hashes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 2_000_000
"""The largest page with exact numbers, in bytes."""

FIGURES = (".png", ".pdf", ".svg")
"""The suffixes of matplotlib figures."""

_VISIBLE = 0.1
"""An effect is visible on a colour scale if it is at least this share of the end of the scale."""
_SMALL = 0.005
"""If the largest effect is below this share of target - base, all effects count as small."""
_EIGHT_BITS = "Numbers are rounded to 254 steps, because exact ones would exceed 2 MB."
# The largest number of characters of a token that are shown.
_LONGEST = 80
# This script runs in the notebook. It receives the height of the page, and sets the height of the
# frame. In a notebook that is not trusted, scripts do not run, and the frame keeps an estimated
# height, which includes space for a tooltip under the pointer.
_FIT = (
    "(frame => addEventListener('message', event => { if (event.source === frame.contentWindow) "
    "frame.style.height = `${Math.max(240, +event.data)}px`; }))"
    "(document.currentScript.previousElementSibling)"
)
_SIGNS = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible(text: str) -> str:
    """Return `text` with a visible sign for each invisible character, cut if it is very long.

    >>> visible("a b" + chr(10) + chr(7))
    'a·b⏎\\\\x07'
    """
    rest = "…" if len(text) > _LONGEST else ""
    return _escaped(text[:_LONGEST].translate(_SIGNS)) + rest


def _escaped(text: str) -> str:
    """Return a text with an escape sequence for each character that cannot be printed."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


class Arrow(NamedTuple):
    """An edge from one node to another node, or to its part `q`, `k` or `v`.

    It is drawn in blue if its score is negative, which means that the edge helps the metric.
    """

    start: str
    end: str
    part: str
    score: float


class View:
    """A picture that a notebook displays as the last line of a cell, and that a script saves or
    opens.

    Args:
        title: one line above the picture.
        parts: the parts of the picture, from `interp.plots`.
        plot: a function that draws the picture with matplotlib; None if the picture is not a plot.
        says: lines below the title.

    >>> from interp import plots
    >>> view = plots.text(["Re", "turn"], [0.5, 2.0], unit="nats")
    >>> view
    View of text: .save("x.html") writes it, .show() opens it
    >>> view.html().startswith("<!DOCTYPE html>")
    True
    """

    title: str
    parts: list[Mapping[str, Any]]
    says: Sequence[str]

    def __init__(
        self,
        title: str,
        parts: Sequence[Mapping[str, Any]],
        plot: Callable[[], "Figure"] | None = None,
        says: Sequence[str] = (),
    ) -> None:
        self.title = title
        self.parts = [*parts]
        self._plot = plot
        self.says = says

    @property
    def figure(self) -> "Figure":
        """The picture as a matplotlib figure, for print. It needs the extra `plots`.

        Raises:
            ValueError: if the picture is not a plot.
        """
        if self._plot is None:
            raise ValueError(f"only plots have a figure; got {self.title}: use .save() or .show()")
        return self._plot()

    def html(self) -> str:
        """Return the whole page: the title, and each part below its heading and text."""
        text = html.escape("\n".join(self.says))
        elements = [f"<pre>{text}</pre>"] if text else []
        for number, part in enumerate(self.parts):
            lines = ("h2", part.get("heading")), ("p", part.get("says"))
            elements += [f"<{tag}>{html.escape(line)}</{tag}>" for tag, line in lines if line]
            elements.append(f'<figure data-part="{number}"></figure>')
        title = html.escape(visible_title(self.title))
        body = f"<main><h1>{title}</h1>{''.join(elements)}</main>"
        whole = _page(self.title, body, self.parts, exact=True)
        return whole if len(whole) <= BUDGET else _page(self.title, body, self.parts, exact=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, completely or not at all. The suffix determines the format.

        Args:
            path: the file. `.html` is the page. For plots, `.png`, `.pdf` and `.svg` are the
                figure.

        Raises:
            ValueError: if the suffix is not supported.
            FileNotFoundError: if the directory does not exist.
        """
        suffix = storage.suffix_of(path, (".html", *(FIGURES if self._plot else ())))
        if suffix in FIGURES:
            from interp.plots.figure import save_figure

            save_figure(self.figure, path)
            return
        with storage.replacing(storage.path_of(path)) as partial:
            partial.write_text(self.html(), encoding="utf-8")

    def show(self) -> None:
        """Open the page in a browser. The file stays in the system's temporary directory."""
        # Import this module only here, because it searches for the browsers of the system.
        import webbrowser

        path = Path(tempfile.mkdtemp(prefix="hookscope-")) / "view.html"
        self.save(path)
        webbrowser.open(path.as_uri())

    def _repr_html_(self) -> str:
        # In a separate frame, style and script do not interfere with the notebook's.
        height = min(900, 90 + 20 * len(self.says) + sum(map(_height, self.parts)))
        return (
            # GitHub and notebooks that are not trusted remove the frame and the style, and show
            # this line.
            f'<p class="hookscope">{html.escape(visible_title(self.title))}: '
            "a picture, which trusted notebooks show</p>"
            "<style>.hookscope { display: none }</style>"
            f'<iframe sandbox="allow-scripts" title="{html.escape(self.title)}" '
            f'style="border: 0; height: {height}px; resize: vertical; width: 100%" '
            f'srcdoc="{html.escape(self.html())}"></iframe><script>{_FIT}</script>'
        )

    def __repr__(self) -> str:
        return f'View of {self.title}: .save("x.html") writes it, .show() opens it'


def visible_title(text: str) -> str:
    """Return a line of prose with visible signs for control characters, cut if it is very long."""
    return _escaped(text[:300])


@cache
def _file(name: str) -> tuple[str, str]:
    """Return the text of a file in this folder, and its digest for the policy."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).digest()
    return text, f"'sha256-{base64.b64encode(digest).decode()}'"


def _page(title: str, body: str, parts: Sequence[Mapping[str, Any]], exact: bool) -> str:
    """Return a page.

    Args:
        title: the title of the page.
        body: the HTML inside the body.
        parts: the parts of the picture.
        exact: whether numbers are exact; otherwise they have 8 bits.
    """
    style, of_style = _file("view.css")
    script, of_script = _file("view.js")
    noted = [part if exact else {**part, "note": _joined(part)} for part in parts]
    data = strict_json.dumps(
        strict_json.finite({"parts": noted}),
        default=lambda value: strict_json.finite(_packed(value, exact)),
    )
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    policy = (
        f"default-src 'none'; style-src {of_style}; script-src {of_script}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{html.escape(visible_title(title))}</title>
<style id="style">{style}</style>
</head>
<body>
{body}
<noscript><p>A script of this page draws the pictures, and scripts are switched off.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _joined(part: Mapping[str, Any]) -> str:
    """Return the note of a part, followed by the note that its numbers have only 8 bits."""
    return " ".join(filter(None, [part.get("note"), _EIGHT_BITS]))


def _packed(value: Any, exact: bool) -> dict[str, Any]:
    """Return a tensor as a little-endian array in base64.

    With 8 bits, the bytes 0 to 254 are steps from the smallest to the largest finite number, and
    255 is NaN.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"a picture contains tensors, texts and numbers; got a {type(value).__name__}"
        )
    double = value.detach().cpu().double()
    shape = [*value.shape]
    known = double[double.isfinite()]
    if exact:
        single = value.dtype.itemsize < 8
        array = double.numpy().astype("<f4" if single else "<f8")
        return {
            "type": "f4" if single else "f8",
            "shape": shape,
            "base64": _base64(array.tobytes()),
        }
    low = known.min().item() if len(known) else 0.0
    step = (known.max().item() - low) / 254 if len(known) else 0.0
    steps = ((double - low) / (step or 1.0)).round().clamp(0, 254).nan_to_num(nan=255)
    coded = _base64(steps.to(torch.uint8).numpy().tobytes())
    return {"type": "u1", "shape": shape, "base64": coded, "low": low, "step": step}


def _base64(raw: bytes) -> str:
    """Return bytes in base64."""
    return base64.b64encode(raw).decode()


def limit_of(values: Tensor, least: float = 0.0) -> float:
    """Return the end of the colour scale: the largest absolute value, or `least`.

    If both are 0, return 1.

    Args:
        values: the values. Numbers that are not finite are ignored.
        least: the smallest end. Default: 0.
    """
    known = values[values.isfinite()].abs()
    largest = max(known.max().item() if len(known) else 0.0, least)
    return largest if largest > 0 and math.isfinite(largest) else 1.0


def least_limit(result: Any, means: Tensor) -> float:
    """Return a number that the colour scale of effects includes: the size of target - base.

    Small effects then look small. But effects from 0.5 % to 10 % of target - base would look like
    small effects too, so the number is 0 for them, and also if the result has no target.

    Args:
        result: the result.
        means: its means, which are drawn.
    """
    if result.base is None or result.target is None:
        return 0.0
    gap = abs((result.target - result.base).mean().item())
    return 0.0 if _SMALL * gap <= limit_of(means) < _VISIBLE * gap else gap


def plotted_axes(axes: Sequence[str], facet: str | None) -> list[str]:
    """Return the one or two axes of each picture of a result, without the facet.

    Args:
        axes: the axes of the result, without `example`.
        facet: the axis with a picture for each label.

    Raises:
        UnknownNameError: if the axis does not exist.
        ValueError: if not one or two axes are left.
    """
    if facet is not None and facet not in axes:
        raise unknown_name(facet, axes, "axis of this result")
    rest = [axis for axis in axes if axis != facet]
    if len(rest) not in ((1, 2) if facet is None else (2,)):
        raise ValueError(
            "a plot must have one or two axes besides example, or three of which one is the facet; "
            f"got {tuple(axes)}: use select() or facet="
        )
    return rest


def _height(part: Mapping[str, Any]) -> int:
    """Return the estimated height of a part, in pixels."""
    if part["kind"] == "bars":
        return 24 + 20 * len(part["values"])
    if part["kind"] == "histogram":
        return 140
    if part["kind"] == "attribution":
        return 820
    if part["kind"] == "steps":
        return min(400, 110 + sum(map(len, part["words"])) // 3)
    if part["kind"] == "text":
        return min(400, 80 + sum(map(len, part["tokens"])) // 3)
    return 640 if part.get("strip") else 460


class Shown(HintsAtNames):
    """The base of classes with a picture, which they return in `view`.

    >>> import tempfile
    >>> from interp import Pairs, activation_patching
    >>> from models import load
    >>> pairs = Pairs("part KV81 is here; part KV8", "part KV84 is here; part KV8", ("1", "4"))
    >>> effects = activation_patching(load("pydoc-4l"), pairs, "z", over="head")
    >>> isinstance(effects, Shown)
    True
    >>> effects.save(f"{tempfile.mkdtemp()}/effects.html")
    """

    is_plot: ClassVar[bool] = False
    """True if the picture is a plot, which also has a figure."""

    def view(self) -> View:
        """Return the picture."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """Return the numbers in the JSON form of all results; see `interp.json_form`."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, completely or not at all. The suffix of the path determines the format.

        `.html` is the picture as a page. For plots, `.png`, `.pdf` and `.svg` are the figure.
        `.json` is the form of `as_json`; only `PrunedGraph.load` reads it. For another class with
        `load`, `.safetensors` or a name without a suffix is the file that `load` reads. A `Result`
        also supports `.csv`, with the extra `tables`.

        Raises:
            ValueError: if the suffix is not supported. The error lists the supported suffixes.
            FileNotFoundError: if the directory does not exist.
            TypeError: if a fact does not fit JSON.
        """
        writers = self._writers()
        writers[storage.suffix_of(path, writers)](storage.path_of(path))

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that write the object to a path, by suffix."""
        suffixes = (".html", *(FIGURES if self.is_plot else ()))
        pictures = {suffix: lambda path: self.view().save(path) for suffix in suffixes}
        return {**pictures, ".json": self._save_json}

    def _save_json(self, path: Path) -> None:
        """Write the form of `as_json`."""
        with storage.replacing(path) as partial:
            partial.write_text(strict_json.dumps(self.as_json()), encoding="utf-8")

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()


def told(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each fact that is a number, a text or a short list of these.

    Hashes are left out.
    """
    for name, fact in without_hashes(facts).items():
        if isinstance(fact, str | int | float) or (
            isinstance(fact, list | tuple) and len(fact) < 9
        ):
            yield f"{name}: {fact!s:.200}"
