"""Saving and loading, damaged files, memory, the hub, and the model that ships with the package."""

import hashlib
import json
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from models import (
    CharTokenizer,
    RotaryBase,
    RotaryScaling,
    Transformer,
    TransformerConfig,
    evaluate,
    train_test_split,
)
from models.checkpoints import BUNDLED, list_models, load, load_tokenizer, own, save
from tests.count import ROOT
from tests.reference import randomised
from tests.shipped import pydoc

SIZES = dict(vocab_size=23, n_ctx=17, n_layers=2, n_heads=2, d_model=12)
TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuvw")


@pytest.fixture
def saved(model, tmp_path):
    save(tmp_path / "m", model, TOKENIZER)
    return tmp_path / "m"


def test_a_saved_model_is_loaded(model, saved, tokens):
    loaded = load(saved)
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.unembedding.weight is loaded.token_embedding.weight
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert load_tokenizer(saved).decode([0, 22]) == "aw"
    assert "unembedding.weight" not in load_file(saved / "model.safetensors")


KINDS = [
    dict(tied_unembed=False, unembed_bias=True, positions="sinusoidal", n_kv_heads=1)
    | dict(eos_token_ids=(3, 22)),
    dict(norm="rmsnorm", mlp="gated", window=3, window_layers=(1,), norm_place="sandwich")
    | dict(positions="rotary", rotary_scaling=RotaryScaling(kind="linear", factor=2.0)),
    dict(window=3, window_layers=(1,), positions="rotary")
    | dict(window_rotary=RotaryBase(theta=7.0, scaling=RotaryScaling(kind="linear", factor=2.0))),
    dict(norm="none", mlp="none", positions="rotary", qk_norm="all")
    | dict(rotary_scaling=RotaryScaling(kind="factors", factors=(1.0, 2.0, 3.0))),
]


@pytest.mark.parametrize("fields", KINDS)
def test_every_kind_of_config_is_saved(fields, tokens, tmp_path):
    model = Transformer(TransformerConfig(**SIZES, **fields)).eval()
    save(tmp_path, model)
    loaded = load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])


def test_a_model_without_a_tokenizer(model, tmp_path):
    save(tmp_path, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_model_is_saved_to_a_folder(model, tmp_path):
    for name in ("model.safetensors", "model.PT", "config.json"):
        with pytest.raises(ValueError, match=f"must be a folder; got .*{name}"):
            save(tmp_path / name, model)
    assert not [*tmp_path.iterdir()]
    save(tmp_path / "tiny-0.5", model)
    assert load(tmp_path / "tiny-0.5").config == model.config


def test_a_save_that_fails_changes_nothing(model, saved, tokens, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {
        (saved / "config.json").stat().st_mode & 0o777
    }

    for error in (OSError("no space left on device"), SafetensorError("no space left on device")):

        def fails(weights, path, metadata, error=error):
            path.write_bytes(b"half of the weights")
            raise error

        monkeypatch.setattr(own, "save_file", fails)
        with pytest.raises(OSError, match="no space"):
            save(saved, Transformer(TransformerConfig(**SIZES)), CharTokenizer("xy"))
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_the_type_of_the_weights(model, saved, tokens):
    save(saved, model.to(torch.bfloat16))
    assert load(saved).token_embedding.weight.dtype == torch.bfloat16
    wide = load(saved, dtype=torch.float64, device="cpu")
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
    assert torch.equal(wide.ln_final.weight, model.ln_final.weight.double())
    path = saved / "model.safetensors"
    # Copy the weights, because the file is overwritten.
    weights = {key: value.clone() for key, value in load_file(path).items()}
    for kinds, expected in (
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float16], torch.float16),
        ([torch.float32, torch.float64, torch.float16], torch.float64),
    ):
        places = enumerate(weights)
        mixed = {key: weights[key].to(kinds[place % len(kinds)]) for place, key in places}
        save_file(mixed, path)
        loaded = load(saved)
        assert {parameter.dtype for parameter in loaded.parameters()} == {expected}
        assert loaded.unembedding.weight is loaded.token_embedding.weight
        for key, value in mixed.items():
            assert torch.equal(loaded.get_parameter(key), value.to(expected))


