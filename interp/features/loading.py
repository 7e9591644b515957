"""Load dictionaries from files. The format is recognized by the names of the files.

1. Find the folder or the file: bundled, on this machine, or on the Hugging Face hub.
2. Find the format to which the folder or file belongs. If the path is a file, no sibling is loaded
   in its place.
3. Read the files, and convert half precision to float32.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooks import UnknownNameError
from hooks.base import damage_of, explains_calls, require_kind, storage, unknown_name
from interp.features.bundled import NAMES, bundled
from interp.features.crosscoder import Crosscoder
from interp.features.dictionary import Dictionary
from interp.features.forms import CROSSCODERS, FORMS, Form, Loaded
from interp.features.forms.common import BY_HAND
from interp.features.hub import downloaded, may_be_on_hub
from interp.features.transcoders import Transcoders, TranscoderSet


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
) -> Dictionary:
    """Return a sparse autoencoder, or a transcoder of one layer, from files.

    The supported libraries and releases are SAELens 6 and before, sparsify, dictionary_learning,
    Gemma Scope 1 and 2, circuit-tracer, Llama Scope, OpenAI, Qwen Scope, Goodfire and Kissane et
    al. (`z` of GPT-2). The names of points in the files are translated to our names. `.to(device)`
    moves the weights. `load_transcoders` reads the transcoders of several layers.

    Args:
        path: a folder, or a file in it. The file of one of several layers, such as
            `layer_1.safetensors`, loads only this layer, and so does a folder that contains
            only this file. (A folder with `layer_0.safetensors` is a set.) The path can also be the
            name of a bundled dictionary, `pydoc-4l/resid_post`, or a place on the Hugging Face hub,
            such as `google/gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71`. If the package
            sae_lens is installed, a release and an id of SAELens are also possible.
        format: the format of the files. It is only needed if a folder contains files of several
            formats. Default: `auto`.
        dtype: the dtype of weights and features. Default: the dtype of the file, but float32 for
            half precision, so that features equal the features of circuit-tracer.
        norm_factor: the factor by which activations were multiplied (SAELens) or divided
            (dictionary_learning) in training, if the files do not contain it. It becomes a part of
            the weights, so that the dictionary reads activations without this factor.
        k: the number of active features at a position, if the files do not contain it
            (circuit-tracer, Qwen Scope).
        scale_embeddings: whether the dictionary reads embeddings, which are scaled by √d_model, if
            the path does not tell (Gemma Scope 1).
        transcodes: whether the dictionary is a transcoder, if the path and the files do not tell
            (Gemma Scope 1, sparsify).

    Returns:
        One dictionary. Its features have the scale of activations that are not normalized. For
        Llama Scope, SAELens multiplies the features by `dictionary.config["input_factor"]`.

    Raises:
        FileNotFoundError: if the path does not exist here or on the hub, or contains no known
            files.
        ImportError: if the folder contains a `config.yaml`, and pyyaml is not installed.
        UnknownNameError: if the format, or the name of a bundled dictionary, is unknown.
        ValueError: if the folder contains transcoders of several layers or files of several
            formats, a field or a tensor is missing or unknown, or the path is a part of a
            cross-layer transcoder.

    >>> load_sae("pydoc-4l/resid_post")
    Dictionary(
      128 -> 1024 features -> 128, at blocks.2.resid_post of pydoc-4l
      (activation): TopK(k=32, by='value', relu=True)
    )
    """
    settings = {
        "norm_factor": norm_factor,
        "k": k,
        "scale_embeddings": scale_embeddings,
        "transcodes": transcodes,
    }
    loaded = load_any(path, format, dtype=dtype, settings=settings, kind=Dictionary)
    assert isinstance(loaded, Dictionary)
    return loaded


@explains_calls
def load_transcoders(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    k: int | None = None,
) -> Transcoders:
    """Return the transcoders of several layers from files.

    The supported libraries and releases are circuit-tracer and Gemma Scope 2. A transcoder of one
    layer is read by `load_sae`; `TranscoderSet` joins several of them.

    Args:
        path: a folder, or its config. It can also be the name of bundled transcoders,
            `pydoc-4l/transcoders`, or a place on the Hugging Face hub, such as
            `mntss/transcoder-Llama-3.2-1B`.
        format: the format of the files, if a folder contains files of several formats. Default:
            `auto`.
        dtype: the dtype of weights and features. Default: the dtype of the file, but float32 for
            half precision.
        k: the number of active features at a position, if the files do not contain it
            (circuit-tracer).

    Returns:
        A `TranscoderSet` or a `CrossLayerTranscoder`, depending on the files. `splice` accepts a
        set, and attribution graphs accept both.

    Raises:
        FileNotFoundError: if the path does not exist here or on the hub, or contains no known
            files.
        ImportError: if the folder contains a `config.yaml`, and pyyaml is not installed.
        UnknownNameError: if the format, or the name of a bundled dictionary, is unknown.
        ValueError: if the path contains one dictionary or files of several formats, or a field or a
            tensor is missing or unknown.

    >>> transcoders = load_transcoders("pydoc-4l/transcoders")
    >>> [*transcoders][:2]
    ['blocks.0.mlp_out', 'blocks.1.mlp_out']
    >>> transcoders["blocks.1.mlp_out"]
    Dictionary(
      128 -> 1024 features -> 128, skip, at blocks.1.ln2.normalized -> blocks.1.mlp_out of pydoc-4l
      (activation): TopK(k=32, by='value', relu=True)
    )
    """
    loaded = load_any(path, format, dtype=dtype, settings={"k": k}, kind=Transcoders)
    assert isinstance(loaded, Transcoders)
    return loaded


@explains_calls
def load_crosscoder(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    names: Sequence[str] | None = None,
    point: str | None = None,
    dtype: torch.dtype | None = None,
) -> Crosscoder:
    """Return a crosscoder from files.

    The supported libraries and releases are dictionary_learning (`CrossCoder` and
    `BatchTopKCrossCoder`, with the files of a training or from the hub) and Gemma Scope 2.

    Args:
        path: a folder, a file in it, or a place on the Hugging Face hub, such as
            `science-of-finetuning/gemma-2-2b-crosscoder-l13-mu4.1e-02-lr1e-04`.
        format: the format of the files. It is only needed if a folder contains files of several
            formats. Default: `auto`.
        names: the names of the models or layers, in the order of the weights. The files of
            dictionary_learning do not contain them; the crosscoders of science-of-finetuning read
            the base model first, then the tuned model. Default: the points of the layers (Gemma
            Scope 2), or `"0"`, `"1"` and so on.
        point: the point that the crosscoder reads in each model, such as `blocks.13.resid_post`, if
            the files do not contain it (dictionary_learning).
        dtype: the dtype of weights and features. Default: the dtype of the file, but float32 for
            half precision.

    Returns:
        One crosscoder.

    Raises:
        FileNotFoundError: if the path does not exist here or on the hub, or contains no known
            files.
        UnknownNameError: if the format is unknown.
        ValueError: if a field or a tensor is missing or unknown, or the path contains another kind
            of dictionary.

    >>> import tempfile
    >>> from torch import ones, zeros
    >>> folder = Path(tempfile.mkdtemp())
    >>> weights = {"encoder.weight": ones(2, 3, 5), "encoder.bias": zeros(5)}
    >>> weights |= {"decoder.weight": ones(2, 5, 3), "decoder.bias": zeros(2, 3)}
    >>> torch.save(weights, folder / "ae.pt")
    >>> _ = (folder / "config.json").write_text('{"trainer": {"dict_class": "CrossCoder"}}')
    >>> load_crosscoder(folder, names=["base", "tuned"], point="blocks.2.resid_post")
    Crosscoder(
      5 features of base, tuned (d_model 3), at blocks.2.resid_post
      (activation): ReLU()
    )
    """
    _require_arguments(path, format, dtype)
    name, read, source = _recognised(_local(path), format, CROSSCODERS)
    settings = _settings({"names": names, "point": point}, read, name)
    with storage.one_error(source):
        loaded = read(source, **settings)
    assert isinstance(loaded, Crosscoder)
    return loaded.to(dtype or _at_least_float32(loaded))


def load_any(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    settings: Mapping[str, Any] | None = None,
    kind: type[Loaded] | None = None,
) -> Loaded:
    """Return the dictionary or the transcoders in files. The command line accepts both.

    Args:
        path, format, dtype: see `load_sae`, which also lists the errors.
        settings: settings for the reader by name. Settings with the value None are ignored.
            Default: no settings.
        kind: `Dictionary` or `Transcoders`, the only class to load. Default: both.
    """
    _require_arguments(path, format, dtype)
    if format not in ("auto", *FORMS):
        raise _unknown_format(path, format)
    if str(path) in NAMES and not Path(path).exists():
        _settings(settings or {}, bundled, str(path))
        ours = bundled(str(path))
        _require_kind_of_files(path, isinstance(ours, Transcoders), kind)
        return ours.to(dtype)
    # The hub has no owner with the name of the bundled model.
    is_ours = str(path).partition("/")[0] == NAMES[0].partition("/")[0]
    if is_ours and not Path(path).exists():
        raise unknown_name(path, NAMES, "bundled dictionary")
    name, read, source = _recognised(_local(path), format, FORMS)
    # A format with files of layers reads all layers of a folder.
    _require_kind_of_files(path, bool(FORMS[name].layers) and read is FORMS[name].read, kind)
    options = _settings(settings or {}, read, name)
    if FORMS[name].single and source.is_dir():
        source = _only_file(FORMS[name], source)
    with storage.one_error(source):
        loaded = read(source, **options)
    assert not isinstance(loaded, Crosscoder)
    for part in loaded.values() if isinstance(loaded, TranscoderSet) else [loaded]:
        part.to(dtype or _at_least_float32(part))
    return loaded


def _require_arguments(path: object, format: object, dtype: object) -> None:
    """Check the types of a path, of the name of a format and of a dtype, before a download.

    Raises:
        TypeError: if the path is not a name or a path, the format is not a text, or the dtype is
            not a dtype.
        FileNotFoundError: if the path is empty.
    """
    require_kind(
        "path",
        path,
        kind=(str, os.PathLike),
        words="a path or a name",
        call="'pydoc-4l/resid_post' is one",
    )
    require_kind("format", format, kind=str, words="the name of a format")
    require_kind(
        "dtype",
        dtype,
        kind=(torch.dtype, type(None)),
        words="a torch.dtype",
        call="torch.float32 is one",
    )
    if not str(path):
        raise FileNotFoundError(f"path must name a folder or a file; got {path!r}")


def _unknown_format(path: str | os.PathLike[str], format: str) -> UnknownNameError:
    """Return the error for an unknown format, which may be the id of a dictionary in a release."""
    error = unknown_name(format, FORMS, "format of dictionaries")
    if "/" in format or "." in format:
        one_text = f"load_sae({f'{os.fspath(path)}/{format}'!r})"
        error = UnknownNameError(
            f"{error.args[0]}; a release and an id are one text: {one_text}", format
        )
    return error


def _local(path: str | os.PathLike[str]) -> Path:
    """Return the local path of a folder or a file, and download it from the hub if necessary."""
    on_hub = isinstance(path, str) and may_be_on_hub(path) and not Path(path).exists()
    return downloaded(str(path)) if on_hub else Path(path)


def _settings(settings: Mapping[str, Any], read: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the settings that the user gave: all that are not None.

    Args:
        settings: all settings by name; None for a setting that the user did not give.
        read: the function that reads files of this format, with the settings as keywords.
        name: the name of the format, for the error.

    Raises:
        ValueError: if the user gave a setting that `read` does not take. Files of this format
            contain its value.
    """
    options = {key: value for key, value in settings.items() if value is not None}
    if idle := sorted(options.keys() - inspect.signature(read).parameters):
        raise ValueError(
            f"{', '.join(idle)} must be None for {name}, whose files contain all settings"
        )
    return options


