"""Training: what it learns and draws, what it writes, and how it goes on and stops."""

import contextlib
import copy
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from models import (
    TrainingConfig,
    Transformer,
    TransformerConfig,
    evaluate,
    generate,
    next_token_loss,
    sample_batch,
    split,
    train,
)
from models.training import files as state_module
from models.training.run import Run

ROOT = Path(__file__).parent.parent
TEXT = torch.randint(5, (97,), generator=torch.Generator().manual_seed(2))


def tiny(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, n_ctx=8, n_layers=1, n_heads=2, d_model=6)
    return Transformer(TransformerConfig(**sizes | changes))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in {**one, **other})


def config(**changes):
    return TrainingConfig(**dict(steps=7, batch_size=3, warmup=2, evaluate_every=3) | changes)


def log_of(directory):
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


# Data and loss.


def test_loss_is_the_cross_entropy_of_the_next_token(model, tokens):
    logits = model(tokens).detach()
    loss = next_token_loss(logits, tokens)
    assert loss.shape == (4, 6)
    expected = logits[2, 3].double().exp()
    expected = -math.log(expected[tokens[2, 4]] / expected.sum())
    assert loss[2, 3].item() == pytest.approx(expected, rel=1e-5)


def test_split_is_contiguous():
    first, second = split(torch.arange(20), 0.75)
    assert first.tolist() == list(range(15))
    assert second.tolist() == [15, 16, 17, 18, 19]
    with pytest.raises(ValueError, match="1.0 of 20 tokens leaves an empty part"):
        split(torch.arange(20), 1.0)


def test_samples_are_stretches_of_the_text_and_reach_its_end():
    text = torch.arange(11)
    drawn = sample_batch(text, 200, 4, torch.Generator().manual_seed(0))
    assert drawn.shape == (200, 4)
    assert (drawn.diff(dim=1) == 1).all()
    assert set(drawn[:, 0].tolist()) == set(range(8))
    with pytest.raises(ValueError, match="a text of 11 tokens has no stretch of 12"):
        sample_batch(text, 1, 12, torch.Generator())


def test_evaluation_is_the_mean_over_consecutive_windows():
    model = tiny(dropout=0.5).train()
    model.blocks[0].mlp.eval()
    text = TEXT[:27]
    found = evaluate(model, text, batch=2, characters_per_token=1.5)
    assert model.training
    assert not model.blocks[0].mlp.training
    model.eval()
    losses = []
    for start in (0, 8, 16):
        log_probs = model(text[None, start : start + 8]).log_softmax(-1)[0]
        losses += [-log_probs[i, text[start + i + 1]].item() for i in range(8)]
    nats = sum(losses) / 24
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.bits == pytest.approx(nats * 1.442695, rel=1e-5)
    assert found.bits_per_character == pytest.approx(nats * 1.442695 / 1.5, rel=1e-5)
    assert found.perplexity == pytest.approx(math.e**nats, rel=1e-5)
    assert evaluate(model, text).bits_per_character is None
    with pytest.raises(ValueError, match="of 8 tokens has no window of 8 and a next token"):
        evaluate(model, text[:8])


# The handout's sanity checks, appendix B.


def test_uniform_logits_lose_log_v_and_sample_noise():
    model = tiny(vocab_size=7, tied_unembed=False).eval()
    with torch.no_grad():
        model.unembedding.weight.zero_()
    assert evaluate(model, TEXT).nats == pytest.approx(math.log(7))
    assert evaluate(model, TEXT).perplexity == pytest.approx(7)
    rows = generate(model, [[0]] * 300, max_new_tokens=7, temperature=1.0)
    counts = torch.tensor([row[1:] for row in rows]).flatten().bincount(minlength=7)
    assert counts.sum() == 2100
    # Chi-squared with 6 degrees of freedom: above 22.5 once in a thousand seeds.
    assert ((counts - 300.0) ** 2 / 300).sum() < 22.5


