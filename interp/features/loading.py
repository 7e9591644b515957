"""Dictionaries from files: the format is recognised by what lies in a folder."""

import inspect
import os
from functools import reduce
from pathlib import Path

import torch
from torch import nn

from hooks.shared import unknown_name
from interp.features.bundled import NAMES, bundled
from interp.features.forms import FORMS, Form, Loaded
from interp.features.forms.common import BY_HAND
from interp.features.hub import downloaded, may_be_on_hub


def load_sae(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    norm_factor: float | None = None,
    k: int | None = None,
    scale_embeddings: bool | None = None,
    transcodes: bool | None = None,
) -> Loaded:
    """Load a sparse autoencoder or transcoders from the files of any of these libraries and releases.

    SAELens 6 and before, sparsify, dictionary_learning, Gemma Scope 1 and 2, circuit-tracer, Llama Scope, OpenAI, Qwen
    Scope and Goodfire. Points that the files name are given our names. `.to(device)` moves the weights.

    Args:
        path: a folder, a file in it; the name of a bundled dictionary, `pydoc-4l/resid_post` or `pydoc-4l/transcoders`;
            or a place on the Hugging Face hub, such as `google/gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71`.
            Where the package sae_lens is installed, also a release and an id as SAELens names them.
        format: whose files they are, where a folder has those of several.
        dtype: of weights and features. By default that of the file, but half precision becomes float32, whose features
            are those of circuit-tracer.
        norm_factor: what activations were multiplied by in training, where the files do not have it (SAELens), or what
            they were divided by (dictionary_learning). It goes into the weights.
        k: how many features are kept, where the files do not say it (circuit-tracer, Qwen Scope).
        scale_embeddings: whether it is for embeddings, which are scaled by √d_model, where the path does not say it
            (Gemma Scope 1).
        transcodes: whether it is a transcoder, where path and files do not say it (Gemma Scope 1, sparsify).

    Returns:
        A dictionary; or, of several layers, one for each point, as `splice` takes them; or a cross-layer transcoder.

    Raises:
        FileNotFoundError: if there is no such folder, here or on the hub, or it has no known files.
        ImportError: if it may be on the hub, and huggingface_hub is not installed.
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
        for dictionary in made.values():
            dictionary.to(dtype)
        return made if len(made) > 1 else next(iter(made.values()))
    on_hub = isinstance(path, str) and may_be_on_hub(path) and not Path(path).exists()
    local = downloaded(str(path)) if on_hub else Path(path)
    if not local.exists():
        raise FileNotFoundError(
            f"no folder or file is at {str(path)!r} (bundled: {', '.join(NAMES)}; on the hub: owner/repository/folder)"
        )
    folder = local.parent if local.is_file() else local
    if format != "auto" and format not in FORMS:
        raise unknown_name(format, FORMS, "format of dictionaries")
    wanted = FORMS if format == "auto" else {format: FORMS[format]}
    fitting = {name: form for name, form in wanted.items() if _fits(form, local)}
    # A file of a folder's form is no dictionary of its own.
    fitting = {name: form for name, form in fitting.items() if not form.single} or fitting
    if len(fitting) > 1:
        raise ValueError(
            f"format= must say which of the files in {folder} to read; it has those of {' and '.join(fitting)}"
        )
    if not fitting:
        listed = "; ".join(f"{' and '.join(form.files)} ({name})" for name, form in wanted.items())
        raise FileNotFoundError(f"{folder} must have {listed}. {BY_HAND}")
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
    loaded = form.read(_file(form, local) if form.single else folder, **options)
    for each in loaded.values() if isinstance(loaded, dict) else [loaded]:
        each.to(dtype or _at_least_float32(each))
    return loaded


def _at_least_float32(module: nn.Module) -> torch.dtype:
    """The widest dtype of a module's weights, float32 at least."""
    return reduce(
        torch.promote_types,
        (tensor.dtype for tensor in module.state_dict().values()),
        torch.float32,
    )


def _fits(form: Form, local: Path) -> bool:
    """Whether a file or folder has the files of a form. A file of `torch.save` must be one of them itself."""
    is_one_of_them = any(local.match(pattern) for pattern in form.files)
    if local.is_file() and (form.single or local.suffix in (".pt", ".pth")) and not is_one_of_them:
        return False
    folder = local.parent if local.is_file() else local
    return (any if form.single else all)(any(folder.glob(each)) for each in form.files)


def _file(form: Form, local: Path) -> Path:
    """The file of a form whose dictionaries are single files.

    Raises:
        ValueError: if a folder has several.
    """
    if local.is_file():
        return local
    files = sorted(file for pattern in form.files for file in local.glob(pattern))
    if len(files) > 1:
        raise ValueError(
            f"the path must be of one file, not of a folder of {len(files)}, such as {files[0]}"
        )
    return files[0]
