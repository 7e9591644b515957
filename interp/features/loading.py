"""Dictionaries from files: the format is recognised by what lies in a folder."""

import inspect
import os
from pathlib import Path

from hooks.errors import unknown_name
from interp.features.bundled import NAMES, bundled
from interp.features.forms import FORMS, Form, Loaded


def load_sae(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    norm_factor: float | None = None,
    k: int | None = None,
    scale_embeddings: bool | None = None,
    transcodes: bool | None = None,
) -> Loaded:
    """Load a sparse autoencoder or transcoders from the files of any of these libraries.

    SAELens 6 and before, sparsify, dictionary_learning, Gemma Scope 1 and 2, and circuit-tracer. Points that the config
    names are given our names. Weights keep their dtype; `.to(device)` moves them.

    Args:
        path: a folder, a file in it, or the name of a bundled dictionary: `pydoc-4l/resid_post` or
            `pydoc-4l/transcoders`.
        format: whose files they are, where a folder has those of several.
        norm_factor: what activations were multiplied by in training, where the files do not have it (SAELens), or what
            they were divided by (dictionary_learning). It goes into the weights.
        k: how many features are kept, where the files do not say it (circuit-tracer).
        scale_embeddings: whether it is for embeddings, which are scaled by √d_model, where the path does not say it
            (Gemma Scope 1).
        transcodes: whether it is a transcoder, where path and files do not say it (Gemma Scope 1, sparsify).

    Returns:
        A dictionary; or, of several layers, one for each point, as `splice` takes them; or a cross-layer transcoder.

    Raises:
        FileNotFoundError: if there is no such folder, or it has no known files.
        UnknownNameError: if there is no such format.
        ValueError: if files of several formats are there, or a field or a tensor is missing or unknown.

    >>> load_sae("pydoc-4l/resid_post")
    Dictionary(
      128 -> 1024 features -> 128, at blocks.2.resid_post of pydoc-4l
      (activation): TopK(k=32, by='value', relu=True)
    )
    """
    if str(path) in NAMES and not Path(path).exists():
        made = bundled(str(path))
        return made if len(made) > 1 else next(iter(made.values()))
    given = Path(path)
    folder = given.parent if given.is_file() else given
    if format != "auto" and format not in FORMS:
        raise unknown_name(format, FORMS, "format of dictionaries")
    wanted = FORMS if format == "auto" else {format: FORMS[format]}
    fitting = {name: form for name, form in wanted.items() if _fits(form, given)}
    if len(fitting) > 1:
        raise ValueError(
            f"format= must say which of the files in {folder} to read; it has those of {' and '.join(fitting)}"
        )
    if not fitting:
        listed = "; ".join(f"{' and '.join(form.files)} ({name})" for name, form in wanted.items())
        bundled_too = f"; bundled ones are {' and '.join(NAMES)}" if format == "auto" else ""
        raise FileNotFoundError(f"{folder} must have {listed}{bundled_too}")
    ((name, form),) = fitting.items()
    known = inspect.signature(form.read).parameters
    asked = {
        "norm_factor": norm_factor,
        "k": k,
        "scale_embeddings": scale_embeddings,
        "transcodes": transcodes,
    }
    options = {name: value for name, value in asked.items() if value is not None}
    if idle := sorted(options.keys() - known):
        raise ValueError(f"{', '.join(idle)} must be None for files of {name}, which say all")
    return form.read(_file(form, given) if form.single else folder, **options)


def _fits(form: Form, given: Path) -> bool:
    """Whether a file or folder has the files of a form."""
    if form.single and given.is_file():
        return any(given.match(pattern) for pattern in form.files)
    folder = given.parent if given.is_file() else given
    return all(any(folder.glob(pattern)) for pattern in form.files)


def _file(form: Form, given: Path) -> Path:
    """The file of a form whose dictionaries are single files.

    Raises:
        ValueError: if a folder has several.
    """
    if given.is_file():
        return given
    files = sorted(file for pattern in form.files for file in given.glob(pattern))
    if len(files) > 1:
        raise ValueError(
            f"the path must be of one file, not of a folder of {len(files)}, such as {files[0]}"
        )
    return files[0]
