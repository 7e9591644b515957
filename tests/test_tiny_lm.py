"""The examples that train a model: their files, figures, resumed runs and errors."""

import json
import math
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models import (
    Transformer,
    load,
    load_tokenizer,
)

pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parent.parent / "examples"
# Append the folders, so that their modules hide no other module.
sys.path += [str(EXAMPLES), str(EXAMPLES / "studies")]
tiny_lm, figures = import_module("tiny_lm"), import_module("tiny_lm_figures")
train_pydoc, qk_norm = import_module("train_pydoc"), import_module("qk_norm")

SIZES = {"layers": 1, "heads": 3, "width": 12, "context": 16}
SMALL = SIZES | {"batch-size": 2, "length": 20, "steps": 4, "warmup": 1, "evaluate-every": 2}


def words(options):
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be,\nthat is the question: whether it's nobler\n" * 9)
    return path


@pytest.fixture
def call(text, tmp_path, capsys):
    """A function that runs an example in a directory, and returns its status, output and errors."""

    def call(*more, example=tiny_lm, small=SMALL):
        options = words(small | {"out": tmp_path / "out"})
        text_option = [] if example is train_pydoc else ["--text", str(text)]
        return (example.main([*text_option, *options, *more]), *capsys.readouterr())

    return call


@pytest.fixture
def training_only(monkeypatch):
    """Skip samples and figures, for tests of other parts."""
    monkeypatch.setattr(tiny_lm, "SAMPLINGS", ())
    monkeypatch.setattr(tiny_lm, "draw", lambda *_: None)


def test_it_writes_a_model_a_log_samples_and_figures(call, tmp_path, text, monkeypatch):
    drawn = {}
    for name in ("loss_figure", "attention_figure"):
        real = getattr(figures, name)

        def spy(*arguments, name=name, real=real):
            drawn[name] = arguments
            return real(*arguments)

        monkeypatch.setattr(figures, name, spy)
    status, shown, complaints = call("--prompt", "to be")
    assert (status, complaints) == (0, "")
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *("attention.png", "checkpoint.pt", "config.json", "log.jsonl", "losses.png"),
        *("model.safetensors", "samples.txt", "samples_by_step.txt", "vocabulary.json"),
    }
    model, tokenizer = load(out), load_tokenizer(out)
    assert (model.config.n_layers, model.config.n_heads, model.config.d_model) == (1, 3, 12)
    assert set(tokenizer.characters) == set(text.read_text())
    for name in ("losses.png", "attention.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    samples = (out / "samples.txt").read_text()
    assert [heading.strip() for heading in samples.split("---")[1::2]] == [
        *("greedy", "temperature 0.5", "temperature 0.8", "temperature 1.0", "temperature 1.3"),
        *("temperature 1.0, top-k 5", "temperature 1.0, top-p 0.9"),
    ]
    texts = samples.split("---\n")[1:]
    assert all(part.startswith("to be") for part in texts)
    # The prompt, 20 characters and the line's end.
    assert len(texts[-1]) == 5 + 20 + 1
    # The last sample during training has the weights, the settings and the seed of the third
    # sample after training, so both are the same text.
    first, last = (out / "samples_by_step.txt").read_text().split("--- step ")[1:]
    assert first.startswith("2, temperature 0.8 ---\nto be")
    assert last == f"4, temperature 0.8 ---\n{texts[2][: 5 + 20]}\n"
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses, validation = drawn["loss_figure"]
    assert list(losses) == [line["loss"] for line in lines]
    found = {step: evaluation.nats for step, evaluation in validation.items()}
    assert found == {step: lines[step - 1]["validation_loss"] for step in (2, 4)}
    # The held-out tenth begins after 502 of 558 characters.
    assert tokenizer.decode(drawn["attention_figure"][2]) == text.read_text()[502:518]
    assert f"step 4: validation {lines[3]['validation_loss']:.4f} nats" in shown


def gpt2_files(directory):
    """Write the two files of a tokenizer like GPT-2's, with all bytes and one merge."""
    signs = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel.alphabet()
    pieces = [*sorted(signs), "be", "<|endoftext|>"]
    directory.mkdir()
    encoder = {piece: token for token, piece in enumerate(pieces)}
    (directory / "encoder.json").write_text(json.dumps(encoder))
    (directory / "vocab.bpe").write_text("#version: 0.2\nb e\n")
    return directory


@pytest.mark.parametrize("kind", ["bytes", "gpt2"])
def test_tokens_may_be_bytes_or_those_of_a_directory(call, tmp_path, text, kind):
    pytest.importorskip("tokenizers")
    written = "to be or nöt to be,\n床 is the question\n" * 20
    text.write_text(written, encoding="utf-8")
    where = "bytes" if kind == "bytes" else str(gpt2_files(tmp_path / "gpt2"))
    status, shown, complaints = call("--tokens", where, "--length", "6")
    assert (status, complaints) == (0, "")
    out = tmp_path / "out"
    tokenizer, size = load_tokenizer(out), {"bytes": 256, "gpt2": 258}[kind]
    assert load(out).config.vocab_size == tokenizer.vocab_size == size
    tokens = tokenizer.encode(written)
    assert len(tokens) == len(written.encode()) - (40 if kind == "gpt2" else 0)
    held_out = tokens[round(0.9 * len(tokens)) :]
    length = len(tokenizer.decode(held_out)) / len(held_out)
    nats, bits = map(float, re.findall(r"step 4: .* ([\d.]+) nats .* ([\d.]+) bits", shown)[0])
    assert bits == pytest.approx(nats / math.log(2) / length, rel=2e-2)
    assert (out / "samples.txt").read_text(encoding="utf-8").startswith("--- greedy ---\n\n")


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--layers", "2", "--mlp-width", "7"], {"n_layers": 2, "d_mlp": 7}),
        (
            ["--positions", "sinusoidal", "--dropout", "0.25"],
            {"positions": "sinusoidal", "dropout": 0.25},
        ),
        (["--model", "d12_post_norm_qk_norm", "--heads", "2"], {"qk_norm": "head", "n_layers": 1}),
    ],
)
def test_the_experiments_are_options(call, tmp_path, options, fields, training_only):
    status, _, complaints = call(*options, "--weight-decay", "0.3", "--final-rate", "1")
    assert (status, complaints) == (0, "")
    config = load(tmp_path / "out").config
    assert {name: getattr(config, name) for name in fields} == fields
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.3
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning_rate"] for line in lines] == [2e-3] * 4


