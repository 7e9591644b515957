"""Picture: a figure that a notebook shows without any setting."""

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A figure of matplotlib. As the last line of a cell it shows itself."""

    def _repr_png_(self) -> bytes:
        # A fresh kernel knows no other way: matplotlib's own is set by `%matplotlib inline`.
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.get_dpi())
        return buffer.getvalue()
