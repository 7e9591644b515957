"""Files of tensors and facts: they return what was saved, and every damage is an error."""

import json
import math
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef

from hooks import ActivationCache, CacheError
from hooks.base import storage
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
    """Yield damaged copies of a file: each with a flipped bit in one byte, and some cut off."""
    for at in range(len(whole)):
        yield whole[:at] + bytes([whole[at] ^ 1 << (at * 5 + 2) % 8]) + whole[at + 1 :]
    yield from (whole[:length] for length in (0, 5, 300, len(whole) - 1))


FULL = """
import resource, sys, torch
from pathlib import Path
from hooks.base import storage
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


def test_a_damaged_file_is_refused(path):
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(CacheError, match="file must be a complete kind-1"):
            read(path)


def test_tensors_that_share_memory_and_parts_of_others_are_kept(path):
    whole = torch.arange(12000.0).view(3000, 4)
    parts = {"whole": whole, "again": whole, "column": whole[:, 1], "row": whole[2]}
    storage.save(path, "kind-1", parts, {})
    assert path.stat().st_size < 48000 + 48000 + 12000 + 16 + 4000
    for name, value in read(path)[0].items():
        assert torch.equal(value, parts[name])


# The numbers of these tensors have different sizes in bytes. In whatever order a file stores the
# tensors, most of them need a gap before them to be aligned.
MIXED = {
    "flags": torch.tensor([True, False, True]),
    "wide": torch.tensor([[0.1, -2.0], [1e300, 4.0], [5.0, 6.0]], dtype=torch.float64).T,
    "byte": torch.tensor([7], dtype=torch.uint8),
    "half": torch.tensor([1.5, -2.5, 3e38, 0.0, 9.0], dtype=torch.bfloat16),
    "nothing": torch.zeros(3, 0, 5, dtype=torch.int64),
    "turned": torch.tensor([[1 + 2j, 3 - 4j, 5j]]).conj(),
    "eighth": torch.tensor([1.0, 2.0, -3.0]).to(torch.float8_e5m2),
    "one": torch.tensor(11.0),
    "one of a row": torch.arange(35.0, dtype=torch.float64).view(5, 7)[2:3, 3],
    'strange \n"\\ \N{FOX FACE} name': torch.tensor([-1, 2], dtype=torch.int16).expand(3, 2),
}
NUMPY = {"BOOL": "?", "F64": "f8", "U8": "u1", "I64": "i8", "C64": "c8", "F32": "f4", "I16": "i2"}


@pytest.mark.parametrize("streamed", [(), ("wide", "half", "turned"), tuple(MIXED)])
def test_every_reader_reads_what_is_written_one_by_one(path, streamed):
    held = {name: value for name, value in MIXED.items() if name not in streamed}
    later = ((name, MIXED[name]) for name in streamed)
    storage.save(path, "kind-1", held, FACTS, names=streamed, later=later)
    whole, (tensors, facts) = load_file(path), read(path)
    added = {name for name in whole if name.startswith(".pad.")}
    assert facts == FACTS
    assert whole.keys() - added == tensors.keys() == MIXED.keys()
    assert bool(added) == bool(streamed)
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    del header["__metadata__"]
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
    assert begin % 8 == 0
    assert begin + spans[-1][1] == len(content)
    with safe_open(path, "pt") as file:
        for name, value in MIXED.items():
            assert torch.equal(file.get_tensor(name), value)
            assert torch.equal(whole[name], value)
            assert torch.equal(tensors[name], value)
            entry = header[name]
            assert entry["data_offsets"][0] % value.element_size() == 0
            raw = content[slice(*(begin + at for at in entry["data_offsets"]))]
            # The bits of a bfloat16 number are the first half of the bits of a float32 number.
            if entry["dtype"] == "BF16":
                numbers = (np.frombuffer(raw, "<u2").astype("u4") << 16).view("f4")
                assert np.array_equal(numbers, value.float())
            elif entry["dtype"] in NUMPY:
                numbers = np.frombuffer(raw, NUMPY[entry["dtype"]]).reshape(entry["shape"])
                assert np.array_equal(numbers, value.resolve_conj())


def test_two_numbers_in_one_byte_have_the_shape_that_safetensors_gives_them(path):
    values = torch.arange(6, dtype=torch.uint8).view(2, 3).view(torch.float4_e2m1fn_x2)
    storage.save(path, "kind-1", {"x": values}, {})
    save_file({"x": values}, path.with_name("theirs"))
    for file in (path, path.with_name("theirs")):
        with safe_open(file, "pt") as opened:
            assert opened.get_slice("x").get_dtype() == "F4"
            assert opened.get_slice("x").get_shape() == [2, 6]
            assert torch.equal(opened.get_tensor("x").view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("is_copied", [False, True])
def test_each_tensor_is_let_go_before_the_next_is_made(path, is_copied):
    before = []

    def later():
        for size in (3, 5, 7, 11):
            assert all(reference.expired() for reference in before)
            value = torch.full((size, 2), float(size))
            value = value.T if is_copied else value.view(2, size)
            before.append(StorageWeakRef(value.untyped_storage()))
            made = [(str(size), value)]
            del value
            yield made.pop()

    storage.save(path, "kind-1", {}, {}, names=["3", "5", "7", "11"], later=later())
    assert len(before) == 4
    assert read(path)[0]["7"].tolist() == [[7.0] * 7] * 2


def test_a_file_that_safetensors_wrote_before_is_read(path):
    text, sums = json.dumps(FACTS), {"": zlib.crc32(json.dumps(FACTS).encode())}
    for name, value in TENSORS.items():
        described = repr((name, str(value.dtype), tuple(value.shape))).encode()
        numbers = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        sums[name] = zlib.crc32(described + numbers.numpy().tobytes())
    checksums = json.dumps(sums, sort_keys=True)
    save_file(TENSORS, path, {"kind": "kind-1", "facts": text, "checksums": checksums})
    tensors, facts = read(path)
    assert facts == FACTS
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError("a disk of weights"), CacheError("changed")]
)
def test_a_save_that_fails_leaves_the_old_file_and_raises_the_same_error(path, error):
    def later():
        yield "first", torch.ones(50_000)
        raise error

    before = path.read_bytes()
    with pytest.raises(type(error)) as raised:
        storage.save(path, "kind-1", TENSORS, {}, names=["first", "second"], later=later())
    assert raised.value is error
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("error", "value", "fact", "match"),
    [
        (TypeError, torch.ones(2), object(), "JSON"),
        (TypeError, torch.ones(2, dtype=torch.complex128), 1, "'x' .*complex128"),
        (ValueError, torch.ones([1] * 999), 1, "fit"),
    ],
)
def test_values_that_no_file_can_contain_leave_the_old_file(path, error, value, fact, match):
    before = path.read_bytes()
    with pytest.raises(error, match=match):
        storage.save(path, "kind-1", {"x": value}, {"fact": fact})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["x.png", "x.JSON", "x.safetensors.gz", "a.b/x.pdf", "x.5", "x "])
def test_the_suffix_of_a_file_matches_its_format(tmp_path, name):
    (tmp_path / "a.b").mkdir()
    if name.strip() == name:
        with pytest.raises(ValueError, match=r"\.safetensors, or have no suffix; got .*x\."):
            storage.save(tmp_path / name, "kind-1", TENSORS, FACTS)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    for good in ("a.b/x", "x.SafeTensors", "x.png.safetensors"):
        storage.save(tmp_path / good, "kind-1", TENSORS, FACTS)
        assert read(tmp_path / good)[1] == FACTS


def test_a_folder_has_no_name_of_a_file(tmp_path):
    for name in ("model.safetensors", "model.PT", "a.b/cards.json"):
        with pytest.raises(ValueError, match=r"must be a folder or end in \.html; got .*\."):
            storage.require_folder(tmp_path / name, [".html"])
    (tmp_path / "old.json").mkdir()
    for name in ("llama-3.1", "run.final", "s3://bucket.pt/store", tmp_path / "old.json"):
        storage.require_folder(name)


def test_facts_may_be_nan_and_infinite_and_are_json_for_all_readers(tmp_path):
    facts = {"bounds": [0.0, math.inf], "low": -math.inf, "text": "NaN"}
    storage.save(tmp_path / "file", "kind-1", TENSORS, {**facts, "gap": math.nan})
    found = read(tmp_path / "file")[1]
    assert math.isnan(found.pop("gap"))
    assert found == facts
    with safe_open(tmp_path / "file", framework="np") as file:
        json.loads(file.metadata()["facts"], parse_constant=pytest.fail)


@pytest.mark.parametrize("shape", [[1] * 63 + [2001], [3037000499, 0, 3037000499], [0] * 64])
def test_the_header_has_room_for_every_shape_and_number_of_names(path, shape):
    """With the first shape, two of three tensors begin after a gap, which the header must list."""
    names = [f"blocks.{n}.\N{FOX FACE}" for n in range(300)]
    dtypes = [torch.bool, torch.int16, torch.float64] * 100
    pairs = zip(names, (torch.zeros(shape, dtype=dtype) for dtype in dtypes), strict=True)
    storage.save(path, "kind-1", {}, FACTS, names=names, later=pairs)
    tensors, _ = read(path)
    assert tensors.keys() == {*names}
    assert all(list(value.shape) == shape for value in tensors.values())


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
