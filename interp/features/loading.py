"""Dictionaries from files: the format is recognised by what lies in a folder.

1. Find the folder or the file: a bundled one, one on this machine, or one on the Hugging Face hub.
2. Ask each form whether it is one of its own. A file is never read as its siblings.
3. Read it, and widen half precision.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path

import torch
from torch import nn

from hooks.base import damage_of, explains_calls, require_kind, storage, unknown_name
from interp.features.bundled import NAMES, bundled
from interp.features.forms import FORMS, Form, Loaded
from interp.features.forms.common import BY_HAND
from interp.features.hub import downloaded, may_be_on_hub


@explains_calls
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
    Scope, Goodfire and Kissane et al. (`z` of GPT-2). Points that the files name are given our names. `.to(device)` moves the weights.

    Args:
        path: a folder, or a file in it. A file of one of several layers, such as `layer_1.safetensors`,
            is this layer alone. Or the name of a bundled dictionary, `pydoc-4l/resid_post` or
            `pydoc-4l/transcoders`; or a place on the Hugging Face hub, such as
            `google/gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71`. Where the package sae_lens is
            installed, also a release and an id as SAELens names them.
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
        ValueError: if files of several formats are there, a field or a tensor is missing or unknown, or
            the path is that of a part of a cross-layer transcoder.

    >>> load_sae("pydoc-4l/resid_post")
    Dictionary(
      128 -> 1024 features -> 128, at blocks.2.resid_post of pydoc-4l
      (activation): TopK(k=32, by='value', relu=True)
    )
    """
    require_kind(
        "path", path, (str, os.PathLike), "a path or a name", "'pydoc-4l/resid_post' is one"
    )
    require_kind("dtype", dtype, (torch.dtype, type(None)), "a torch.dtype", "torch.float32 is one")
    if not os.fspath(path):
        raise FileNotFoundError(f"path must name a folder or a file; got {path!r}")
    if str(path) in NAMES and not Path(path).exists():
        made = bundled(str(path))
        for dictionary in made.values():
            dictionary.to(dtype)
        return made if len(made) > 1 else next(iter(made.values()))
    on_hub = isinstance(path, str) and may_be_on_hub(path) and not Path(path).exists()
    local = downloaded(str(path)) if on_hub else Path(path)
    name, read, source = _recognised(local, format)
    settings = {
        "norm_factor": norm_factor,
        "k": k,
        "scale_embeddings": scale_embeddings,
        "transcodes": transcodes,
    }
    options = {setting: value for setting, value in settings.items() if value is not None}
    if idle := sorted(options.keys() - inspect.signature(read).parameters):
        raise ValueError(f"{', '.join(idle)} must be None for files of {name}, which say all")
    if FORMS[name].single and source.is_dir():
        source = _only_file(FORMS[name], source)
    with storage.one_error(source):
        loaded = read(source, **options)
    for each in loaded.values() if isinstance(loaded, dict) else [loaded]:
        each.to(dtype or _at_least_float32(each))
    return loaded


def _recognised(local: Path, format: str) -> tuple[str, Callable[..., Loaded], Path]:
    """Return the name of the form of the files at a path, its reader, and what the reader takes.

    Raises:
        FileNotFoundError: if there is no such path, or it has no known files.
        UnknownNameError: if there is no such format.
        ValueError: if files of several formats are there, or a download is damaged.
    """
    if not local.exists():
        raise FileNotFoundError(
            f"no folder or file is at {str(local)!r} (bundled: {', '.join(NAMES)}; on the hub: owner/repository/folder)"
        )
    if format != "auto" and format not in FORMS:
        raise unknown_name(format, FORMS, "format of dictionaries")
    wanted = FORMS if format == "auto" else {format: FORMS[format]}
    readings = {name: _reading(form, local) for name, form in wanted.items()}
    fitting = {name: reading for name, reading in readings.items() if reading is not None}
    # A file of a folder's form is no dictionary of its own.
    folders = {name: reading for name, reading in fitting.items() if not FORMS[name].single}
    fitting = folders or fitting
    if len(fitting) > 1:
        raise ValueError(
            f"format= must say which of the files in {local} to read; it has those of {' and '.join(fitting)}"
        )
    if not fitting and (damage := damage_of(local)):
        raise ValueError(f"{local} {damage}; download it again")
    if not fitting:
        listed = "; ".join(f"{' and '.join(form.files)} ({name})" for name, form in wanted.items())
        rule = "be one of" if local.is_file() else "have"
        raise FileNotFoundError(f"{local} must {rule} {listed}. {BY_HAND}")
    ((name, (read, source)),) = fitting.items()
    return name, read, source


def _at_least_float32(module: nn.Module) -> torch.dtype:
    """The widest dtype of a module's weights, float32 at least."""
    return reduce(
        torch.promote_types,
        (tensor.dtype for tensor in module.state_dict().values()),
        torch.float32,
    )


def _reading(form: Form, local: Path) -> tuple[Callable[..., Loaded], Path] | None:
    """The reader of a form and the path that it takes; None if the path is of no such form.

    1. A folder has the files of the form.
    2. A file is a whole dictionary, or one layer of several.
    3. Another file of a folder, such as its config, stands for the folder.

    Raises:
        ValueError: if a file is a part of a dictionary.
    """
    if local.is_dir():
        return (form.read, local) if _has(form, local) else None
    if form.single:
        return (form.read, local) if _is_one_of(local, form.files) else None
    if _is_one_of(local, form.layers):
        if form.read_layer is None:
            raise ValueError(
                f"path must be the folder {local.parent}, as one layer is no dictionary; got {local}"
            )
        return form.read_layer, local
    for pattern in (*form.files, "config.yaml"):
        if local.match(pattern) and _has(form, folder := local.parents[pattern.count("/")]):
            return form.read, folder
    return None


def _is_one_of(local: Path, patterns: Iterable[str]) -> bool:
    return any(local.match(pattern) for pattern in patterns)


def _has(form: Form, folder: Path) -> bool:
    """Whether a folder has the files of a form."""
    return (any if form.single else all)(any(folder.glob(each)) for each in form.files)


def _only_file(form: Form, folder: Path) -> Path:
    """The file in a folder of a form whose dictionaries are single files.

    Raises:
        ValueError: if there are several.
    """
    files = sorted(file for pattern in form.files for file in folder.glob(pattern))
    if len(files) > 1:
        raise ValueError(
            f"the path must be of one file, not of a folder of {len(files)}, such as {files[0]}"
        )
    return files[0]