@pytest.mark.parametrize(
    "pattern", [[0, 1], [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8]], ids=["ABAB", "plus 3 modulo 11"]
)
def test_a_simple_pattern_is_learned_and_sampled_perfectly(pattern):
    model = tiny(vocab_size=11, n_ctx=16, d_model=16, tied_unembed=False)
    text = torch.tensor((pattern * 200)[:400])
    result = train(
        model, text, TrainingConfig(steps=120, batch_size=6, learning_rate=2e-2, warmup=10)
    )
    assert result.losses[0] == pytest.approx(math.log(11), abs=0.1)
    assert result.losses[-1] < 0.02
    assert result.validation[120].nats < 0.02
    for start in range(len(pattern)):
        (row,) = generate(
            model.eval(), [[pattern[start]]], max_new_tokens=15, temperature=1.0, seed=start
        )
        assert row == [pattern[(start + i) % len(pattern)] for i in range(16)]


# The update.


def test_one_step_is_adamws():
    model, text = tiny(), torch.arange(10).remainder(5)[None]
    before = weights(model)
    next_token_loss(model(text[:, :8]), text[:, :8]).mean().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm > 1.1 * 0.3
    gradients = {n: p.grad * 0.3 / norm for n, p in model.named_parameters()}
    settings = TrainingConfig(steps=1, learning_rate=0.1, warmup=4, weight_decay=0.5, clip=0.3)
    train(model, lambda step, generator: text[:, :8], settings)
    rate = 0.1 / 4
    for name, parameter in model.named_parameters():
        decay = 0.5 if parameter.ndim > 1 else 0.0
        # In the first step both moments are the gradient's own, once their bias is corrected.
        step = gradients[name] / (gradients[name].abs() + 1e-8)
        expected = before[name] * (1 - rate * decay) - rate * step
        torch.testing.assert_close(parameter, expected, atol=1e-4, rtol=1e-3)