def test_the_error_for_an_unknown_model_lists_the_models(monkeypatch, tmp_path):
    offline(monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"'pydoc-5l'.*mean 'pydoc-4l'"):
        load("pydoc-5l")
    for misspelt in ("gpt2-smal", "gpt2-small", "GPT-2"):
        with pytest.raises(FileNotFoundError, match=r"mean 'gpt2'\?") as caught:
            load(misspelt)
        assert len(str(caught.value)) < 240
        assert "\n" not in str(caught.value)
    for nothing in ("nothing", "no/such/directory", Path("nothing")):
        with pytest.raises(FileNotFoundError, match="available: pydoc-4l"):
            load_tokenizer(nothing)
    with pytest.raises(FileNotFoundError, match=r"config.json .*model.safetensors"):
        load(tmp_path)
    # These are names of configs. Only "gpt2" may also be a name on the hub.
    for name in ("tiny-lm", "svd-64-2l", "gpt2"):
        with pytest.raises(FileNotFoundError, match=f"build.'{name}'") as caught:
            load(name)
        assert ("the hub cannot be reached" in str(caught.value)) == (name == "gpt2")
        # A known name needs no suggestion.
        assert "mean" not in str(caught.value)


def test_a_path_is_never_a_bundled_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("pydoc-4l"), model)
    for path in (Path("pydoc-4l"), "./pydoc-4l", str(tmp_path / "pydoc-4l")):
        assert load(path).config == model.config
    assert load("pydoc-4l").config != model.config


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_weights_are_of_a_type_that_models_run_in(saved, dtype):
    with pytest.raises(ValueError, match=str(dtype)):
        load("pydoc-4l", dtype=dtype)
    path = saved / "model.safetensors"
    save_file(load_file(path) | {"ln_final.bias": torch.zeros(10).to(dtype)}, path)
    with pytest.raises(ValueError, match=f"ln_final.bias {dtype}"):
        load(saved)


def test_damaged_weights_are_errors(saved):
    path = saved / "model.safetensors"
    weights = load_file(path)
    for shape in ((2, 3), (10, 30), (300,)):
        save_file(weights | {"blocks.0.attn.qkv.weight": torch.zeros(shape)}, path)
        with pytest.raises(ValueError, match=r"\[30, 10\] .*blocks.0.attn.qkv.weight") as caught:
            load(saved)
        assert str(list(shape)) in str(caught.value)
    del weights["ln_final.bias"], weights["ln_final.weight"]
    save_file(weights | {f"extra.{n}": torch.zeros(1) for n in range(11)}, path)
    with pytest.raises(ValueError, match="model.safetensors") as caught:
        load(saved)
    assert "2 missing: ln_final.bias, ln_final.weight" in str(caught.value)
    assert "11 unexpected: extra.0, extra.1, extra.10, extra.2" in str(caught.value)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors"):
        load(saved)


