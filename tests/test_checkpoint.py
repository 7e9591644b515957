"""Saving and loading, damaged files, memory, the hub, and the model that ships with the package."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import CharTokenizer, RotaryScaling, Transformer, TransformerConfig, evaluate, split
from models.checkpoints import BUNDLED, bundled, load, load_tokenizer, own, save

ROOT = Path(__file__).parent.parent
SIZES = dict(vocab_size=23, n_ctx=17, n_layers=2, n_heads=2, d_model=12)
TOKENIZER = CharTokenizer("abcdefghijklmnopqrstuvw")


@pytest.fixture
def saved(model, tmp_path):
    save(tmp_path / "m", model, TOKENIZER)
    return tmp_path / "m"


def test_what_is_saved_is_loaded(model, saved, tokens):
    loaded = load(saved)
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.unembedding.weight is loaded.token_embedding.weight
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert load_tokenizer(saved).decode([0, 22]) == "aw"
    assert "unembedding.weight" not in load_file(saved / "model.safetensors")


@pytest.mark.parametrize(
    "fields",
    [
        dict(tied_unembed=False, unembed_bias=True),
        dict(positions="sinusoidal", norm_place="post", embed_norm=True, n_kv_heads=1),
        dict(norm="rmsnorm", mlp="gated", window=3, window_layers=(1,), norm_place="sandwich")
        | dict(positions="rotary", rotary_scaling=RotaryScaling(kind="linear", factor=2.0)),
        dict(norm="none", mlp="none", positions="rotary", qk_norm="all")
        | dict(rotary_scaling=RotaryScaling(kind="factors", factors=(1.0, 2.0, 3.0))),
    ],
)
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
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.usefixtures("unchecked")
def test_other_tokenizers_are_not_saved(model, tmp_path):
    with pytest.raises(TypeError, match="save writes a CharTokenizer, not a object"):
        save(tmp_path / "m", model, object())
    assert not (tmp_path / "m").exists()


def test_a_save_that_fails_changes_nothing(model, saved, tokens, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert {path.stat().st_mode & 0o777 for path in saved.iterdir()} == {
        (saved / "config.json").stat().st_mode & 0o777
    }

    def fails(weights, path):
        path.write_bytes(b"half of the weights")
        raise OSError("no space left on device")

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
    weights = load_file(path)
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


def test_quantised_weights_are_not_read(saved):
    path = saved / "model.safetensors"
    save_file(load_file(path) | {"ln_final.bias": torch.zeros(10, dtype=torch.int8)}, path)
    with pytest.raises(
        ValueError, match="ln_final.bias holds torch.int8, not one of float64, float32"
    ):
        load(saved)


def test_an_unknown_model_lists_what_is_there(monkeypatch):
    offline(monkeypatch)
    with pytest.raises(
        FileNotFoundError,
        match=r"no model is named 'pydoc-5l', .*did you mean 'pydoc-4l'\? available: pydoc-4l",
    ):
        load("pydoc-5l")
    for nothing in ("nothing", "", "no/such/directory", Path("nothing")):
        with pytest.raises(FileNotFoundError, match="available: pydoc-4l"):
            load_tokenizer(nothing)


def test_a_directory_without_a_config_is_named_as_such(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="and the directory of that name holds no config.json"
    ):
        load(tmp_path)


def test_a_path_is_never_a_bundled_model(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("pydoc-4l"), model)
    for path in (Path("pydoc-4l"), "./pydoc-4l", str(tmp_path / "pydoc-4l")):
        assert load(path).config == model.config
    assert load("pydoc-4l").config != model.config


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", ["float16", torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_weights_are_of_a_type_that_models_run_in(dtype):
    with pytest.raises(
        ValueError, match=r"dtype is one of torch.float64, .* not .*" + str(dtype)[-3:]
    ):
        load("pydoc-4l", dtype=dtype)


def test_other_files_are_not_read(saved):
    with pytest.raises(FileNotFoundError, match="of files only GGUF is read; .*available"):
        load(saved / "model.safetensors")


def test_damaged_weights_are_errors(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            load(saved)
    path.write_bytes(whole)
    weights = load_file(path)
    weights["blocks.0.attn.qkv.weight"] = torch.zeros(2, 3)
    del weights["ln_final.bias"]
    save_file(weights | {f"extra.{n}": torch.zeros(1) for n in range(11)}, path)
    with pytest.raises(ValueError, match="model.safetensors does not fit its config") as caught:
        load(saved)
    for part in (
        "1 missing: ln_final.bias;",
        "11 unexpected: extra.0, extra.1, extra.10, extra.2, extra.3, extra.4, extra.5, extra.6, "
        "extra.7, extra.8, extra.9; 1 wrong: blocks.0.attn.qkv.weight [2, 3] in the file, [30, 10] in the config",
    ):
        assert part in str(caught.value)


def test_damaged_configs_are_errors(saved, unchecked):
    path = saved / "config.json"
    described = json.loads(path.read_text())
    for text, message in (
        ("{", "config.json is not JSON"),
        ("[]", "config.json is not a JSON object"),
        (json.dumps(described | {"n_experts": 3}), "config.json is not a config: .*n_experts"),
        (json.dumps(described | {"n_heads": 3}), "config.json: n_kv_heads is a divisor"),
        (json.dumps(described | {"rotary_scaling": {"kind": "ntk"}}), "rotary_scaling.kind"),
        ("[" * 100_000, "config.json is not JSON"),
        ('{"model_type": ' + "[" * 90 + "]" * 90 + "}", "config.json: model_type is one of"),
        ("{}", "config.json: model_type is missing; it is one of gpt2, .*, gemma2$"),
        ('{"hidden_size": 8, "num_hidden_layers": 2}', "config.json: model_type is missing"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            load(saved)
        assert "\n" not in str(caught.value)


def test_the_number_of_blocks_is_found_before_they_are_built(saved):
    """A billion of them would not be built in a day."""
    path = saved / "config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps(described | {"n_layers": 10**9}))
    with pytest.raises(ValueError, match=r"holds \d\d tensors, for 1000000000 layers$"):
        load(saved)


def test_missing_weights_are_an_error(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no weights: it has no model.safetensors"):
        load(saved)


# Shards and .bin files, of our own format as of any other.


def in_shards(directory, suffix="safetensors"):
    """The directory's weights in two files with an index, and the files."""
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
    for change, error, message in (
        ({key: files[1].name}, ValueError, f"{files[1].name} does not hold {key}; .*not name"),
        ({key: "../" + files[0].name}, ValueError, r"names files of its own directory, not '\.\./"),
        ({key: 3}, ValueError, "has no weight_map of tensors to files"),
    ):
        altered = described | {"weight_map": described["weight_map"] | change}
        index.write_text(json.dumps(altered))
        with pytest.raises(error, match=message):
            load(saved)
    index.write_text(json.dumps(described))
    files[1].unlink()
    with pytest.raises(
        FileNotFoundError, match=f"2 files, of which 1 are not there: {files[1].name}"
    ):
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
    torch.save(weights, path, _use_new_zipfile_serialization=False)  # as before torch 1.6
    assert torch.equal(load(saved)(tokens), model(tokens))