def _require_kind_of_files(
    path: str | os.PathLike[str], has_layers: bool, kind: type[Loaded] | None
) -> None:
    """Check that files contain one dictionary or the transcoders of several layers, as asked.

    Args:
        path: the path that was given, for the error.
        has_layers: whether the files contain the transcoders of several layers.
        kind: `Dictionary`, `Transcoders`, or None for both.

    Raises:
        ValueError: if the files contain the other kind. The error gives the right call.
    """
    given = os.fspath(path)
    if has_layers and kind is Dictionary:
        raise ValueError(
            f"load_sae reads one dictionary, and {given!r} has transcoders of several layers; "
            f"load_transcoders({given!r}) reads them"
        )
    if not has_layers and kind is Transcoders:
        raise ValueError(
            f"load_transcoders reads transcoders of several layers, and {given!r} is one "
            f"dictionary; load_sae({given!r}) reads it"
        )


def _recognised(
    local: Path, format: str, forms: Mapping[str, Form]
) -> tuple[str, Callable[..., Loaded | Crosscoder], Path]:
    """Return the name of the format of the files at a path, its reader, and the path for the
    reader.

    Args:
        local: the path.
        format: the name of the format, or `auto`.
        forms: the possible formats by name.

    Raises:
        FileNotFoundError: if the path does not exist or contains no known files.
        UnknownNameError: if the format is unknown.
        ValueError: if the path contains files of several formats, or a download is damaged.
    """
    if not local.exists():
        raise FileNotFoundError(
            f"path must be a folder or a file; {str(local)!r} does not exist (bundled: "
            f"{', '.join(NAMES)}; on the hub: owner/repository/folder)"
        )
    if format != "auto" and format not in forms:
        raise unknown_name(format, forms, "format of dictionaries")
    wanted = forms if format == "auto" else {format: forms[format]}
    readings = {name: _reading(form, local) for name, form in wanted.items()}
    fitting = {name: reading for name, reading in readings.items() if reading is not None}
    # A file may have the name of a format with single files, and also belong to the format of its
    # folder. Then it is only a part of the dictionary in the folder.
    folders = {name: reading for name, reading in fitting.items() if not forms[name].single}
    fitting = folders or fitting
    if len(fitting) > 1:
        raise ValueError(
            f"{local} contains files of several formats, {' and '.join(fitting)}; give format="
        )
    if not fitting and (damage := damage_of(local)):
        raise ValueError(f"{local} {damage}; download it again")
    if not fitting and forms is FORMS and any(_has(form, local) for form in CROSSCODERS.values()):
        path = str(local)
        raise ValueError(f"{path!r} is a crosscoder; load_crosscoder({path!r}) reads it")
    if not fitting:
        listed = "; ".join(f"{' and '.join(form.files)} ({name})" for name, form in wanted.items())
        rule = "be one of" if local.is_file() else "have"
        raise FileNotFoundError(f"{local} must {rule} {listed}. {BY_HAND}")
    ((name, (read, source)),) = fitting.items()
    return name, read, source


