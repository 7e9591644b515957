"""Progress bars, for whoever watches: on a terminal or in a notebook."""

import sys
import warnings
from typing import Any


def progress_bar(**options: Any) -> Any:
    """A bar of `tqdm`, with its options, which leaves nothing when it ends. It is silent where nobody watches: in a file it
    would be a long line."""
    # Imported here: it takes time, and in a notebook without ipywidgets it warns and shows text.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    ipython = sys.modules.get("IPython")
    in_notebook = ipython is not None and ipython.get_ipython() is not None
    return tqdm(**{"disable": False if in_notebook else None, "leave": False} | options)
