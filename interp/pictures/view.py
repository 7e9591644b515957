"""View: a picture as one page of HTML, which needs no other file and no network.

1. A picture is a list of parts, `grid`, `text`, `bars`, `histogram`, `lines`, `network` or `attribution`, with their numbers as tensors.
2. The numbers become typed arrays in base64: exact or, in a page above `BUDGET`, of 8 bits.
3. The page holds them as JSON, a style and a script. Its policy allows these two alone, by their digests.
   In this JSON, null stands for NaN and infinity outside of arrays.
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

from hooks.base import storage, strict_json, unknown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 2_000_000
"""The most bytes of a page whose numbers are exact."""

FIGURES = (".png", ".pdf", ".svg")
"""The suffixes of figures of matplotlib."""

_EIGHT_BITS = "Numbers are rounded to 254 steps, because exact ones would exceed 2 MB."
_LONGEST = 80  # characters of one token that are shown
# A frame is as high as its page, which says so. Where no script runs, as in a notebook that is not trusted, it has a height
# that is guessed; and room for a tip under the pointer.
_FIT = (
    "(frame => addEventListener('message', event => { if (event.source === frame.contentWindow) "
    "frame.style.height = `${Math.max(240, +event.data)}px`; }))(document.currentScript.previousElementSibling)"
)
_SIGNS = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def visible(text: str) -> str:
    """`text` with a visible sign for each invisible character, cut where it is very long.

    >>> visible("a b" + chr(10) + chr(7))
    'a·b⏎\\\\x07'
    """
    rest = "…" if len(text) > _LONGEST else ""
    signed = text[:_LONGEST].translate(_SIGNS)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in signed) + rest


class Arrow(NamedTuple):
    """An edge from one node to another, or to its part `q`, `k` or `v`; blue if its score is negative, which helps."""

    start: str
    end: str
    part: str
    score: float


class View:
    """A picture that a notebook shows as the last line of a cell, and that a script saves or opens.

    Args:
        title: one line above the picture.
        parts: what it consists of; `interp.pictures` makes them.
        plot: draws it with matplotlib, where it is a plot.
        says: lines below the title.

    >>> from interp import pictures
    >>> view = pictures.text(["Re", "turn"], [0.5, 2.0], unit="nats")
    >>> view
    View of text: .save("x.html") writes it, .show() opens it
    >>> view.html().startswith("<!DOCTYPE html>")
    True
    """

    def __init__(
        self,
        title: str,
        parts: Sequence[Mapping[str, Any]],
        plot: Callable[[], "Figure"] | None = None,
        says: Sequence[str] = (),
    ) -> None:
        self.title, self.parts, self._plot, self.says = title, [*parts], plot, says

    @property
    def figure(self) -> "Figure":
        """The picture of matplotlib, to print. It needs the extra `plots`.

        Raises:
            ValueError: if the picture is no plot.
        """
        if self._plot is None:
            raise ValueError(f"only plots have a figure; got {self.title}: use .save() or .show()")
        return self._plot()

    def html(self) -> str:
        """The whole page: the title, and each part under its heading and what it says."""
        said = html.escape("\n".join(self.says))
        places = [f"<pre>{said}</pre>"] if said else []
        for n, part in enumerate(self.parts):
            lines = ("h2", part.get("heading")), ("p", part.get("says"))
            places += [f"<{tag}>{html.escape(line)}</{tag}>" for tag, line in lines if line]
            places.append(f'<figure data-part="{n}"></figure>')
        title = html.escape(visible_title(self.title))
        body = f"<main><h1>{title}</h1>{''.join(places)}</main>"
        whole = _page(self.title, body, self.parts, exact=True)
        return whole if len(whole) <= BUDGET else _page(self.title, body, self.parts, exact=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, completely or not at all. The suffix decides the format.

        Args:
            path: the file. `.html` is the page. Of plots, `.png`, `.pdf` and `.svg` are the figure.

        Raises:
            ValueError: if the suffix is another one.
            FileNotFoundError: if there is no such directory.
        """
        suffix = storage.suffix_of(path, (".html", *(FIGURES if self._plot else ())))
        if suffix in FIGURES:
            from interp.pictures.figure import save

            save(self.figure, path)
            return
        with storage.replacing(storage.path_of(path)) as partial:
            partial.write_text(self.html(), encoding="utf-8")

    def show(self) -> None:
        """Open the page in a browser. The file stays in the system's temporary directory."""
        # Imported here, because it looks for the browsers of the system.
        import webbrowser

        path = Path(tempfile.mkdtemp(prefix="hookscope-")) / "view.html"
        self.save(path)
        webbrowser.open(path.as_uri())

    def _repr_html_(self) -> str:
        # In a frame of its own, neither style nor script meets those of the notebook.
        height = min(900, 90 + 20 * len(self.says) + sum(map(_height, self.parts)))
        return (
            # A notebook that is not trusted, and GitHub, take out the frame and the style, and show this line.
            f'<p class="hookscope">{html.escape(visible_title(self.title))}: a picture, which trusted notebooks show</p>'
            "<style>.hookscope { display: none }</style>"
            f'<iframe sandbox="allow-scripts" title="{html.escape(self.title)}" '
            f'style="border: 0; height: {height}px; resize: vertical; width: 100%" '
            f'srcdoc="{html.escape(self.html())}"></iframe><script>{_FIT}</script>'
        )

    def __repr__(self) -> str:
        return f'View of {self.title}: .save("x.html") writes it, .show() opens it'


