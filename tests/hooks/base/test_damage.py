"""Damaged downloads: the error names the kind of damage."""

import io
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hooks.base import damage_of, storage

JUNK = b"junk" * 9


@pytest.fixture
def whole(tmp_path):
    """Write an undamaged file of each kind, each with the library that defines the format."""
    save_file({"a": torch.ones(3), "b": torch.ones(2, 5)}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", a=np.ones(7))
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    return {path.suffix: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "empty"),
        (JUNK, "junk"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"\n<!DOCTYPE html><p>", "HTML"),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".gguf", ".onnx", ".bin"])
def test_an_error_says_what_a_file_contains_instead_of_tensors(suffix, content, match, tmp_path):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    assert match in damage_of(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt"])
def test_a_file_that_was_cut_is_incomplete_and_a_whole_one_is_not(suffix, whole):
    path = whole[suffix]
    assert not damage_of(path)
    content = path.read_bytes()
    for n_bytes in (20, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:n_bytes])
        assert damage_of(path)


def test_no_file_and_other_files_have_no_damage(tmp_path):
    (tmp_path / "a.txt").write_bytes(JUNK)
    assert not damage_of(tmp_path / "a.txt")
    assert not damage_of(tmp_path / "none")
    assert not damage_of(tmp_path)


def test_an_error_that_names_the_file_does_not_name_it_twice(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ValueError, match=r"a\.json") as caught, storage.one_error(path):
        raise ValueError(f"{path} is wrong")
    assert str(caught.value).count(str(path)) == 1


def test_a_part_of_an_archive_that_differs_is_named(whole):
    content = io.BytesIO(whole[".pt"].read_bytes())
    with zipfile.ZipFile(content) as archive:
        place = archive.getinfo(next(n for n in archive.namelist() if n.endswith("data/0")))
    changed = bytearray(content.getvalue())
    changed[place.header_offset] ^= 255
    whole[".pt"].write_bytes(changed)
    with pytest.raises(ValueError, match=r"a\.pt.*data/0"):
        storage.read_saved(whole[".pt"])
