"""Parts that all commands share: options, the model, the text, and the output."""

import argparse
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from hooks.base import library, storage, strict_json

# The commands with their descriptions, the options of each single command, and the options that all
# commands share.
OPTIONS = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
# Paths that begin like this are streams, and a command writes to them directly. For any other path,
# it writes a new file, which replaces the old file when it is complete.
STREAMS = ("/dev/std", "/dev/fd/")


def add_options(
    command: argparse.ArgumentParser | argparse._MutuallyExclusiveGroup,
    table: Mapping[str, Mapping[str, Any]],
) -> None:
    """Add options from the table `options.json`.

    Args:
        command: the command, or a group of its options.
        table: the options by name.
    """
    kinds = {"int": int, "float": float, "device": _device, "folder": _folder}
    kinds |= {"result": _file_of("", ".txt", ".json"), "page": _file_of("", ".html")}
    for name, settings in table.items():
        kind = {"type": kinds[settings["type"]]} if "type" in settings else {}
        command.add_argument(name, **{**settings, **kind})


def text_of_options(options: argparse.Namespace) -> str:
    """Return the text that the options give.

    Raises:
        ValueError: if the file is not text in UTF-8.
        OSError: if the file cannot be read.
    """
    if options.prompt is not None:
        return str(options.prompt)
    try:
        return Path(options.text_file).read_text(encoding="utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.text_file} must be text in UTF-8; {error.reason}") from None


def in_format(text: str, data: Mapping[str, Any], *, is_json: bool) -> str:
    """Return the output as JSON if the options ask for JSON, and otherwise as text."""
    return strict_json.dumps(data, ensure_ascii=False) if is_json else text


def print_or_write(options: argparse.Namespace, text: str, data: Mapping[str, Any]) -> None:
    """Write the text, or the data as JSON, to the terminal or the file.

    The output is JSON with `--json`, or if `--out` ends in `.json`.

    Args:
        options: the options of the command.
        text: the output as text.
        data: the output in the JSON form of all results; see `interp.json_form`.
    """
    is_json = options.json or Path(options.out or "").suffix.lower() == ".json"
    output = in_format(text, data, is_json=is_json)
    if options.out is None:
        print(output)
        return
    with replacing_output(options.out) as file:
        file.write(output + "\n")


def _file_of(*suffixes: str) -> Callable[[str], str]:
    """Return a type of `argparse` for files with one of these suffixes."""

    def checked(path: str) -> str:
        """Return a path with one of the suffixes."""
        try:
            storage.suffix_of(path, suffixes)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return path

    return checked


def _folder(path: str) -> str:
    """Return the path of a folder; a type of `argparse`."""
    try:
        storage.require_folder(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def require_one_format(options: argparse.Namespace) -> None:
    """Check that `--json` is not combined with a suffix of text files.

    Raises:
        ValueError: if both are given.
    """
    out = getattr(options, "out", None) or ""
    if options.json and Path(out).suffix.lower() == ".txt":
        raise ValueError(f"with --json, --out must end in .json or have no suffix; got {out}")


def _device(name: str) -> torch.device:
    """Return a device of this machine; a type of `argparse`."""
    try:
        device = torch.device(name)
        # This raises an error if the machine has no such device.
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(
            f"{name!r} must be a device of this machine: {reason}"
        ) from None
    return device


def model_of(options: argparse.Namespace, *, trained: bool) -> Any:
    """Return the model that the options name.

    Args:
        options: the options of the command.
        trained: whether the command needs trained weights. Otherwise the name of a config is
            enough, and the returned model has no weights.

    Raises:
        ValueError: if a trained model is needed, and the options name a config.
    """
    from models import build, list_configs
    from models.registry import ON_HUB

    name = options.model
    # The names of GPT-2's configs are also names of trained models on the hub. Load these models if
    # the command needs trained weights.
    if name not in list_configs() or os.path.exists(name) or (trained and name in ON_HUB):
        return _loaded(options)
    if trained:
        raise ValueError(
            f"this command needs a trained model; got the config {name!r}; train it, for instance "
            f"with `python examples/studies/tiny_lm.py --model {name}`, and pass its directory"
        )
    # Weights on the meta device have shapes, but no numbers, and need no memory.
    with torch.device("meta"):
        return build(name)


def _loaded(options: argparse.Namespace) -> nn.Module:
    """Return a plain model, or an attached model of `transformers` if no table describes its
    family.
    """
    from models import load, load_tokenizer
    from models.checkpoints.huggingface.families import FAMILIES
    from models.checkpoints.loading import locate
    from models.files import read_object

    config = locate(options.model, weights=False) / "config.json"
    described = read_object(config) if config.is_file() else {}
    if "model_type" in described and described["model_type"] not in FAMILIES:
        return _attached(options)
    model = load(options.model, device=options.device, dtype=_dtype(options))
    if options.tokenizer:
        model.tokenizer = load_tokenizer(options.tokenizer)
    return model


def _attached(options: argparse.Namespace) -> nn.Module:
    """Return an attached model of `transformers`.

    Code among its files runs only if the user allows it.

    Raises:
        ValueError: if the model needs this code and the user did not allow it.
    """
    from models import attach, load_tokenizer
    from models.checkpoints.loading import locate

    transformers = library("transformers")
    trusts = options.trust_remote_code
    folder = locate(options.model, code=trusts)
    dtype = _dtype(options)
    settings = {} if dtype is None else {"dtype": dtype}
    code = nullcontext() if trusts else _without_code(options.model)
    with storage.only_tensors(str(folder)), code:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=trusts, **settings
        )
        tokenizer = (
            load_tokenizer(options.tokenizer)
            if options.tokenizer
            else transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)
        )
    model = model.eval()
    attach(model.to(options.device) if options.device else model, tokenizer=tokenizer)
    return model


@contextmanager
def _without_code(name: str) -> Iterator[None]:
    """Prevent code among the files of a model from running while `transformers` loads the model.

    `transformers` asks whether the code may run, and reads the answer from the standard input of
    the command, which may be a pipe. It asks even under `trust_remote_code=False`, if a nested
    config names the code. Therefore the standard input is empty here, and the question is hidden.

    Raises:
        ValueError: if the code is needed; the error names the option that allows it.
    """
    answers = sys.stdin
    sys.stdin = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()):
            yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{name} needs Python code among its files, which could do anything on this machine: "
            "read the code, and give --trust-remote-code to run it"
        ) from None
    finally:
        sys.stdin = answers


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype that the options name; None to keep the dtype of the files."""
    return getattr(torch, options.dtype) if options.dtype else None


@contextmanager
def replacing_output(out: str) -> Iterator[IO[str]]:
    """Open a new file that replaces `out`, or the target of the link `out`, when it is complete.

    If `out` is not a regular file, such as a pipe, the output is written to it directly.
    """
    path = Path(os.path.realpath(out))
    try:
        replaces = not out.startswith(STREAMS) and (path.is_file() or not path.exists())
        with ExitStack() as stack:
            target = stack.enter_context(storage.replacing(path)) if replaces else Path(out)
            mode = "w" if replaces else "a"
            file = stack.enter_context(target.open(mode, encoding="utf-8", newline="\n"))
            opened = stack.pop_all()
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"--out must be a file that can be written; got {out!r}: {reason}"
        ) from None
    with opened:
        yield file
        if replaces and path.exists():
            shutil.copymode(path, target)