def test_damaged_configs_are_errors(saved, unchecked):
    path = saved / "config.json"
    described = json.loads(path.read_text())
    for text, message in (
        ("{", "config.json"),
        ("[]", "config.json"),
        (json.dumps(described | {"n_experts": 3}), "config.json: .*ignore=.'n_experts'"),
        (json.dumps(described | {"n_heads": 3}), "config.json: n_kv_heads"),
        (json.dumps(described | {"rotary_scaling": {"kind": "ntk"}}), "rotary_scaling.kind"),
        ("{}", "config.json: model_type .*gemma2"),
        (json.dumps(described | {"n_layers": 10**9}), "n_layers .* 1000000000"),
        (json.dumps(described | {"vocab_size": 10**30}), f"config.json: vocab_size .*{10**30}"),
        (json.dumps(described | {"n_ctx": 1e30}), "config.json: n_ctx .*1e.30"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            load(saved)
        assert "\n" not in str(caught.value)


# Weights in several files, and .bin files.


def in_shards(directory, suffix="safetensors"):
    """Move the weights of a directory into two files, and return the index and these files."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = [directory / f"{stem}-0000{n}-of-00002.{suffix}" for n in (1, 2)]
    parts = [dict(list(weights.items())[n::2]) for n in (0, 1)]
    for part, file in zip(parts, files, strict=True):
        save_file(part, file) if suffix == "safetensors" else torch.save(part, file)
    names = {key: file.name for part, file in zip(parts, files, strict=True) for key in part}
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    return index, files


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(model, saved, tokens, suffix):
    index, files = in_shards(saved, suffix)
    assert torch.equal(load(saved)(tokens), model(tokens))
    described = json.loads(index.read_text())
    key = next(iter(described["weight_map"]))
    # Name the wrong file for one tensor.
    described["weight_map"][key] = files[1].name
    index.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=f"index.json .*1 missing: {key}"):
        load(saved)
    for outside in ("../other.safetensors", "parts/../../other.safetensors", "/other.safetensors"):
        index.write_text(json.dumps({"weight_map": described["weight_map"] | {key: outside}}))
        with pytest.raises(ValueError, match=f"inside its folder; got {outside}"):
            load(saved)
    index.write_text(json.dumps(described))
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=files[1].name):
        load(saved)
    for wrong in ([], {key: 7}, None):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(ValueError, match=r"index.json: weight_map"):
            load(saved)


def test_bin_files(model, saved, tokens):
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    path = saved / "pytorch_model.bin"
    tied = weights | {"unembedding.weight": weights["token_embedding.weight"]}
    torch.save(tied, path)
    loaded = load(saved)
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.unembedding.weight is loaded.token_embedding.weight
    # PyTorch before 1.6 wrote files in this format.
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load(saved)(tokens), model(tokens))


def test_tensors_of_one_memory_become_parameters_of_their_own(model, saved):
    """In a .bin file, tensors may share memory. Weights that are not tied must not share memory."""
    (saved / "model.safetensors").unlink()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    whole, part = torch.randn(10), torch.randn(2, 10)[1]
    weights |= {"ln_final.bias": whole, "ln_final.weight": whole, "blocks.0.ln1.bias": part}
    torch.save(weights, saved / "pytorch_model.bin")
    loaded = load(saved)
    loaded.ln_final.bias.data.zero_()
    assert torch.equal(loaded.ln_final.weight, whole)
    assert torch.equal(loaded.blocks[0].ln1.bias, part)
    assert loaded.blocks[0].ln1.bias.untyped_storage().nbytes() == 40


def test_a_loaded_model_needs_its_file_no_more(model, saved, tokens):
    loaded, path = load(saved), saved / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(loaded(tokens), model(tokens))


class Trap:
    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


def test_a_bin_file_runs_nothing(saved, tmp_path):
    (saved / "model.safetensors").unlink()
    path, trap = saved / "pytorch_model.bin", Trap()
    trap.marker = str(tmp_path / "it ran")
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))):
        write({"ln_final.bias": trap}, path)
        with pytest.raises(
            ValueError, match=r"pytorch_model.bin: .*GLOBAL \S+: save model.state_dict"
        ):
            load(saved)
    assert not Path(trap.marker).exists()


# `torch.load` warns about damaged files.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_damage_is_refused_or_changes_no_weight(form, tmp_path):
    sizes = dict(vocab_size=2, n_ctx=2, n_layers=1, n_heads=1, d_model=2, d_mlp=1)
    model = randomised(TransformerConfig(**sizes, norm="none", final_norm=False))
    save(tmp_path, model)
    path, expected = tmp_path / "model.safetensors", model.state_dict()
    if form == "bin":
        path.unlink()
        path = tmp_path / "pytorch_model.bin"
        torch.save(dict(expected), path)
    whole, refused, draw = path.read_bytes(), 0, random.Random(0)
    # The place of the attributes of a file with weights, in the directory of the zip file.
    attributes = whole.find(b"PK\1\2", whole.find(b"data/0PK")) + 38
    places = {(draw.randrange(len(whole)), draw.randrange(8)) for _ in range(400)}
    places |= {(attributes, 4)} if form == "bin" else set()
    flipped = (whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at, bit in places)
    cut = (b"", whole[:50], whole[:-900], whole[:-1], b"no file of weights at all")
    for content in (*flipped, *cut):
        path.write_bytes(content)
        try:
            loaded = load(tmp_path).state_dict()
        except ValueError as error:
            refused += path.name in str(error)
        else:
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert refused > 100


def test_bin_files_hold_tensors_by_names(saved):
    (saved / "model.safetensors").unlink()
    path = saved / "pytorch_model.bin"
    for other in ([torch.zeros(1)], {5: torch.zeros(1)}, {"ln_final.bias": "text"}):
        torch.save(other, path)
        with pytest.raises(ValueError, match="pytorch_model.bin"):
            load(saved)


def test_damage_anywhere_in_a_bin_file_is_one_plain_line(saved, recwarn):
    """The file has the older format of PyTorch.

    Damage in its pickles causes many kinds of errors.
    """
    (saved / "model.safetensors").unlink()
    path = saved / "pytorch_model.bin"
    torch.save({"ln_final.bias": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"pytorch_model\.bin") as caught:
            load(saved)
        assert not re.search(r"\n|Error\(|^error", str(caught.value))


# Memory: a checkpoint of 100 MiB, read in a process of its own.

LOADS = """
import sys
from models.checkpoints import load
from tests.bench.timing import peak_in_this_process
load("pydoc-4l")  # what PyTorch imports for the first model is not counted
print(peak_in_this_process(lambda: load(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["safetensors", "shards", "bin"])
def test_loading_takes_little_more_memory_than_the_model(tmp_path, form):
    """The model is a GPT-2, because all its matrices are transposed when it is loaded."""
    d, layers, vocab = 512, 6, 14009
    shapes = {"wte.weight": (vocab, d), "wpe.weight": (64, d)}
    shapes |= {f"ln_f.{kind}": (d,) for kind in ("weight", "bias")}
    maps = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, 4 * d)}
    for n in range(layers):
        for name, shape in (maps | {"mlp.c_proj": (4 * d, d)}).items():
            shapes |= {f"h.{n}.{name}.weight": shape, f"h.{n}.{name}.bias": shape[1:]}
        shapes |= {f"h.{n}.ln_{i}.{kind}": (d,) for i in (1, 2) for kind in ("weight", "bias")}
    state = {f"transformer.{key}": torch.full(shape, 0.01) for key, shape in shapes.items()}
    described = dict(model_type="gpt2", vocab_size=vocab, n_positions=64, n_embd=d, n_layer=layers)
    (tmp_path / "config.json").write_text(json.dumps(described | {"n_head": 8}))
    if form == "bin":
        state["lm_head.weight"] = state["transformer.wte.weight"]
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file(state, tmp_path / "model.safetensors")
    if form == "shards":
        in_shards(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.iterdir()) / 2**20
    assert size > 95
    command = [sys.executable, "-c", LOADS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    for file in tmp_path.iterdir():
        file.unlink()
    assert float(done.stdout) <= 1.15 * size


# The hub, without a network.


def offline(monkeypatch):
    """Raise the error of an unreachable hub immediately."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch(name, **options):
        raise LocalEntryNotFoundError("outgoing traffic\n has been disabled" * 20)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)


def test_hub_models_are_fetched(model, saved, tokens, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    revisions = []

    def fetch(name, allow_patterns, revision):
        asked.append((name, allow_patterns))
        revisions.append(revision)
        return str(saved)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert torch.equal(load("some/model")(tokens), model(tokens))
    name, patterns = asked.pop()
    assert name == "some/model"
    assert {"config.json", "model.safetensors", "model.safetensors.index.json"} <= set(patterns)
    assert not any(".bin" in pattern for pattern in patterns)
    assert load_tokenizer("model").decode([1]) == "b"
    assert not any("model" in pattern.partition(".")[0] for pattern in asked.pop()[1])
    (saved / "model.safetensors").rename(saved / "other")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin"):
        load("some/model")
    assert "pytorch_model*.bin" in asked[-1][1]
    asked.clear()
    load_tokenizer("some/model")
    # No other file is downloaded.
    assert len(asked) == 1
    (saved / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        load("some/model")
    assert {*revisions} == {None}
    load_tokenizer("some/model", revision="step-3")
    with pytest.raises(FileNotFoundError):
        load("some/model", revision="v2")
    assert revisions[-3:] == ["step-3", "v2", "v2"]
    for at_hand in (saved, "pydoc-4l"):
        with pytest.raises(ValueError, match=r"revision must be None.*'v2'"):
            load(at_hand, revision="v2")


def test_a_file_of_weights_alone_says_which_call_reads_it(model, tmp_path):
    for name, call in (
        ("a.safetensors", "load_file"),
        ("b.pt", "torch.load"),
        ("c.bin", "torch.load"),
    ):
        file = tmp_path / name
        if name == "a.safetensors":
            save_file({"weight": model.W_E.detach()}, file)
        else:
            zipped = name == "b.pt"
            torch.save(model.state_dict(), file, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=rf"{name} contains weights .*{call}"):
            load(file)
    save(tmp_path / "whole", model)
    with pytest.raises(ValueError, match=r"load\('.*whole'\) reads it"):
        load(tmp_path / "whole" / "model.safetensors")


def test_offline_the_hub_is_not_asked():
    """With HF_HUB_OFFLINE, the real library fails at once, and the error is one line."""
    pytest.importorskip("huggingface_hub")
    code = "from models.checkpoints import load; load('no-such/model')"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=60,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("FileNotFoundError: ")
    assert "'no-such/model'" in last
    assert "HF_HUB_OFFLINE is set" in last


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RepositoryNotFoundError", "no repository has this name"),
        ("GatedRepoError", "accept the terms"),
        ("RevisionNotFoundError", "no such revision"),
    ],
)
def test_refusals_of_the_hub_are_one_short_line(monkeypatch, name, words):
    hub = pytest.importorskip("huggingface_hub")
    httpx = pytest.importorskip(hub.errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
    request = httpx.Request("GET", "https://huggingface.co/api/models/some/model")
    response = httpx.Response(401, request=request)

    def fetch(*args, **options):
        raise getattr(hub.errors, name)("401 Client Error.\n\nLong" * 20, response=response)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    with pytest.raises(FileNotFoundError, match=f"hub failed: .*{words}") as caught:
        load("some/model", revision="v2")
    assert len(str(caught.value)) < 240
    assert name in repr(caught.value.__cause__)


def test_without_the_hub_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'available: pydoc-4l.*pip install (-e )?".*\[hf\]'):
        load("gpt2")
    assert load("pydoc-4l").config.n_layers == 4


def test_the_bundled_model_is_small_and_described():
    assert list_models() == ["pydoc-4l"]
    directory = BUNDLED / "pydoc-4l"
    assert sum(file.stat().st_size for file in directory.iterdir()) < 4_000_000
    described = json.loads((directory / "training.json").read_text())
    assert described["validation_loss_nats"] <= 1.25
    assert {"command", "seed", "training_loss_nats", "text_sha256"} <= described.keys()


def test_the_bundled_model_reaches_its_validation_loss():
    described = json.loads((BUNDLED / "pydoc-4l" / "training.json").read_text())
    text = "\n".join(topics.values())
    if hashlib.sha256(text.encode()).hexdigest() != described["text_sha256"]:
        pytest.skip(f"this Python's documentation is not that of {described['python']}")
    tokens = torch.tensor(load_tokenizer("pydoc-4l").encode(text))
    loss = evaluate(pydoc(), train_test_split(tokens)[1]).nats
    assert loss <= 1.25
    assert loss == pytest.approx(described["validation_loss_nats"], abs=1e-3)


def test_the_bundled_model_copies_in_context():
    model, characters = pydoc(), load_tokenizer("pydoc-4l").characters
    generator = torch.Generator().manual_seed(7)
    once = torch.randint(len(characters), (32, 40), generator=generator)
    with torch.no_grad():
        log_probs = model(once.repeat(1, 2)).log_softmax(-1)
    losses = -log_probs[:, :-1].gather(2, once.repeat(1, 2)[:, 1:, None]).squeeze(2)
    assert losses[:, 39:].mean() <= 0.6 * losses[:, :39].mean()