def test_several_steps_are_a_loop_of_torchs_adamw():
    """Moments, decay and clipping over steps, against the textbook loop without fusing."""
    settings = config(learning_rate=0.05, clip=0.4, betas=(0.8, 0.95), weight_decay=0.3)
    # In float32 Adam would blow up the rounding of gradients that are zero, those of key biases.
    model, twin = tiny().double(), tiny().double()
    result = train(model, TEXT, settings, validation=TEXT[:20])
    many, few = [], []
    for p in twin.parameters():
        (many if p.ndim > 1 else few).append(p)
    optimizer = torch.optim.AdamW(
        [{"params": many, "weight_decay": 0.3}, {"params": few, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        fused=False,
        foreach=False,
    )
    generator = torch.Generator().manual_seed(settings.seed)
    losses = []
    for rate in (0.5, 1.0, 1.0, *(0.55 + 0.45 * math.cos(math.pi * i / 5) for i in range(1, 5))):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * rate
        rows = sample_batch(TEXT, 3, 9, generator)
        loss = torch.nn.functional.cross_entropy(twin(rows[:, :8]).transpose(1, 2), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
        for p in twin.parameters():
            p.grad *= min(1.0, 0.4 / norm)
        optimizer.step()
        losses.append(loss.item())
    assert result.losses == pytest.approx(losses, rel=1e-7)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(twin)[name], atol=1e-6, rtol=1e-5)


def test_the_rate_warms_up_and_falls():
    settings = TrainingConfig(steps=100, learning_rate=2.0, warmup=10)
    assert [settings.rate(step) for step in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert settings.rate(10) == pytest.approx(2.0)
    assert settings.rate(55) == pytest.approx(1.1)
    assert settings.rate(100) == pytest.approx(0.2)
    constant = TrainingConfig(steps=100, learning_rate=2.0, warmup=0, final_rate=1.0)
    assert {constant.rate(step) for step in range(100)} == {2.0}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("steps", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("evaluate_every", 0, "at least 1"),
        ("learning_rate", 0.0, "above 0"),
        ("final_rate", 1.1, "0 to 1"),
        ("warmup", -1, "at least 0"),
        ("betas", (0.9, 1.0), "two of at least 0 and below 1"),
        ("weight_decay", -0.1, "at least 0"),
        ("clip", -1.0, "at least 0"),
        ("clip", math.inf, "a finite float"),
        ("steps", 2.5, "an int"),
        ("warmup", True, "an int"),
        ("betas", (0.9,), "a tuple of 2 floats"),
        ("betas", [0.9, 0.99], "a tuple of 2 floats"),
        ("train_fraction", 1.0, "above 0 and below 1"),
        ("characters_per_token", -1.0, "at least 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_setting_outside_its_range_is_named(field, value, rule):
    message = re.escape(f"{field} is {rule}, not {value}")
    with pytest.raises(ValueError, match=f"^{message}$"):
        config(**{field: value})


# The run.


def test_training_is_decided_by_its_seed_alone_and_leaves_torchs_own_generator():
    def run(seed):
        model = tiny(dropout=0.3)
        torch.manual_seed(len(drawn))
        result = train(model, TEXT, config(seed=seed))
        drawn.append(torch.rand(3).tolist())
        return result.losses, weights(model)

    drawn = []
    (losses, one), (again, two), (others, _) = run(0), run(0), run(1)
    assert losses == again
    assert same(one, two)
    assert losses != others
    for seed, numbers in enumerate(drawn):
        assert numbers == torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()


def test_it_runs_under_deterministic_algorithms():
    def run():
        model = tiny(dropout=0.3)
        train(model, TEXT, config())
        return weights(model)

    torch.use_deterministic_algorithms(True)
    try:
        assert same(run(), run())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_text_is_split_and_sampled_from_its_first_part_alone():
    """The held-out part is another text altogether, so that a leak would be learned."""
    text = torch.cat([torch.tensor([0, 1] * 90), torch.tensor([2, 3] * 10)])
    model = tiny(tied_unembed=False)
    settings = config(steps=60, learning_rate=2e-2, evaluate_every=25)
    result = train(model, text, settings)
    assert list(result.validation) == [25, 50, 60]
    assert result.validation[60].nats == pytest.approx(evaluate(model, text[180:]).nats)
    assert result.validation[60].nats > math.log(5) > 0.1 > result.losses[-1]
    assert len(result.losses) == 60


def test_a_callable_gets_the_step_and_the_generator():
    seen = []

    def batches(step, generator):
        seen.append((step, torch.rand(1, generator=generator).item()))
        return sample_batch(TEXT, 2, 6, generator)

    calls = []
    result = train(
        tiny(), batches, config(), after_step=lambda step, loss: calls.append((step, loss))
    )
    assert [step for step, _ in seen] == list(range(7))
    assert seen[0][1] == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert calls == list(enumerate(result.losses, 1))
    assert not result.validation


def test_modes_are_restored_and_frozen_weights_stay():
    model = tiny(dropout=0.2).eval()
    model.blocks[0].attn.train()
    model.blocks[0].mlp.input.weight.requires_grad_(False)
    before = weights(model)
    train(model, TEXT, config())
    assert not model.training
    assert model.blocks[0].attn.training
    changed = {
        name for name, value in weights(model).items() if not torch.equal(value, before[name])
    }
    assert before.keys() - changed == {"blocks.0.mlp.input.weight"}


def test_the_log_has_a_line_a_step(tmp_path):
    settings = config(characters_per_token=2.0)
    result = train(tiny(), TEXT, settings, directory=tmp_path / "new" / "run")
    lines = log_of(tmp_path / "new" / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["loss"] for line in lines] == list(result.losses)
    assert [line["learning_rate"] for line in lines][:2] == pytest.approx([5e-4, 1e-3])
    assert all(line["gradient_norm"] > 0 for line in lines)
    measured = {line["step"]: line for line in lines if "validation_loss" in line}
    assert list(measured) == list(result.validation) == [3, 6, 7]
    for step, line in measured.items():
        nats = result.validation[step].nats
        assert line["validation_loss"] == nats
        assert line["bits_per_token"] == pytest.approx(nats / 0.693147, rel=1e-5)
        assert line["bits_per_character"] == pytest.approx(nats / 0.693147 / 2, rel=1e-5)
        assert line["perplexity"] == pytest.approx(math.e**nats)


def test_the_bar_shows_loss_and_tokens_per_second(monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    result = train(tiny(), TEXT, config())
    shown = screen.getvalue()
    assert f"loss {result.losses[-1]:.3f}, " in shown
    assert "tokens/s" in shown
    assert "7/7" in shown


def test_tokens_per_second_are_those_learned_from(monkeypatch):
    shown = []

    class Bar(contextlib.nullcontext):
        disable, format_dict = False, {"rate": 10.0}  # steps a second

        def update(self):
            pass

        def set_postfix_str(self, text, refresh):
            shown.append(text)

    monkeypatch.setattr("models.training.loop.tqdm", lambda **options: Bar())
    monkeypatch.setattr(Bar, "__enter__", lambda self: self)
    losses = train(tiny(), TEXT, config()).losses
    # 3 rows of 8 predictions.
    assert shown == [f"loss {loss:.3f}, 240 tokens/s" for loss in losses]


def test_without_a_terminal_there_is_no_bar(capsys):
    train(tiny(), TEXT, config())
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("unchecked")
def test_any_integers_hold_the_same_text():
    expected = train(tiny(), TEXT, config())
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert train(tiny(), TEXT.to(dtype), config()) == expected
        assert evaluate(tiny(), TEXT.to(dtype)) == evaluate(tiny(), TEXT)


def test_no_gradients_are_left():
    model = tiny()
    train(model, TEXT, config())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(3, 9), r"integers \[batch, pos\], .* not torch.float32 of shape \(3, 9\)"),
        (torch.zeros(9).long(), r"integers \[batch, pos\], .* of shape \(9,\)"),
        (torch.zeros(3, 1).long(), r"two positions, not torch.int64 of shape \(3, 1\)"),
        (torch.zeros(0, 9).long(), r"at least one row .* of shape \(0, 9\)"),
        # Cross-entropy would leave this target out.
        (torch.tensor([[1, 2, -100]]), "has tokens from -100 to 2; the model's are 0 to 4"),
        (torch.tensor([[1, 2, 5]]), "has tokens from 1 to 5; the model's are 0 to 4"),
    ],
)
def test_a_batch_without_targets_is_refused(batch, message):
    good = torch.zeros(2, 5).long()
    with pytest.raises(ValueError, match="^the batch of step 2 .*" + message):
        train(tiny(), lambda step, generator: batch if step else good, config())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.double(), r"one row of integers, not torch.float64 of shape \(97,\)"),
        (TEXT.bool(), "one row of integers, not torch.bool"),
        (TEXT[None], r"one row of integers, not torch.int64 of shape \(1, 97\)"),
        (TEXT[:8], "of 8 tokens has no window of 8 and a next token: it needs at least 9"),
        (TEXT + 1, "has tokens from 1 to 5; the model's are 0 to 4"),
    ],
)
def test_a_text_that_cannot_be_measured_is_refused(text, message):
    with pytest.raises(ValueError, match="^the text .*" + message):
        evaluate(tiny(), text)
    with pytest.raises(ValueError, match="^the text to train on .*" + message):
        train(tiny(), text, config(), validation=TEXT)


