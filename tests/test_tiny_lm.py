"""The examples that train: what they write, how they go on, and how they refuse."""

import importlib.util
import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from models import Sampling, Transformer, TransformerConfig, load, load_tokenizer

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
SIZES = {"layers": 1, "heads": 3, "width": 12, "context": 16}
SMALL = {**SIZES, "batch-size": 2, "length": 20}
SHORT = {"steps": 4, "warmup": 1, "evaluate-every": 2}


def words(options):
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny_lm():
    return example("tiny_lm")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be,\nthat is the question: whether it's nobler\n" * 9)
    return path


@pytest.fixture
def call(tiny_lm, text, tmp_path, capsys):
    """Runs the example in a directory; gives status, what it printed, and its complaints."""

    def call(*more):
        arguments = [
            "--text",
            str(text),
            *words(SMALL | SHORT),
            "--out",
            str(tmp_path / "out"),
            *more,
        ]
        status = tiny_lm.main(arguments)
        return (status, *capsys.readouterr())

    return call


@pytest.fixture
def training_only(tiny_lm, monkeypatch):
    """Without samples and figures, for tests of something else."""
    monkeypatch.setattr(tiny_lm, "SAMPLINGS", ())
    for name in ("draw_losses", "draw_attention"):
        monkeypatch.setattr(tiny_lm, name, lambda *_: None)


def test_it_writes_a_model_a_log_samples_and_figures(call, tmp_path, text):
    status, shown, complaints = call("--prompt", "to be")
    assert (status, complaints) == (0, "")
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "attention.png",
        "checkpoint.pt",
        "config.json",
        "log.jsonl",
        "losses.png",
        "model.safetensors",
        "samples.txt",
        "vocabulary.json",
    ]
    model, tokenizer = load(out), load_tokenizer(out)
    assert (model.config.n_layers, model.config.n_heads, model.config.d_model) == (1, 3, 12)
    assert set(tokenizer.characters) == set(text.read_text())
    for name in ("losses.png", "attention.png"):
        data = (out / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 8000
    samples = (out / "samples.txt").read_text().split("--- ")[1::]
    headings = (out / "samples.txt").read_text().split("---")[1::2]
    assert [heading.strip() for heading in headings] == [
        "greedy",
        "temperature 0.5",
        "temperature 0.8",
        "temperature 1.0",
        "temperature 1.3",
        "temperature 1.0, top-k 5",
        "temperature 1.0, top-p 0.9",
    ]
    assert len(samples) == 7
    texts = [part.split("---\n", 1)[1] for part in samples]
    assert all(part.startswith("to be") for part in texts)
    # The prompt, 20 characters and the line's end.
    assert len(texts[-1]) == 5 + 20 + 1
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[3]["bits_per_character"] == pytest.approx(
        lines[3]["validation_loss"] / math.log(2)
    )
    assert f"step 4: validation {lines[3]['validation_loss']:.4f} nats" in shown


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--layers", "2", "--mlp-width", "7"], {"n_layers": 2, "d_mlp": 7}),
        (["--positions", "sinusoidal", "--heads", "2"], {"positions": "sinusoidal", "n_heads": 2}),
        (["--positions", "rotary", "--dropout", "0.25"], {"positions": "rotary", "dropout": 0.25}),
        (["--model", "tiny-lm"], {"unembed_bias": True, "final_norm": False, "n_layers": 1}),
        (["--model", "d12_post_norm_qk_norm"], {"qk_norm": "head", "norm_place": "sandwich"}),
    ],
)
def test_the_experiments_are_options(call, tmp_path, options, fields, training_only):
    if "rotary" in options or "d12_post_norm_qk_norm" in options:
        options = [*options, "--heads", "2"]
    status, _, complaints = call(*options, "--weight-decay", "0.3", "--final-rate", "1")
    assert (status, complaints) == (0, "")
    config = load(tmp_path / "out").config
    assert {name: getattr(config, name) for name in fields} == fields
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert state["optimizer"]["param_groups"][0]["weight_decay"] == 0.3
    lines = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning_rate"] for line in lines] == [2e-3] * 4


def test_nanogpts_setting_at_twice_its_rate_is_the_default(tiny_lm):
    options = tiny_lm.parser().parse_args([])
    found = (options.steps, options.batch_size, options.learning_rate, options.warmup)
    assert found == (2000, 12, 2e-3, 100)
    assert (options.final_rate, options.weight_decay, options.clip) == (0.1, 0.1, 1.0)
    config = tiny_lm.nano(65)
    assert (config.n_layers, config.n_heads, config.d_model, config.n_ctx) == (4, 4, 128, 64)
    assert (config.dropout, config.positions, config.tied_unembed) == (0.0, "learned", True)
    # nanoGPT prints 0.80M for it: without biases, and without positions.
    assert Transformer(config).count_parameters() - 64 * 128 == 795_904


