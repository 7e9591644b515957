"""Picture: a figure that a notebook displays without settings."""

import io
import os

from hooks.base import requirement, storage

try:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
except ModuleNotFoundError as error:
    install = f'pip install "{requirement("plots")}"'
    raise ModuleNotFoundError(f"figures need Matplotlib: {install}") from error


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file.

    Args:
        figure: the figure.
        path: see `Picture.save`, which also lists the errors.
    """
    kinds = figure.canvas.get_supported_filetypes()
    suffix = storage.suffix_of(path, [f".{kind}" for kind in kinds])
    with storage.replacing(storage.path_of(path)) as partial:
        figure.savefig(partial, format=suffix[1:], bbox_inches="tight")


class Picture(Figure):
    """A matplotlib figure, which a notebook displays as the last line of a cell."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figure to a file, completely or not at all.

        The suffix, such as `.png`, determines the format.

        Raises:
            ValueError: if Matplotlib does not support the format.
            FileNotFoundError: if the directory does not exist.
        """
        save_figure(self, path)

    def _repr_png_(self) -> bytes:
        # Without this method a new kernel could not display the figure until `%matplotlib inline`
        # is run.
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.get_dpi())
        return buffer.getvalue()