def test_tensors_of_one_memory_become_parameters_of_their_own(model, saved):
    """A .bin file keeps what shared memory when it was written; weights that are not tied must not."""
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
            ValueError, match=r"pytorch_model.bin is not opened: .* any code; it calls \S+$"
        ):
            load(saved)
    assert not Path(trap.marker).exists()


def test_damaged_bin_files_are_errors(saved):
    (saved / "model.safetensors").unlink()
    path = saved / "pytorch_model.bin"
    torch.save({"ln_final.bias": torch.zeros(1000)}, path)
    whole = path.read_bytes()
    for content in (b"", whole[:50], whole[:-1000], b"no pickle at all"):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"pytorch_model.bin is not (opened: .* it is damaged|a whole file)"
        ):
            load(saved)
    for value, message in (
        ([torch.zeros(1)], "holds a list, not tensors by name"),
        ({"step": 3}, "holds tensors by name, but 'step' is not one"),
    ):
        torch.save(value, path)
        with pytest.raises(ValueError, match=message):
            load(saved)


# Memory: a checkpoint of 147 MiB, read in a process of its own.

LOADS = """
import sys, torch
from models.checkpoints import load
from tests.bench.timing import peak_in_this_process
print(peak_in_this_process(lambda: load(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Directories of one GPT-2 in three forms, all of whose matrices are transposed when loaded."""
    d, layers, vocab = 512, 9, 20011
    shapes = {
        "wte.weight": (vocab, d),
        "wpe.weight": (64, d),
        "ln_f.weight": (d,),
        "ln_f.bias": (d,),
    }
    for n in range(layers):
        for name, wide in (("attn.c_attn", 3 * d), ("attn.c_proj", d), ("mlp.c_fc", 4 * d)):
            shapes |= {f"h.{n}.{name}.weight": (d, wide), f"h.{n}.{name}.bias": (wide,)}
        shapes |= {f"h.{n}.mlp.c_proj.weight": (4 * d, d), f"h.{n}.mlp.c_proj.bias": (d,)}
        shapes |= {
            f"h.{n}.{ln}.{kind}": (d,) for ln in ("ln_1", "ln_2") for kind in ("weight", "bias")
        }
    state = {f"transformer.{key}": torch.full(shape, 0.01) for key, shape in shapes.items()}
    described = dict(model_type="gpt2", vocab_size=vocab, n_positions=64, n_embd=d, n_layer=layers)
    directories = {}
    for form in ("safetensors", "shards", "bin"):
        directories[form] = directory = tmp_path_factory.mktemp(form)
        (directory / "config.json").write_text(json.dumps(described | {"n_head": 8}))
        if form == "bin":
            state["lm_head.weight"] = state["transformer.wte.weight"]
            torch.save(state, directory / "pytorch_model.bin")
        else:
            save_file(state, directory / "model.safetensors")
    in_shards(directories["shards"])
    yield directories
    for directory in directories.values():
        for file in directory.iterdir():
            file.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("form", ["safetensors", "shards", "bin"])
