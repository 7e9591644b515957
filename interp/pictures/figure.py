"""Picture: a figure that a notebook shows without any setting."""

import io
import os

try:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('figures need Matplotlib: pip install "hookscope[plots]"') from error


class Picture(Figure):
    """A figure of matplotlib. As the last line of a cell it shows itself."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as views do; the end of its name says the format: png, svg or pdf."""
        self.savefig(path, bbox_inches="tight")

    def _repr_png_(self) -> bytes:
        # A fresh kernel knows no other way: matplotlib's own is set by `%matplotlib inline`.
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.get_dpi())
        return buffer.getvalue()
