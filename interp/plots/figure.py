"""Picture: a figure that a notebook displays without settings."""

import io
import os
from typing import Literal

from hooks.base import explains_calls, install_command, storage

try:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
except ModuleNotFoundError as error:
    install = install_command("plots")
    raise ModuleNotFoundError(f"figures need Matplotlib: {install}") from error


def save_figure(
    figure: Figure, path: str | os.PathLike[str], dpi: float | Literal["figure"] = "figure"
) -> None:
    """Write a figure to a file.

    Args:
        figure: the figure.
        path, dpi: see `Picture.save`, which also lists the errors.
    """
    kinds = figure.canvas.get_supported_filetypes()
    suffix = storage.suffix_of(path, [f".{kind}" for kind in kinds])
    with storage.replacing(storage.path_of(path)) as partial:
        figure.savefig(partial, format=suffix[1:], dpi=dpi, bbox_inches="tight")


class Picture(Figure):
    """A matplotlib figure, which a notebook displays as the last line of a cell."""

    @explains_calls
    def save(self, path: str | os.PathLike[str], dpi: float | Literal["figure"] = "figure") -> None:
        """Write the figure to a file, completely or not at all.

        Args:
            path: the file. Its suffix, such as `.png` or `.pdf`, determines the format.
            dpi: the dots per inch of a format with pixels, such as 300 for print. Default: the dots
                per inch of the figure, 100 if you did not change them.

        Raises:
            ValueError: if Matplotlib does not support the format.
            FileNotFoundError: if the directory does not exist.
        """
        save_figure(self, path, dpi)

    def _repr_png_(self) -> bytes:
        # Without this method a new kernel could not display the figure until `%matplotlib inline`
        # is run.
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.get_dpi())
        return buffer.getvalue()
