"""Models of the Hugging Face hub, by name: the files that are needed, in the hub's own cache."""

import re
from pathlib import Path

# "gpt2", "org/name"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
WEIGHTS_BIN = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
DESCRIPTION = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def is_hub_name(name: str) -> bool:
    """Whether the hub could have a model of this name."""
    return bool(NAME.fullmatch(name)) and "--" not in name and ".." not in name


def download(name: str, weights: bool = True) -> Path:
    """The directory of a hub model's files, fetched unless they are there.

    Args:
        name: the model's name on the hub.
        weights: whether its weights are needed, too.

    Raises:
        ImportError: without the library huggingface_hub.
        FileNotFoundError: if the hub has no such model, or cannot be reached and its cache does not
            have the model.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(
            f'{name!r} may be a model of the Hugging Face hub: pip install "hookscope[hf]"'
        ) from None
    wanted = [*DESCRIPTION, *WEIGHTS] if weights else [*DESCRIPTION]
    try:
        directory = Path(snapshot_download(name, allow_patterns=wanted))
        if weights and not any(directory.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[*DESCRIPTION, *WEIGHTS_BIN])
    except Exception as error:  # of many kinds: of the hub, of HTTP, of the network, of the disk
        reason = " ".join(str(error).split())
        raise FileNotFoundError(f"the hub gives no {name!r}: {reason}") from error
    return directory