def test_samples_go_on_beyond_the_context(tiny_lm):
    """Each token is the most probable one after what the model was given anew, half a context."""
    torch.manual_seed(3)
    config = TransformerConfig(vocab_size=9, n_ctx=6, n_layers=1, n_heads=1, d_model=4)
    model = Transformer(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30)
        tokens, start = [2, 7], 0
        while len(tokens) < 2 + 13:
            if len(tokens) - start == 6:
                start += 3
            tokens.append(model(torch.tensor([tokens[start:]]))[0, -1].argmax().item())
    assert tiny_lm.continued(model, [2, 7], 13, Sampling(), 0) == tokens
    assert len(set(tokens)) > 2
    drawn = [tiny_lm.continued(model, [2], 30, Sampling(temperature=5.0), s) for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--context", "700"], "the text to train on of 502 tokens has no window of 700 and a next"),
        (["--context", "90"], "the text to validate on of 56 tokens has no window of 90"),
        (["--model", "d12_post_nrm"], "is named 'd12_post_nrm'; close matches: d12_post_norm"),
        (["--positions", "rotry"], "positions is one of learned, sinusoidal, rotary, none, not"),
        (["--heads", "5"], "d_model is a multiple of n_heads (5)"),
        (["--steps", "0"], "steps is at least 1, not 0"),
        (["--prompt", "Ω"], "the tokenizer has no token for 'Ω'"),
        (["--text", "/no/such/file"], "[Errno 2] No such file or directory: '/no/such/file'"),
        (["--resume"], "has no checkpoint.pt to resume from"),
        (["--learning-rate", "1e38"], "so training stops; no checkpoint has been written"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(call, options, reason, unchecked):
    status, _, complaints = call(*options)
    assert status == 1
    assert complaints.startswith("error: ")
    assert reason in complaints
    assert complaints.count("\n") == 1


def test_an_empty_text_is_refused(call, text):
    text.write_text("")
    status, _, complaints = call()
    assert status == 1
    assert complaints.count("\n") == 1


def test_another_run_is_not_written_over_and_another_config_not_resumed(call, training_only):
    assert call()[0] == 0
    status, _, complaints = call()
    assert (status, complaints.count("\n")) == (1, 1)
    assert "has the checkpoint of a run already" in complaints
    assert "--resume goes on" in complaints
    status, _, complaints = call("--resume", "--width", "15")
    assert (status, complaints.count("\n")) == (1, 1)
    assert "model.d_model is 12 there and 15 here" in complaints
    assert call("--resume")[0] == 0


def test_ctrl_c_ends_without_a_traceback_and_the_run_goes_on(call, tmp_path, training_only):
    out = tmp_path / "out"
    signals = []

    def press():
        # As a user would, in the middle of it.
        if not signals and (out / "log.jsonl").exists() and (out / "log.jsonl").stat().st_size:
            signals.append(os.kill(os.getpid(), signal.SIGINT))

    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: press())
    try:
        status, _, complaints = call()
    finally:
        hook.remove()
    path = out / "checkpoint.pt"
    assert status == 130
    assert complaints == (
        f"\nstopped after step 2 of 4; {path} is that of step 2, whole: --resume goes on from there\n"
    )
    assert len((out / "log.jsonl").read_text().splitlines()) == 2
    status, _, complaints = call("--resume")
    assert (status, complaints) == (0, "")
    assert len((out / "log.jsonl").read_text().splitlines()) == 4


def test_qk_norm_bounds_the_scores(text, tmp_path, capsys):
    qk_norm = example("qk_norm")
    sizes = words(SIZES | {"heads": 2, "width": 8, "steps": 12, "learning-rates": 0.3})
    status = qk_norm.main(["--text", str(text), "--out", str(tmp_path / "out"), *sizes])
    shown, complaints = capsys.readouterr()
    assert (status, complaints) == (0, "")
    found = json.loads((tmp_path / "out" / "qk_norm.json").read_text())
    assert list(found) == ["rate 0.3, no QK-norm", "rate 0.3, QK-norm"]
    free, normed = found.values()
    assert [m["step"] for m in free] == [m["step"] for m in normed] == list(range(13))
    # Vectors of length sqrt(4), their product divided by sqrt(4).
    assert all(m["largest_score"] <= 2 + 1e-4 for m in normed)
    assert free[-1]["largest_score"] > 2.5
    assert free[0]["entropy"] == pytest.approx(1, abs=1e-3)
    assert all(0 < m["entropy"] <= 1 for m in free + normed)
    assert (tmp_path / "out" / "qk_norm.png").read_bytes().startswith(b"\x89PNG")
    assert "QK-norm" in shown
    (tmp_path / "short.txt").write_text("to be")
    status = qk_norm.main(
        ["--text", str(tmp_path / "short.txt"), "--out", str(tmp_path / "no"), *sizes]
    )
    complaints = capsys.readouterr().err
    assert (status, complaints.count("\n")) == (1, 1)
    assert complaints.startswith("error: ")