def _at_least_float32(module: nn.Module) -> torch.dtype:
    """Return the widest dtype of the weights of a module, and at least float32."""
    return reduce(
        torch.promote_types,
        (tensor.dtype for tensor in module.state_dict().values()),
        torch.float32,
    )


def _reading(form: Form, local: Path) -> tuple[Callable[..., Loaded | Crosscoder], Path] | None:
    """Return the reader of a format and the path for it, or None if the path has another format.

    1. A folder must contain the files of the format, or only the file of a later layer.
    2. A file can be a whole dictionary, or one of several layers.
    3. Any other file of a folder, such as its config, is read as the folder.

    Raises:
        ValueError: if the file is only a part of a dictionary.
    """
    if local.is_dir():
        return (form.read, local) if _has(form, local) else _only_layer(form, local)
    if form.single:
        return (form.read, local) if _is_one_of(local, form.files) else None
    if _is_one_of(local, form.layers):
        if form.read_layer is None:
            raise ValueError(
                f"path must be the folder {local.parent}, because a single layer is no "
                f"dictionary; got {local}"
            )
        return form.read_layer, local
    for pattern in (*form.files, "config.yaml"):
        if local.match(pattern) and _has(form, folder := local.parents[pattern.count("/")]):
            return form.read, folder
    return None


def _only_layer(form: Form, folder: Path) -> tuple[Callable[..., Dictionary], Path] | None:
    """Return the reader of one layer and the only file of a layer in a folder, or None if there is
    no such file or several.
    """
    files = [path for pattern in form.layers for path in folder.glob(pattern)]
    if form.read_layer is None or len(files) != 1:
        return None
    return form.read_layer, files[0]


def _is_one_of(local: Path, patterns: Iterable[str]) -> bool:
    """Return True if a path matches one of some patterns."""
    return any(local.match(pattern) for pattern in patterns)


def _has(form: Form, folder: Path) -> bool:
    """Return True if a folder contains the files of a format."""
    has_files = [any(folder.glob(pattern)) for pattern in form.files]
    return any(has_files) if form.single else all(has_files)


def _only_file(form: Form, folder: Path) -> Path:
    """Return the only file in a folder, for a format whose dictionaries are single files.

    Raises:
        ValueError: if the folder contains several files.
    """
    files: list[Path] = []
    for pattern in form.files:
        files += folder.glob(pattern)
    files.sort()
    if len(files) > 1:
        raise ValueError(
            f"path must be one of the {len(files)} files in the folder, such as {files[0]}; got "
            "the folder"
        )
    return files[0]