def test_a_batch_of_no_windows_is_refused():
    with pytest.raises(ValueError, match="batch is a whole number of at least 1, not 0"):
        evaluate(tiny(), TEXT, batch=0)


# Checkpoints.


class Crash(Exception):
    pass


def crash_at(last):
    def after_step(step, loss):
        if step == last:
            raise Crash

    return after_step


def interrupt_at(last):
    def after_step(step, loss):
        if step == last:
            os.kill(os.getpid(), signal.SIGINT)

    return after_step


@pytest.mark.parametrize(
    ("stop", "error", "saved"),
    [(crash_at(5), Crash, 3), (interrupt_at(4), KeyboardInterrupt, 4)],
    ids=["crash", "Ctrl-C"],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, stop, error, saved):
    model = tiny(dropout=0.4)
    straight = train(model, TEXT, config(), directory=tmp_path / "straight")
    broken = tiny(dropout=0.4)
    with pytest.raises(error):
        train(broken, TEXT, config(), directory=tmp_path / "broken", after_step=stop)
    assert torch.load(tmp_path / "broken" / "checkpoint.pt", weights_only=True)["step"] == saved
    resumed = tiny(dropout=0.4)
    with torch.no_grad():
        for p in resumed.parameters():
            p.add_(1)
    torch.manual_seed(99)
    steps = []
    result = train(
        resumed,
        TEXT,
        config(),
        directory=tmp_path / "broken",
        resume=True,
        after_step=lambda step, loss: steps.append(step),
    )
    assert steps == list(range(saved + 1, 8))
    assert same(weights(model), weights(resumed))
    assert result == straight
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("straight", "broken")]
    assert logs[0] == logs[1]
    assert sorted(path.name for path in (tmp_path / "broken").iterdir()) == [
        "checkpoint.pt",
        "log.jsonl",
    ]


