"""Saving and loading, the tokenizer, and the model that ships with the package."""

import hashlib
import json
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import CharTokenizer, available, evaluate, load, load_tokenizer, save, split
from models.checkpoint import BUNDLED


@pytest.fixture
def saved(model, tmp_path):
    save(tmp_path / "m", model, CharTokenizer("abcdefghijklmnopqrstuvw"))
    return tmp_path / "m"


def test_what_is_saved_is_loaded(model, saved, tokens):
    loaded = load(saved)
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.unembedding.weight is loaded.token_embedding.weight
    assert load_tokenizer(saved).decode([0, 22]) == "aw"
    assert "unembedding.weight" not in load_file(saved / "model.safetensors")


def test_untied_weights_are_both_saved(tokens, tmp_path):
    from models import Transformer, TransformerConfig

    sizes = dict(vocab_size=23, n_ctx=17, n_layers=1, n_heads=2, d_model=10)
    model = Transformer(TransformerConfig(**sizes, tied_unembed=False)).eval()
    save(tmp_path, model, CharTokenizer("abcdefghijklmnopqrstuvw"))
    assert torch.equal(load(tmp_path)(tokens), model(tokens))


def test_an_unknown_model_lists_what_is_available():
    with pytest.raises(
        FileNotFoundError, match=r"no model is named 'pydoc-5l'.*available: pydoc-4l"
    ):
        load("pydoc-5l")
    with pytest.raises(FileNotFoundError, match="available: pydoc-4l"):
        load_tokenizer("nothing")


def test_damaged_weights_are_errors(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            load(saved)
    path.write_bytes(whole)
    weights = load_file(path)
    weights["blocks.0.attn.query.weight"] = torch.zeros(2, 3)
    del weights["ln_final.bias"]
    weights["extra"] = torch.zeros(1)
    save_file(weights, path)
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load(saved)
    for part in (
        "query.weight: [2, 3] in the file, [10, 10] in the config",
        "ln_final.bias: None in the file, [10] in the config",
        "extra: [1] in the file, None in the config",
    ):
        assert part in str(caught.value)


def test_damaged_configs_are_errors(saved):
    path = saved / "config.json"
    described = json.loads(path.read_text())
    path.write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load(saved)
    path.write_text(json.dumps(described | {"n_experts": 3}))
    with pytest.raises(ValueError, match="config.json is not a config: .*n_experts"):
        load(saved)
    path.write_text(json.dumps(described | {"n_heads": 3}))
    with pytest.raises(ValueError, match="multiple of n_heads"):
        load(saved)


def test_missing_weights_are_an_error(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        load(saved)


def test_characters_there_and_back():
    tokenizer = CharTokenizer.of("banana cab")
    assert tokenizer.characters == (" ", "a", "b", "c", "n")
    assert tokenizer.encode("cab") == [3, 1, 2]
    assert tokenizer.decode([4, 1, 0]) == "na "
    assert tokenizer.tokens_as_text([3, 0]) == ["c", " "]
    with pytest.raises(ValueError, match="no token for '!', 'z'; its 5 characters are ' abcn'"):
        tokenizer.encode("zab!")
    with pytest.raises(ValueError, match=r"tokens are 0 to 4, not \[5, -1\]"):
        tokenizer.decode([1, 5, -1])
    for wrong in ("aa", ["ab"], [""]):
        with pytest.raises(ValueError, match="distinct single characters"):
            CharTokenizer(wrong)


def test_the_bundled_model_is_small_and_described():
    assert available() == ["pydoc-4l"]
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
    loss = evaluate(load("pydoc-4l"), split(tokens)[1])
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
