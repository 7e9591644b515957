"""`load` and `load_tokenizer`: from a name or a path to a model and its tokenizer."""

import difflib
import os
from pathlib import Path

import torch

from models import verification
from models.checkpoints.assemble import DTYPES
from models.checkpoints.hub import download, is_hub_name
from models.checkpoints.huggingface import load_huggingface
from models.checkpoints.own import BUNDLED, CONFIG, bundled, is_own, load_own
from models.files import read_object
from models.tokenizer import Tokenizer, tokenizer_from
from models.transformer import Transformer


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    verify: bool = False,
) -> Transformer:
    """A model in eval mode, with the weights of the file as they are.

    Looked for in this order: a model that ships with the package; a directory, of `save` or of
    Hugging Face's `save_pretrained` (safetensors or .bin, whole or in shards); a GGUF file; a model of
    the Hugging Face hub, which is downloaded unless its cache has it. While loading, the memory needed
    is about the model's own, which is more than the file where that has several types and is read into
    the widest of them: twice as much, if most of it is bfloat16 and some float32.

    Args:
        name_or_path: `"pydoc-4l"`, a path, or a name on the hub such as `"gpt2"`.
        dtype: of all parameters: float64, float32, bfloat16 or float16; None for the file's own. A file
            of several types gives the narrowest type that holds them all without rounding; GGUF gives
            float32. Gemma 2's gains, stored as their distance from 1, are rounded to this type.
        device: where the parameters go; None for the CPU.
        verify: whether to check the model's arithmetic, with `models.verify`.

    Raises:
        FileNotFoundError: if there is no such model; it lists those that ship with the package.
        ImportError: if a library that the format needs is not installed.
        ValueError: naming the file, if it is damaged, holds what cannot be expressed, or its
            weights are not those of its config; no model is then made. Or if `dtype` is another one,
            or a model on the device meta is to be verified.
    """
    if dtype is not None and dtype not in DTYPES:
        kinds = ", ".join(map(str, DTYPES))
        raise ValueError(f"dtype is one of {kinds}, not {dtype!r}")
    if verify and device is not None and torch.device(device).type == "meta":
        raise ValueError("verify=True computes with weights, and on the device meta there are none")
    path = locate(name_or_path)
    if path.is_file():
        from models.checkpoints.gguf import load_gguf

        model = load_gguf(path, dtype, device)
    else:
        described = read_object(path / CONFIG)
        read = load_own if is_own(described) else load_huggingface
        model = read(path, described, dtype, device)
    if verify:
        verification.verify(model)
    return model


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model, looked for as by `load`; or of any directory, a tokenizer.json or a GGUF file.

    Raises:
        FileNotFoundError: if there is no such model or directory, or it has no tokenizer.
        ImportError: if a library that the tokenizer needs is not installed.
        ValueError: naming the file, if it is damaged or of an unknown kind.
    """
    path = locate(name_or_path, weights=False)
    if path.suffix == ".gguf" and path.is_file():
        from models.checkpoints.gguf import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    return tokenizer_from(path)


def locate(name_or_path: str | os.PathLike[str], weights: bool = True) -> Path:
    """The directory with a config.json, or the file, that a name or a path stands for.

    Args:
        name_or_path: see `load`.
        weights: whether a model is needed; else any directory will do, or a tokenizer.json, and a hub
            model's weights are not downloaded.

    Raises:
        FileNotFoundError: if there is none; it lists the models that ship with the package.
        ImportError: if it may be a hub model, and huggingface_hub is not installed.
    """
    name, path = os.fspath(name_or_path), Path(name_or_path)
    if isinstance(name_or_path, str) and name in bundled():
        return BUNDLED / name
    if name and (path / CONFIG).is_file():
        return path
    suffixes = (".gguf",) if weights else (".gguf", ".json")
    if (path.is_file() and path.suffix in suffixes) or (name and path.is_dir() and not weights):
        return path
    reason = "no directory of that name holds a config.json"
    if path.is_file():
        reason = "of files only GGUF is read"
    elif name and path.is_dir():
        reason = f"and the directory of that name holds no {CONFIG}"
    elif not isinstance(name_or_path, Path) and is_hub_name(name):
        try:
            found = download(name, weights)
            return _described(found) if weights else found
        except FileNotFoundError as error:
            reason = f"{reason}, and {error}"
        except ImportError as error:
            raise ImportError(_none(name, f"{reason}, and {error}")) from None
    raise FileNotFoundError(_none(name, reason))


def _described(directory: Path) -> Path:
    if not (directory / CONFIG).is_file():
        raise FileNotFoundError(f"the hub's model of that name has no {CONFIG}")
    return directory


def _none(name: str, reason: str) -> str:
    close = difflib.get_close_matches(name, bundled(), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"no model is named {name!r}, {reason}; {hint}available: {', '.join(bundled())}"