def visible_title(text: str) -> str:
    """A line of prose with signs in place of control characters, cut where it is very long."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:300])


@cache
def _file(name: str) -> tuple[str, str]:
    """A file beside this one, and its digest for the policy."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).digest()
    return text, f"'sha256-{base64.b64encode(digest).decode()}'"


def _page(title: str, body: str, parts: Sequence[Mapping[str, Any]], exact: bool) -> str:
    (style, of_style), (script, of_script) = _file("view.css"), _file("view.js")
    noted = [part if exact else {**part, "note": _joined(part)} for part in parts]
    data = strict_json.dumps(
        strict_json.finite({"parts": noted}),
        default=lambda value: strict_json.finite(_packed(value, exact)),
    )
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    policy = f"default-src 'none'; style-src {of_style}; script-src {of_script}; img-src data:; base-uri 'none'; form-action 'none'"
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
<noscript><p>The pictures are drawn by this page's own script, and scripts are switched off.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _joined(part: Mapping[str, Any]) -> str:
    return " ".join(filter(None, [part.get("note"), _EIGHT_BITS]))


def _packed(value: Any, exact: bool) -> dict[str, Any]:
    """A tensor as a little-endian array in base64. Of 8 bits, 0 to 254 are steps and 255 is NaN."""
    if not isinstance(value, Tensor):
        raise TypeError(f"a picture holds tensors, texts and numbers; got a {type(value).__name__}")
    double = value.detach().cpu().double()
    shape, known = [*value.shape], double[double.isfinite()]
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
    return base64.b64encode(raw).decode()


def limit_of(values: Tensor, least: float = 0.0) -> float:
    """The largest size of values, or `least`; 1 where all are 0: where colours end."""
    known = values[values.isfinite()].abs()
    largest = max(known.max().item() if len(known) else 0.0, least)
    return largest if largest > 0 and math.isfinite(largest) else 1.0


def plotted_axes(axes: Sequence[str], facet: str | None) -> list[str]:
    """The axes of one picture of a result, one or two, without the facet.

    Args:
        axes: those of the result, without `example`.
        facet: the one that has a picture for each label.

    Raises:
        UnknownNameError: if there is no such axis.
        ValueError: if others are left.
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
    if part["kind"] == "bars":
        return 24 + 20 * len(part["values"])
    if part["kind"] == "histogram":
        return 140
    if part["kind"] == "attribution":
        return 820
    if part["kind"] == "text":
        return min(400, 80 + sum(map(len, part["tokens"])) // 3)
    return 640 if part.get("strip") else 460


class Shown:
    """A base of classes that have a picture; each says in `view` which."""

    is_plot: ClassVar[bool] = False
    """Whether the picture is a plot, so that it has a figure too."""

    def view(self) -> View:
        """The picture."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, completely or not at all. The suffix of the path decides the format.

        `.html` is the picture as a page. Of plots, `.png`, `.pdf` and `.svg` are the figure. A class
        with `load` writes the file that it reads under `.safetensors`, or under a name without a suffix.
        A `Result` has `.json` and `.csv` too, which are not read again. The error lists what there is.

        Raises:
            ValueError: if the suffix is another one.
            FileNotFoundError: if there is no such directory.
            TypeError: if a fact does not fit JSON.
        """
        writers = self._writers()
        writers[storage.suffix_of(path, writers)](storage.path_of(path))

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        """The functions that write the object to a path, by the suffix."""
        suffixes = (".html", *(FIGURES if self.is_plot else ()))
        return {suffix: lambda path: self.view().save(path) for suffix in suffixes}

    def _repr_html_(self) -> str:
        return self.view()._repr_html_()


def told(facts: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the facts that are numbers, text or short lists of them."""
    for name, fact in facts.items():
        if isinstance(fact, str | int | float) or (
            isinstance(fact, list | tuple) and len(fact) < 9
        ):
            yield f"{name}: {fact!s:.200}"