def test_dropout_matters_to_the_test_above():
    """Else a resumed run that forgot the generator of dropout would pass."""
    plain, dropped = tiny(), tiny(dropout=0.4)
    one, two = (train(model, TEXT, config()) for model in (plain, dropped))
    assert one.losses[0] != two.losses[0]


def test_a_finished_run_resumes_to_its_result(tmp_path):
    result = train(tiny(), TEXT, config(), directory=tmp_path)
    assert train(tiny(), TEXT, config(), directory=tmp_path, resume=True) == result


def test_ctrl_c_says_what_was_saved_and_the_handler_is_restored(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tiny(), TEXT, config(), directory=tmp_path, after_step=interrupt_at(2))
    path = tmp_path / "checkpoint.pt"
    assert str(caught.value) == (
        f"stopped after step 2 of 7; {path} is that of step 2, whole: resume=True goes on from there"
    )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_last_checkpoint_is_written_is_heard(tmp_path, monkeypatch):
    save = Run.save

    def pressed(run):
        save(run)
        if len(run.records) == 7:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, "save", pressed)
    with pytest.raises(
        KeyboardInterrupt, match="^stopped after step 7 of 7; .* whole: resume=True"
    ):
        train(tiny(), TEXT, config(), directory=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype):
    """8192 losses of about ln 5000 sum to more than float16 holds."""
    model = tiny(vocab_size=5000, n_ctx=512).to(dtype)
    text = torch.randint(5000, (16 * 512 + 1,), generator=torch.Generator().manual_seed(3))
    expected = evaluate(copy.deepcopy(model).double(), text).nats
    assert evaluate(model, text).nats == pytest.approx(expected, abs=1e-3)
    assert round(evaluate(model, text).nats, 3) != round(evaluate(model, text).nats, 1)


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def twice(step, loss):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt, match="^stopped within a step; no checkpoint"):
        train(tiny(), TEXT, config(), directory=tmp_path, after_step=twice)
    assert not (tmp_path / "checkpoint.pt").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_somebody_else_is_left_alone():
    calls, inside = [], []

    def handler(number, frame):
        calls.append(number)

    signal.signal(signal.SIGINT, handler)
    try:
        train(
            tiny(),
            TEXT,
            config(),
            after_step=lambda step, loss: inside.append(signal.getsignal(signal.SIGINT)),
        )
        assert inside == [handler] * 7
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_it_runs_in_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny(), TEXT, config())))
    thread.start()
    thread.join()
    assert results == [train(tiny(), TEXT, config())]


KILLED = """
import os, torch
from models import TrainingConfig, Transformer, TransformerConfig, train

config = TransformerConfig(vocab_size=5, n_ctx=8, n_layers=1, n_heads=2, d_model=6)
torch.manual_seed(0)
syncs, fsync = [], os.fsync

def killed(descriptor):
    syncs.append(descriptor)
    if len(syncs) == 3:  # each save syncs the file and the directory
        os.ftruncate(descriptor, 1000)
        os._exit(9)
    fsync(descriptor)

os.fsync = killed
text = torch.randint(5, (97,), generator=torch.Generator().manual_seed(2))
settings = TrainingConfig(steps=7, batch_size=3, warmup=2, evaluate_every=3)
train(Transformer(config), text, settings, directory="run")
"""


def test_killed_while_writing_a_checkpoint_the_one_before_is_whole(tmp_path):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment)
    assert done.returncode == 9
    run = tmp_path / "run"
    assert torch.load(run / "checkpoint.pt", weights_only=True)["step"] == 3
    assert len((run / "log.jsonl").read_text().splitlines()) == 6
    straight, resumed = tiny(), tiny()
    train(straight, TEXT, config())
    train(resumed, TEXT, config(), directory=run, resume=True)
    assert same(weights(straight), weights(resumed))
    assert sorted(file.name for file in run.iterdir()) == ["checkpoint.pt", "log.jsonl"]


def test_a_new_checkpoint_takes_the_old_ones_name_and_never_writes_into_it(saved):
    """So there is no moment at which the file of that name is half of one and half of the other."""
    before = (saved / "checkpoint.pt").read_bytes()
    kept = saved.parent / f"{saved.name}-kept.pt"
    os.link(saved / "checkpoint.pt", kept)
    train(tiny(), TEXT, config(), directory=saved, resume=True)
    assert kept.read_bytes() == before != (saved / "checkpoint.pt").read_bytes()