def test_loading_takes_little_more_memory_than_the_model(large, form):
    size = sum(file.stat().st_size for file in large[form].iterdir()) / 2**20
    assert size > 140
    command = [sys.executable, "-c", LOADS, str(large[form])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert float(done.stdout) <= 1.15 * size


# The hub, without a network.


def offline(monkeypatch):
    """What an unset or unreachable hub does, at once."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch(name, **options):
        raise LocalEntryNotFoundError("outgoing traffic\n has been disabled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)


def test_hub_models_are_fetched(model, saved, tokens, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
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
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        load("some/model")
    assert "pytorch_model*.bin" in asked[-1][1]
    (saved / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"no model is named 'some/model', .* has no config.json"
    ):
        load("some/model")


def test_without_a_network(monkeypatch):
    pytest.importorskip("huggingface_hub")
    offline(monkeypatch)
    with pytest.raises(FileNotFoundError) as caught:
        load("gpt2")
    assert str(caught.value) == (
        "no model is named 'gpt2', no directory of that name holds a config.json, and the hub gives no "
        "'gpt2': outgoing traffic has been disabled; available: pydoc-4l"
    )


def test_offline_the_hub_is_not_asked():
    """The real library, told to stay offline, gives up at once, and in one line."""
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
    assert last.startswith("FileNotFoundError: no model is named 'no-such/model', no directory")
    assert last.endswith("available: pydoc-4l")


def test_without_the_hub_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "hookscope\[hf\]"; available: pydoc-4l'):
        load("gpt2")
    assert load("pydoc-4l").config.n_layers == 4


def test_importing_models_brings_no_library_of_checkpoints():
    heavy = ["transformers", "huggingface_hub", "gguf", "tokenizers", "tiktoken"]
    code = f"import sys, models.checkpoints; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_model_is_verified_on_request(saved, monkeypatch):
    verified = []
    monkeypatch.setattr("models.verification.verify", verified.append)
    assert verified == [load(saved, verify=True)]
    load(saved)
    assert len(verified) == 1


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_what_has_no_weights_is_not_verified(saved, device):
    assert all(parameter.is_meta for parameter in load(saved, device=device).parameters())
    with pytest.raises(ValueError, match="on the device meta there are none") as caught:
        load(saved, device=device, verify=True)
    assert str(caught.value).startswith("verify=True computes with weights")


def test_characters_there_and_back():
    tokenizer = CharTokenizer.of("banana cab")
    assert tokenizer.characters == (" ", "a", "b", "c", "n")
    assert tokenizer.encode("cab") == [3, 1, 2]
    assert tokenizer.decode([4, 1, 0]) == "na "
    assert tokenizer.tokens_as_text([3, 0]) == ["c", " "]
    with pytest.raises(ValueError, match="no token for '!', 'z'; its 5 characters are ' abcn'"):
        tokenizer.encode("zab!")
    with pytest.raises(ValueError, match=r"\[5, -1\]"):
        tokenizer.decode([1, 5, -1])
    for wrong in ("aa", ["ab"], [""]):
        with pytest.raises(ValueError, match="distinct single characters"):
            CharTokenizer(wrong)


def test_the_bundled_model_is_small_and_described():
    assert bundled() == ["pydoc-4l"]
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
    loss = evaluate(load("pydoc-4l"), split(tokens)[1]).nats
    assert loss <= 1.25
    assert loss == pytest.approx(described["validation_loss_nats"], abs=1e-3)


def test_the_bundled_model_copies_in_context():
    model, characters = load("pydoc-4l"), load_tokenizer("pydoc-4l").characters
    generator = torch.Generator().manual_seed(7)
    once = torch.randint(len(characters), (32, 40), generator=generator)
    with torch.no_grad():
        log_probs = model(once.repeat(1, 2)).log_softmax(-1)
    losses = -log_probs[:, :-1].gather(2, once.repeat(1, 2)[:, 1:, None]).squeeze(2)
    assert losses[:, 39:].mean() <= 0.6 * losses[:, :39].mean()


def test_the_bundled_model_predicts_prose():
    tokenizer = load_tokenizer("pydoc-4l")
    tokens = torch.tensor([tokenizer.encode("The current implementati")])
    assert tokenizer.decode(load("pydoc-4l")(tokens)[0, -1:].argmax(-1).tolist()) == "o"
