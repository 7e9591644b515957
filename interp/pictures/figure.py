"""Picture: a figure that a notebook shows without any setting."""

import io
import os

from hooks.base import storage

try:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('figures need Matplotlib: pip install "hookscope[plots]"') from error


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file; see `Picture.save`."""
    kinds = figure.canvas.get_supported_filetypes()
    suffix = storage.suffix_of(path, [f".{kind}" for kind in kinds])
    with storage.replacing(storage.path_of(path)) as partial:
        figure.savefig(partial, format=suffix[1:], bbox_inches="tight")


class Picture(Figure):
    """A figure of matplotlib. As the last line of a cell it shows itself."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figure to a file, completely or not at all. The suffix, as `.png`, decides the format.

        Raises:
            ValueError: if Matplotlib has no such format.
            FileNotFoundError: if there is no such directory.
        """
        save(self, path)

    def _repr_png_(self) -> bytes:
        # A fresh kernel knows no other way: matplotlib's own is set by `%matplotlib inline`.
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.get_dpi())
        return buffer.getvalue()
