"""Dictionaries on the Hugging Face hub: by repository and folder, or by SAELens' names where that package is installed."""

import importlib
import importlib.util
import re
from pathlib import Path, PurePosixPath

from hooks.base import library, unknown_name

_WEIGHTS = (".safetensors", ".npz", ".pt", ".pth")
_CONFIGS = ("cfg.json", "config.json", "config.yaml", "hyperparams.json")
_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:/(.+))?")


def may_be_on_hub(name: str) -> bool:
    """Whether it looks like `owner/repository`, or that and a folder or file in it."""
    return _NAME.fullmatch(name) is not None


def downloaded(name: str) -> Path:
    """Return the folder or file of `owner/repository/folder`, downloaded unless it is in the hub's cache.

    A repository alone is downloaded whole.

    Raises:
        FileNotFoundError: if the hub has no such thing, cannot be reached, or its library is missing, in one line.
        UnknownNameError: if a release of SAELens has no such id.
    """
    match = _NAME.fullmatch(_of_sae_lens(name) or name)
    assert match is not None
    repository, inside = match[1], (match[2] or "").rstrip("/")
    patterns = [inside, f"{inside}/*"] if inside else None
    if patterns and inside.endswith(_WEIGHTS):
        # The config in its folder may say what the file does not.
        place = PurePosixPath(inside)
        configs = (*_CONFIGS, f"{place.stem}_cfg.json")
        patterns += [place.with_name(name).as_posix() for name in configs]
    try:
        fetch = library("huggingface_hub").snapshot_download
        path = Path(fetch(repository, allow_patterns=patterns)) / inside
    except Exception as error:  # many kinds, from the hub, HTTP, the network or the disk
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"no file or folder is at {name!r}, and the hub cannot give {inside or 'all'} of {repository}: {reason} "
            "(names of SAELens' releases need its package: pip install sae-lens)"
        ) from error
    if not path.exists():
        raise FileNotFoundError(
            f"{repository} must have {inside}; it does not, or it is not in the hub's cache"
        )
    return path


def _of_sae_lens(name: str) -> str | None:
    """The place on the hub of `release/id` in the table of an installed SAELens, which is read and not imported."""
    package = importlib.util.find_spec("sae_lens")
    if package is None or package.origin is None:
        return None
    table = Path(package.origin).with_name("pretrained_saes.yaml")
    release, _, wanted = name.partition("/")
    text = table.read_text(encoding="utf-8") if table.is_file() else ""
    entry = re.search(rf"^{re.escape(release)}:\n((?:[ -].*\n?)*)", text, re.MULTILINE)
    if entry is None:
        return None
    yaml = importlib.import_module("yaml")  # SAELens needs it
    about = yaml.safe_load(entry[1])
    paths = {str(each["id"]): each["path"] for each in about["saes"]}
    if wanted not in paths:
        raise unknown_name(wanted, paths, f"dictionary of the release {release}")
    return f"{about['repo_id']}/{paths[wanted]}"
