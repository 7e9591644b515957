"""Files of tensors and facts: what is saved is what is read, and any damage is one error."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from hooks import ActivationCache, CacheError, storage
from interp import Circuit, JacobianLens, Result, TunedLens

TENSORS = {
    "a.b": torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, 7.0]]),
    "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "kept": torch.tensor([True, False, True]),
    "count": torch.tensor(11),
    "none": torch.zeros(0, 3),
}
FACTS = {"axes": ["layer", "pos"], "unit": "nats", "share": 0.1, "about": {"model": None}}
LOADERS = [kind.load for kind in (ActivationCache, Result, TunedLens, JacobianLens)]
LOADERS.append(lambda path: Circuit.load(path, None))


@pytest.fixture
def path(tmp_path):
    storage.save(tmp_path / "file", "kind-1", TENSORS, FACTS)
    return tmp_path / "file"


def read(path, kind="kind-1"):
    with storage.opened(path, kind) as (tensors, facts):
        return tensors, facts


def damaged(whole):
    """A file with one bit flipped, at every byte, and files that end too early."""
    for at in range(len(whole)):
        yield whole[:at] + bytes([whole[at] ^ 1 << (at * 5 + 2) % 8]) + whole[at + 1 :]
    yield from (whole[:length] for length in (0, 5, 300, len(whole) - 1))


FULL = """
import resource, sys, torch
from pathlib import Path
from hooks import storage
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    storage.save(Path(sys.argv[1]), "kind-1", {"a": torch.zeros(9000)}, {})
except OSError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"{tmp_path / 'file'} could not be written: " in done.stdout, done.stderr
    assert not [*tmp_path.iterdir()]


def test_what_is_saved_is_read(path):
    tensors, facts = read(path)
    assert facts == FACTS
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(tensors[name], value)
        assert tensors[name].dtype == value.dtype


def test_a_damaged_file_is_refused(path):
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(CacheError, match="file must be a complete kind-1"):
            read(path)


def test_tensors_that_share_memory_and_parts_of_others_are_kept(path):
    whole = torch.arange(12.0).view(3, 4)
    parts = {"whole": whole, "again": whole, "column": whole[:, 1], "row": whole[2]}
    storage.save(path, "kind-1", parts, {})
    assert path.stat().st_size < 1000
    for name, value in read(path)[0].items():
        assert torch.equal(value, parts[name])


def test_a_save_that_fails_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()
    with pytest.raises(TypeError):
        storage.save(path, "kind-1", TENSORS, {"site": object()})

    def fail(values, partial, **kwargs):
        partial.write_bytes(b"some")
        raise OSError("full")

    monkeypatch.setattr(storage, "save_file", fail)
    with pytest.raises(OSError, match="full"):
        storage.save(path, "kind-1", {}, {})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["file"]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("load", LOADERS)
def test_other_files_are_refused(path, load):
    with pytest.raises(CacheError, match="got 'kind-1'"):
        load(path)
    save_file(TENSORS, path)
    for other in (path, path.parent):
        with pytest.raises(CacheError, match=str(other)):
            load(other)
    with pytest.raises(FileNotFoundError):
        load(path.parent / "nowhere")