REFUSED = [
    (tiny_lm, ["--context", "90"], "text to validate on"),
    (tiny_lm, ["--learning-rate", "1e38"], "no checkpoint"),
    (tiny_lm, ["--model", "d12_post_nrm"], "d12_post_norm"),
    (tiny_lm, ["--heads", "5"], "n_heads"),
    (tiny_lm, ["--resume"], "checkpoint.pt"),
    (tiny_lm, ["--out", __file__], f"--out must be a directory; got the file {__file__}"),
    (
        tiny_lm,
        ["--out", str(EXAMPLES.parent / "models/bundled_files/pydoc-4l")],
        "already has a model",
    ),
    (tiny_lm, ["--length", "0", "--context", "1"], "--context must be at least 2; got 1; --length"),
    (qk_norm, ["--learning-rates", "-1"], "-1.0"),
    (qk_norm, ["--context", "90"], "(56,)"),
    (train_pydoc, ["--prose-steps", "-1"], "--prose-steps must be at least 0; got -1"),
]


@pytest.mark.parametrize(("example", "options", "reason"), REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_errors_of_the_training_examples_are_one_line(call, example, options, reason, tmp_path):
    small = {tiny_lm: SMALL, qk_norm: SIZES | {"heads": 2}, train_pydoc: {"steps": 1}}[example]
    status, _, complaints = call(*options, example=example, small=small)
    assert status == 1
    assert complaints.startswith("error: ")
    assert complaints.count("\n") == 1
    assert reason in complaints
    assert not (tmp_path / "out" / "model.safetensors").exists()


def drawn_at_random(config):
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


@torch.no_grad()
def scores_by_hand(model, tokens):
    """Return scores [layer, head, query, key] of a `nano` model on tokens [1, pos].

    They are -inf for keys after the query.
    """
    resid = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: resid.append(inputs[0]))
        for block in model.blocks
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    found = []
    for layer, block in enumerate(model.blocks):
        x = F.layer_norm(resid[layer], resid[layer].shape[-1:], block.ln1.weight)[0]
        scores = (x @ model.W_Q[layer]) @ (x @ model.W_K[layer]).mT / model.config.d_head**0.5
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        found.append(scores.masked_fill(future, -math.inf))
    return torch.stack(found)


def test_qk_norm_bounds_the_scores(call, tmp_path):
    sizes = SIZES | {"heads": 2, "width": 8, "steps": 12, "learning-rates": 0.3}
    status, shown, complaints = call(example=qk_norm, small=sizes)
    assert (status, complaints) == (0, "")
    found = json.loads((tmp_path / "out" / "qk_norm.json").read_text())
    assert list(found) == ["rate 0.3, no QK-norm", "rate 0.3, QK-norm"]
    assert all(name in shown for name in found)
    free, normed = found.values()
    assert [m["step"] for m in free] == [m["step"] for m in normed] == list(range(13))
    # Queries and keys have the length sqrt(4), and scores are their product divided by sqrt(4).
    assert all(m["largest_score"] <= 2 + 1e-4 for m in normed)
    assert free[-1]["largest_score"] > 2.5
    assert free[0]["entropy"] == pytest.approx(1, abs=1e-3)
    assert all(0 < m["entropy"] <= 1 for m in free + normed)
    assert (tmp_path / "out" / "qk_norm.png").read_bytes().startswith(b"\x89PNG")


def test_qk_norm_measures_scores_and_entropy():
    config = tiny_lm.nano(11).replace(n_ctx=7, n_layers=2, n_heads=3, d_model=15)
    model, text = drawn_at_random(config), torch.randint(11, (40,))
    found = qk_norm.measure(model, text[:14].view(2, 7), text, 5)
    scores = torch.stack([scores_by_hand(model, text[i : i + 7][None]) for i in (0, 7)])
    allowed = scores[scores.isfinite()]
    assert len(allowed) == 2 * 2 * 3 * 28
    assert found.largest_score == pytest.approx(allowed.abs().max().item(), rel=1e-4)
    assert found.score_deviation == pytest.approx(allowed.std().item(), rel=1e-4)
    shares = [
        sum(-p * math.log(p) for p in row.tolist() if p) / math.log(query + 1)
        for rows in scores.softmax(-1).flatten(0, 2)
        for query, row in enumerate(rows)
        if query
    ]
    assert found.entropy == pytest.approx(sum(shares) / len(shares), rel=1e-4)
    with torch.no_grad():
        logits = model(text[:35].view(5, 7)).flatten(0, 1)
        loss = F.cross_entropy(logits, text[1:36]).item()
        model.token_embedding.weight.fill_(math.nan)
    assert found.validation_loss == pytest.approx(loss, rel=1e-4)
    with pytest.raises(FloatingPointError, match="nan at step 6"):
        qk_norm.measure(model, text[:14].view(2, 7), text, 6)