class Limit:
    """Files may not grow beyond a size: a write fails in the system, as on a full disk."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *exception):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


# The writer of torch fails in another way when even its last part does not fit.
@pytest.mark.parametrize("size", [0.01, 0.5, 0.999])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, size):
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), TEXT, config(), directory=tmp_path, after_step=interrupt_at(2))
    path = tmp_path / "checkpoint.pt"
    before = path.read_bytes()
    limit = max(1000, int(size * len(before)))
    with pytest.raises(OSError, match="File too large") as caught, Limit(limit):
        train(tiny(), TEXT, config(), directory=tmp_path, resume=True)
    assert str(caught.value) == (
        f"the checkpoint of step 3 cannot be written to {tmp_path}: File too large; "
        f"{path} is that of step 2, whole"
    )
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint.pt", "log.jsonl"]
    resumed, straight = tiny(), tiny()
    assert train(resumed, TEXT, config(), directory=tmp_path, resume=True) == train(
        straight, TEXT, config()
    )


def test_a_full_disk_while_logging_is_said(tmp_path):
    with pytest.raises(OSError, match="File too large") as caught, Limit(250):
        train(tiny(), TEXT, config(evaluate_every=7), directory=tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'log.jsonl'} cannot be written at step 3: File too large; "
        "no checkpoint has been written"
    )


def test_a_full_disk_on_resuming_leaves_the_log(saved):
    before = (saved / "log.jsonl").read_bytes()
    with pytest.raises(OSError, match="File too large") as caught, Limit(100):
        train(tiny(), TEXT, config(), directory=saved, resume=True)
    assert str(caught.value) == (
        f"{saved / 'log.jsonl'} cannot be written: File too large; "
        f"{saved / 'checkpoint.pt'} is that of step 3, whole"
    )
    assert (saved / "log.jsonl").read_bytes() == before
    assert sorted(file.name for file in saved.iterdir()) == ["checkpoint.pt", "log.jsonl"]


def poisoned(at):
    """Batches whose step `at`, counted from 1, meets a weight that is NaN."""

    def after_step(model):
        def poison(step, loss):
            if step == at - 1:
                with torch.no_grad():
                    model.blocks[0].mlp.input.weight[0, 0] = math.nan

        return poison

    return after_step


def test_a_loss_of_nan_stops_with_the_step(tmp_path):
    model = tiny()
    with pytest.raises(FloatingPointError) as caught:
        train(model, TEXT, config(), directory=tmp_path, after_step=poisoned(5)(model))
    path = tmp_path / "checkpoint.pt"
    assert str(caught.value) == (
        f"the loss is nan at step 5, so training stops; {path} is that of step 3, whole"
    )
    state = torch.load(path, weights_only=True)
    assert state["step"] == 3
    assert all(value.isfinite().all() for value in state["model"].values())
    assert [line["step"] for line in log_of(tmp_path)] == [1, 2, 3, 4]


def test_weights_of_nan_are_not_saved(tmp_path):
    """Step 6 ends well, and something spoils the weights before they would be saved."""
    model = tiny()
    with pytest.raises(FloatingPointError, match="sum of the weights is nan at step 6.*of step 3,"):
        train(model, TEXT, config(), directory=tmp_path, after_step=poisoned(7)(model))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3


def test_a_run_that_diverges_stops_before_it_saves(tmp_path):
    model = tiny(norm="none", final_norm=False)
    with pytest.raises(
        FloatingPointError, match="so training stops; no checkpoint has been written"
    ):
        train(model, TEXT, config(learning_rate=1e30, evaluate_every=1), directory=tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_gradient_that_is_not_finite_leaves_the_weights():
    model = tiny()
    model.blocks[0].mlp.post.register_forward_hook(
        lambda point, inputs, value: value * 1 + (value.register_hook(lambda g: g / 0), 0)[1]
    )
    before = weights(model)
    with pytest.raises(FloatingPointError, match="norm of the gradient is (nan|inf) at step 1,"):
        train(model, TEXT, config())
    assert same(weights(model), before)


# Refusals.


@pytest.mark.parametrize(
    ("length", "changes", "message"),
    [
        (97, dict(train_fraction=0.07), "the text to train on of 6 tokens has no window of 8"),
        (97, dict(train_fraction=0.95), "the text to validate on of 5 tokens has no window of 8"),
        (8, {}, "the text to train on of 7 tokens has no window of 8 and a next token"),
        (1, {}, "0.9 of 1 tokens leaves an empty part"),
        (0, {}, "0.9 of 0 tokens leaves an empty part"),
    ],
)
def test_a_text_too_short_is_refused(tmp_path, length, changes, message):
    with pytest.raises(ValueError, match=message):
        train(tiny(), TEXT[:length], config(**changes), directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_text_of_another_vocabulary_is_refused(unchecked):
    with pytest.raises(ValueError, match="train on has tokens from 0 to 4; the model's are 0 to 3"):
        train(tiny(vocab_size=4), TEXT, config())
    with pytest.raises(ValueError, match="validate on has tokens from -1 to 3; .* are 0 to 4"):
        train(tiny(), TEXT, config(), validation=TEXT - 1)
    with pytest.raises(
        ValueError, match=r"one row of integers, not torch.int64 of shape \(87, 1\)"
    ):
        train(tiny(), TEXT[:, None], config())
    with pytest.raises(ValueError, match="one row of integers, not torch.float32"):
        train(tiny(), TEXT.float(), config())


@pytest.fixture
def saved(tmp_path):
    """A directory with a run that was stopped at its third step."""
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), TEXT, config(), directory=tmp_path, after_step=interrupt_at(3))
    return tmp_path


def test_a_checkpoint_is_not_written_over_by_another_run(saved):
    before = (saved / "checkpoint.pt").read_bytes(), (saved / "log.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match="has the checkpoint of a run already: resume it, or"):
        train(tiny(), TEXT, config(), directory=saved)
    assert before == ((saved / "checkpoint.pt").read_bytes(), (saved / "log.jsonl").read_bytes())


@pytest.mark.parametrize(
    ("model", "settings", "text", "message"),
    [
        (dict(d_mlp=9), {}, TEXT, "model.d_mlp is 24 there and 9 here"),
        ({}, dict(steps=8), TEXT, "training.steps is 7 there and 8 here"),
        (dict(dropout=0.1), dict(seed=1), TEXT, "model.dropout is 0.0 there and 0.1 here; training.seed is 0 there and 1 here"),
        ({}, {}, TEXT.flip(0), "text is '.*' there and '.*' here"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(saved, model, settings, text, message):
    before = (saved / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=f"is of another run .* by this one: {message}$"):
        train(tiny(**model), text, config(**settings), directory=saved, resume=True)
    assert (saved / "checkpoint.pt").read_bytes() == before


def test_weights_of_another_type_or_frozen_are_another_run(saved):
    frozen = tiny()
    frozen.token_embedding.weight.requires_grad_(False)
    others = {
        "dtype is 'torch.float32' there and 'torch.float64' here": tiny().double(),
        r"frozen is \[\] there and \['token_embedding.weight'\] here": frozen,
    }
    for message, model in others.items():
        with pytest.raises(ValueError, match=f"by this one: {message}$"):
            train(model, TEXT, config(), directory=saved, resume=True)


def test_a_checkpoint_of_another_version_is_refused(saved, monkeypatch):
    monkeypatch.setattr(state_module, "CODE_VERSION", 1000)
    with pytest.raises(ValueError, match="one: code.version is [0-9]+ there and 1000 here$"):
        train(tiny(), TEXT, config(), directory=saved, resume=True)


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "other"])
def test_a_damaged_checkpoint_is_refused(saved, damage):
    path = saved / "checkpoint.pt"
    if damage == "other":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:-900], "empty": b"", "foreign": b"PK\x03\x04no"}[damage])
    with pytest.raises(ValueError, match="checkpoint.pt is not a whole checkpoint: ") as caught:
        train(tiny(), TEXT, config(), directory=saved, resume=True)
    assert "\n" not in str(caught.value)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint.pt to resume from"):
        train(tiny(), TEXT, config(), directory=tmp_path, resume=True)
    with pytest.raises(ValueError, match="to resume, give the directory of the run"):
        train(tiny(), TEXT, config(), resume=True)
