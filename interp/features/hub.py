"""Download dictionaries from the Hugging Face hub.

A dictionary is named by its repository and folder or, if the package sae_lens is installed, by the
release and id of SAELens.
"""

import importlib
import importlib.util
import re
from pathlib import Path, PurePosixPath

from hooks.base import hub_failure, library, unknown_name

_WEIGHTS = (".safetensors", ".npz", ".pt", ".pth")
_CONFIGS = ("cfg.json", "config.json", "config.yaml", "conf.yaml", "hyperparams.json")
_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:/(.+))?")


def may_be_on_hub(name: str) -> bool:
    """Return True if a name looks like `owner/repository`, optionally followed by a folder or file.

    >>> may_be_on_hub("google/gemma-scope-2b-pt-res/layer_20"), may_be_on_hub("folder")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


def downloaded(name: str) -> Path:
    """Return the local path of `owner/repository/folder`, and download it unless it is in the hub's
    cache.

    A name without a folder downloads the whole repository.

    Raises:
        FileNotFoundError: if the name is not on the hub, the hub cannot be reached, or
            huggingface_hub is not installed. The error is a single line.
        UnknownNameError: if a release of SAELens does not contain the id.
    """
    match = _NAME.fullmatch(_of_sae_lens(name) or name)
    assert match is not None
    repository = match[1]
    inside = (match[2] or "").rstrip("/")
    patterns = [inside, f"{inside}/*"] if inside else None
    if patterns and inside.endswith(_WEIGHTS):
        # Download the config in the folder of the file too, because the file may need its settings.
        place = PurePosixPath(inside)
        configs = (*_CONFIGS, f"{place.stem}_cfg.json")
        patterns += [place.with_name(name).as_posix() for name in configs]
    try:
        fetch = library("huggingface_hub").snapshot_download
        path = Path(fetch(repository, allow_patterns=patterns)) / inside
    # The hub, HTTP, the network and the disk raise many kinds of errors.
    except Exception as error:
        raise FileNotFoundError(
            f"{name!r} must be a local file or folder, or be on the hub; the download of "
            f"{inside or 'all files'} from {repository} failed: {hub_failure(error)} (names of "
            "releases of SAELens need its package: pip install sae-lens)"
        ) from error
    if not path.exists():
        raise FileNotFoundError(
            f"{repository} must contain {inside}; it is missing there, or in the hub's cache"
        )
    return path


def _of_sae_lens(name: str) -> str | None:
    """Return the place of `release/id` on the hub, from the table of an installed SAELens.

    SAELens itself is not imported.
    """
    package = importlib.util.find_spec("sae_lens")
    if package is None or package.origin is None:
        return None
    table = Path(package.origin).with_name("pretrained_saes.yaml")
    release, _, wanted = name.partition("/")
    text = table.read_text(encoding="utf-8") if table.is_file() else ""
    entry = re.search(rf"^{re.escape(release)}:\n((?:[ -].*\n?)*)", text, re.MULTILINE)
    if entry is None:
        return None
    # SAELens depends on this library, so it is installed.
    yaml = importlib.import_module("yaml")
    about = yaml.safe_load(entry[1])
    paths = {str(sae["id"]): sae["path"] for sae in about["saes"]}
    if wanted not in paths:
        raise unknown_name(wanted, paths, f"dictionary of the release {release}")
    return f"{about['repo_id']}/{paths[wanted]}"
