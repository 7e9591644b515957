"""Training: the result, the random draws, the files, and how a run stops and continues."""

import copy
import errno
import inspect
import io
import json
import math
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from models import TrainingConfig, evaluate, generate, next_token_loss, sample_batch, train
from models.training import run as run_module
from tests.count import ROOT
from tests.models.training.tiny import TEXT, config, tiny


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in {**one, **other})


def log_of(directory):
    return [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]


def checkpoint_of(directory):
    return torch.load(directory / "checkpoint.pt", weights_only=True)


# Data and loss.


def test_loss_is_the_cross_entropy_of_the_next_token(model, tokens):
    logits = model(tokens).detach()
    loss = next_token_loss(logits, tokens)
    assert loss.shape == (4, 6)
    expected = logits[2, 3].double().exp()
    expected = -math.log(expected[tokens[2, 4]] / expected.sum())
    assert loss[2, 3].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("walks", [0, torch.tensor([[0], [20], [40], [60]])], ids=["text", "walks"])
def test_samples_are_stretches_of_the_text_and_reach_its_end(walks):
    """If the text is a table of walks, no sample contains parts of two walks."""
    text = torch.arange(11) + walks
    drawn = sample_batch(text, 400, 4, torch.Generator().manual_seed(0))
    assert drawn.shape == (400, 4)
    assert (drawn.diff(dim=1) == 1).all()
    assert set(drawn[:, 0].tolist()) == set(text[..., :8].flatten().tolist())
    with pytest.raises(ValueError, match="11"):
        sample_batch(text, 1, 12, torch.Generator())


def test_walks_are_split_and_measured_as_wholes():
    walks = torch.tensor([[0, 1] * 10, [1, 0] * 10, [2, 3] * 10])
    model = tiny(tied_unembed=False)
    settings = config(train_fraction=0.7, learning_rate=2e-2, steps=40)
    result = train(model, walks, settings)
    assert result == train(tiny(tied_unembed=False), walks[:2], settings, validation=walks[2])
    assert result.validation[40] == evaluate(model, walks[2], batch=3)
    assert result.validation[40].nats > math.log(5) > 0.1 > result.losses[-1]
    each = [evaluate(model, walk).nats for walk in walks]
    assert evaluate(model, walks).nats == pytest.approx(sum(each) / 3, rel=1e-6)


def test_another_loss_is_minimised_and_measured():
    """The loss of this test predicts from the last token if the target is even or odd."""

    def loss(model, rows):
        return torch.nn.functional.cross_entropy(
            model(rows[:, :-1])[:, -1, :2], rows[:, -1] % 2, reduction="none"
        )

    walks = torch.tensor([[2, 3, 2, 0], [3, 2, 4, 1], [4, 2, 4, 0], [2, 4, 3, 1]] * 3)
    model, settings = tiny(n_ctx=3, tied_unembed=False), config(steps=60, learning_rate=3e-2)
    result = train(model, lambda step, draw: walks, settings, validation=walks, loss=loss)
    assert result.losses[0] == pytest.approx(
        float(loss(tiny(n_ctx=3, tied_unembed=False), walks).mean().detach())
    )
    assert result.losses[-1] < 0.1
    assert result.validation[60].nats == pytest.approx(
        float(loss(model, walks).mean().detach()), rel=1e-5
    )


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
    means = [sum(losses[at : at + 8]) / 8 for at in (0, 8, 16)]
    assert found.standard_error == pytest.approx(statistics.stdev(means) / 3**0.5, rel=1e-4)
    assert evaluate(model, text[:9]).standard_error is None
    assert found.bits == pytest.approx(nats * 1.442695, rel=1e-5)
    assert found.bits_per_character == pytest.approx(nats * 1.442695 / 1.5, rel=1e-5)
    assert found.perplexity == pytest.approx(math.e**nats, rel=1e-5)
    assert evaluate(model, text).bits_per_character is None


def test_half_precision_is_measured_in_float32():
    """The result is a mean of 2048 losses of about 7.6. In float16, their sum would be rounded or
    overflow.
    """
    model = tiny(vocab_size=2000, n_ctx=128).to(torch.float16)
    text = torch.randint(2000, (16 * 128 + 1,), generator=torch.Generator().manual_seed(3))
    expected = evaluate(copy.deepcopy(model).double(), text).nats
    assert evaluate(model, text).nats == pytest.approx(expected, abs=1e-5)


def test_a_simple_pattern_is_learned_and_sampled_perfectly():
    """The text counts in steps of 3 modulo 11: another check from appendix B."""
    pattern = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8]
    model = tiny(vocab_size=11, n_ctx=16, d_model=16, tied_unembed=False)
    text = torch.tensor((pattern * 40)[:400])
    settings = TrainingConfig(steps=400, batch_size=6, learning_rate=2e-2, warmup=10)
    result = train(model, text, settings)
    assert result.losses[0] == pytest.approx(math.log(11), abs=0.1)
    assert result.losses[-1] < 0.02
    assert result.validation[400].nats < 0.02
    rows = generate(model.eval(), [[n] for n in pattern], max_new_tokens=15, temperature=1.0)
    for start, row in enumerate(rows):
        assert row == [pattern[(start + i) % 11] for i in range(16)]


# The update.


def test_several_steps_are_a_loop_of_torchs_adamw():
    """Learning rate, moments, decay, clipping and samples equal a simple loop with AdamW of
    PyTorch.
    """
    settings = config(learning_rate=0.05, clip=0.4, betas=(0.8, 0.95), weight_decay=0.3)
    # Use float64. The gradients of key biases are zero up to rounding, and in float32 Adam would
    # turn this rounding into large steps.
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
    losses, clipped = [], 0
    for rate in (0.5, 1.0, 1.0, *(0.55 + 0.45 * math.cos(math.pi * i / 5) for i in range(1, 5))):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * rate
        rows = sample_batch(TEXT, 3, 9, generator)
        loss = torch.nn.functional.cross_entropy(twin(rows[:, :8]).transpose(1, 2), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
        clipped += norm > 0.4
        for p in twin.parameters():
            p.grad *= min(1.0, 0.4 / norm)
        optimizer.step()
        losses.append(loss.item())
    assert clipped
    assert result.losses == pytest.approx(losses, rel=1e-7)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(twin)[name], atol=1e-6, rtol=1e-5)


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


def test_a_text_is_split_and_sampled_from_its_first_part_alone():
    """The held-out part is a different text.

    If the model saw it, its validation loss would fall.
    """
    text = torch.cat([torch.tensor([0, 1] * 90), torch.tensor([2, 3] * 10)])
    model = tiny(tied_unembed=False)
    settings = config(steps=60, learning_rate=2e-2, evaluate_every=25)
    result = train(model, text, settings)
    assert list(result.validation) == [25, 50, 60]
    assert result.validation[60].nats == pytest.approx(evaluate(model, text[180:]).nats)
    assert result.validation[60].nats > math.log(5) > 0.1 > result.losses[-1]
    assert len(result.losses) == 60


def test_modes_are_restored_frozen_weights_stay_and_no_gradients_are_left():
    model = tiny(dropout=0.2).eval()
    model.blocks[0].attn.train()
    model.blocks[0].mlp.input.weight.requires_grad_(False)
    before = weights(model)
    train(model, TEXT, config())
    assert not model.training
    assert model.blocks[0].attn.training
    after = weights(model)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert before.keys() - changed == {"blocks.0.mlp.input.weight"}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_bar_shows_loss_and_tokens_per_second_on_a_terminal_alone(monkeypatch, capsys):
    train(tiny(), TEXT, config())
    assert capsys.readouterr() == ("", "")
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    result = train(tiny(), TEXT, config())
    assert f"loss {result.losses[-1]:.3f}, " in screen.getvalue()
    assert "tok/s" in screen.getvalue()
    assert "7/7" in screen.getvalue()


@pytest.mark.usefixtures("unchecked")
def test_any_integers_hold_the_same_text(tmp_path):
    expected = train(tiny(), TEXT, config(), directory=tmp_path)
    assert train(tiny(), TEXT.byte(), config()) == expected
    assert train(tiny(), TEXT.int(), config(), directory=tmp_path, resume=True) == expected
    assert train(tiny(), TEXT.tolist(), config()) == expected
    held_out = TEXT.tolist()[87:]
    assert train(tiny(), TEXT[:87], config(), validation=held_out) == expected
    for text in (TEXT.byte(), TEXT.tolist()):
        assert evaluate(tiny(), text) == evaluate(tiny(), TEXT)


# Checkpoints.


class Crash(Exception):
    pass


def stop_at(last, stop):
    def after_step(model, step, loss):
        if step == last:
            stop()

    return after_step


def crash():
    raise Crash


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("stop", "error", "saved"),
    [(stop_at(5, crash), Crash, 3), (stop_at(4, ctrl_c), KeyboardInterrupt, 4)],
    ids=["crash", "Ctrl-C"],
)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, stop, error, saved):
    model = tiny(dropout=0.4)
    straight = train(model, TEXT, config(), directory=tmp_path / "straight")
    # Dropout changes the losses. Otherwise a resumed run that draws other dropout would pass.
    assert straight.losses[0] != train(tiny(), TEXT, config()).losses[0]
    broken = tiny(dropout=0.4)
    with pytest.raises(error):
        train(broken, TEXT, config(), directory=tmp_path / "broken", after_step=stop)
    assert len(checkpoint_of(tmp_path / "broken")["records"]) == saved
    resumed, steps = tiny(dropout=0.4), []
    with torch.no_grad():
        for p in resumed.parameters():
            p.add_(1)
    torch.manual_seed(99)
    options = dict(directory=tmp_path / "broken", resume=True)
    result = train(
        resumed, TEXT, config(), **options, after_step=lambda model, step, _: steps.append(step)
    )
    assert steps == list(range(saved + 1, 8))
    assert same(weights(model), weights(resumed))
    assert result == straight == train(tiny(dropout=0.4), TEXT, config(), **options)
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("straight", "broken")]
    assert logs[0] == logs[1]
    files = sorted(path.name for path in (tmp_path / "broken").iterdir())
    assert files == ["checkpoint.pt", "log.jsonl"]


def test_ctrl_c_while_the_last_checkpoint_is_written_is_heard(tmp_path, monkeypatch):
    save = torch.save

    def pressed(state, file):
        save(state, file)
        if len(state["records"]) == 7:
            ctrl_c()

    monkeypatch.setattr(torch, "save", pressed)
    with pytest.raises(KeyboardInterrupt, match="step 7 of 7; .* holds step 7"):
        train(tiny(), TEXT, config(), directory=tmp_path)


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    def twice(model, step, loss):
        ctrl_c()
        ctrl_c()
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt, match="no checkpoint"):
        train(tiny(), TEXT, config(), directory=tmp_path, after_step=twice)
    assert not (tmp_path / "checkpoint.pt").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_somebody_else_is_left_alone():
    inside, handler = [], lambda number, frame: None
    before = signal.signal(signal.SIGINT, handler)
    try:
        look = stop_at(4, lambda: inside.append(signal.getsignal(signal.SIGINT)))
        train(tiny(), TEXT, config(), after_step=look)
        assert [*inside, signal.getsignal(signal.SIGINT)] == [handler, handler]
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_runs_in_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny(), TEXT, config())))
    thread.start()
    thread.join()
    assert results == [train(tiny(), TEXT, config())]


KILLED = """
import os
from models import train
from tests.models.training.tiny import TEXT, config, tiny

syncs, fsync = [], os.fsync

def killed(descriptor):
    syncs.append(descriptor)
    # The first two calls are for the log and for the first checkpoint.
    if len(syncs) == 3:
        os.ftruncate(descriptor, 1000)
        os._exit(9)
    fsync(descriptor)

os.fsync = killed
train(tiny(), TEXT, config(), directory="run")
"""


def test_killed_while_writing_a_checkpoint_the_one_before_is_whole(tmp_path):
    run_in = dict(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    done = subprocess.run([sys.executable, "-c", KILLED], **run_in)
    assert done.returncode == 9
    run = tmp_path / "run"
    assert len(checkpoint_of(run)["records"]) == 3
    assert len(log_of(run)) == 6
    straight, resumed = tiny(), tiny()
    train(straight, TEXT, config())
    train(resumed, TEXT, config(), directory=run, resume=True)
    assert same(weights(straight), weights(resumed))
    assert sorted(file.name for file in run.iterdir()) == ["checkpoint.pt", "log.jsonl"]


@pytest.fixture
def saved(tmp_path):
    """A directory with a run that was stopped at its second step."""
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tiny(), TEXT, config(), directory=tmp_path, after_step=stop_at(2, ctrl_c))
    for part in ("step 2 of 7", f"{tmp_path / 'checkpoint.pt'} holds step 2", "resume=True"):
        assert part in str(caught.value)
    return tmp_path


@contextmanager
def limit(size):
    """Limit the size of files in a `with`. A larger write fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# `share` is the size limit as a share of the checkpoint. With 0, the log fails, because it is
# written first. With 0.999, only the end of the checkpoint does not fit.
@pytest.mark.parametrize(
    ("share", "name"), [(0, "log.jsonl"), (0.5, "checkpoint.pt"), (0.999, "checkpoint.pt")]
)
def test_a_full_disk_leaves_the_files_before(saved, share, name):
    path = saved / "checkpoint.pt"
    before, log = path.read_bytes(), (saved / "log.jsonl").read_bytes()
    size = max(100, int(share * len(before)))
    with pytest.raises(OSError, match="File too large") as caught, limit(size):
        train(tiny(), TEXT, config(), directory=saved, resume=True)
    assert str(saved / name) in str(caught.value)
    assert f"{path} holds step 2" in str(caught.value)
    assert path.read_bytes() == before
    assert (saved / "log.jsonl").read_bytes().startswith(log)
    assert sorted(file.name for file in saved.iterdir()) == ["checkpoint.pt", "log.jsonl"]
    resumed = train(tiny(), TEXT, config(), directory=saved, resume=True)
    assert resumed == train(tiny(), TEXT, config())


def test_a_full_disk_that_torch_reports_in_its_own_way(tmp_path, monkeypatch):
    def fail(state, file):
        try:
            raise OSError(27, "File too large")
        except OSError:
            raise RuntimeError("enforce fail at inline_container.cc") from None

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match=r"checkpoint.pt .*File too large"):
        train(tiny(), TEXT, config(), directory=tmp_path)


def test_a_full_disk_while_logging_is_said(tmp_path):
    with pytest.raises(OSError, match=r"log.jsonl .*File too large.*no checkpoint"), limit(250):
        train(tiny(), TEXT, config(evaluate_every=7), directory=tmp_path)


# Losses and weights that are not finite.


@pytest.mark.parametrize(("step", "what"), [(4, "the loss.* step 5"), (6, "weights.* step 6")])
def test_nan_stops_and_is_not_saved(tmp_path, step, what):
    """A weight becomes NaN after a step. Either the next loss shows it, or the check before a
    checkpoint finds it.
    """
    model = tiny()

    @torch.no_grad()
    def spoil():
        model.blocks[0].mlp.input.weight[0, 0] = math.nan

    with pytest.raises(FloatingPointError, match=f"{what}.*checkpoint.pt holds step 3"):
        train(model, TEXT, config(), directory=tmp_path, after_step=stop_at(step, spoil))
    state = checkpoint_of(tmp_path)
    assert len(state["records"]) == 3
    assert all(value.isfinite().all() for value in state["model"].values())
    assert [line["step"] for line in log_of(tmp_path)] == list(range(1, step + 1))


def test_a_run_that_diverges_stops_before_it_saves(tmp_path):
    model = tiny(norm="none", final_norm=False)
    with pytest.raises(FloatingPointError, match="validation loss.* no checkpoint"):
        train(model, TEXT, config(learning_rate=1e30, evaluate_every=1), directory=tmp_path)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_gradient_that_is_not_finite_leaves_the_weights():
    model = tiny()
    model.blocks[0].mlp.post.register_forward_hook(
        lambda point, inputs, value: value * 1 + (value.register_hook(lambda g: g / 0), 0)[1]
    )
    before = weights(model)
    with pytest.raises(FloatingPointError, match="gradient.* (nan|inf) at step 1"):
        train(model, TEXT, config())
    assert same(weights(model), before)


# Refusals.


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("steps", 0), ("batch_size", 0), ("evaluate_every", 0), ("final_rate", 1.1)),
        *(("warmup", -1), ("clip", -1.0), ("clip", math.inf), ("steps", 2.5), ("betas", (0.9,))),
    ],
)
def test_a_setting_outside_its_range_is_named(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        config(**{field: value})
    assert str(value) in str(caught.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(3, 9), "float32"),
        (torch.zeros(1).long(), r"\(1, 1\)"),
        (torch.zeros(3, 1).long(), r"\(3, 1\)"),
        (torch.zeros(0, 9).long(), r"\(0, 9\)"),
        # PyTorch's cross entropy would ignore the target -100.
        (torch.tensor([[1, 2, -100]]), "-100"),
        (torch.tensor([[1, 2, 5]]), "5"),
    ],
)
def test_a_batch_without_targets_is_refused(batch, found):
    good = torch.zeros(2, 5).long()
    with pytest.raises(ValueError, match=f"batch of step 2.*{found}"):
        train(tiny(), lambda step, generator: batch if step else good, config())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("text", "found"),
    [
        *((TEXT.double(), "float64"), (TEXT.bool(), "bool"), (TEXT[None, None], r"\(1, 1, 97\)")),
        *(
            (TEXT[None][:0], r"\(0, 97\)"),
            (TEXT[None, :8], r"\(1, 8\)"),
            (TEXT.tolist()[:8], r"\(8,\)"),
        ),
        *((TEXT[:8], r"\(8,\)"), (TEXT + 1, "5")),
    ],
)
def test_a_text_that_cannot_be_learned_or_measured_is_refused_first(tmp_path, text, found):
    with pytest.raises(ValueError, match=f"text .*{found}"):
        evaluate(tiny(), text)
    for what, texts in (("train on", (text, TEXT)), ("validate on", (TEXT, text))):
        with pytest.raises(ValueError, match=f"text to {what} .*{found}"):
            train(tiny(), texts[0], config(), validation=texts[1], directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="batch.* 0"):
        evaluate(tiny(), TEXT, batch=0)
    with pytest.raises(ValueError, match="0 of 1"):
        train(tiny(), TEXT[:1], config())


def test_a_run_has_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder; got .*run\.pt"):
        train(tiny(), TEXT, config(), directory=tmp_path / "run.pt")
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_is_not_written_over_by_another_run(saved):
    before = (saved / "checkpoint.pt").read_bytes(), (saved / "log.jsonl").read_bytes()
    with pytest.raises(FileExistsError, match=str(saved)):
        train(tiny(), TEXT, config(), directory=saved)
    assert before == ((saved / "checkpoint.pt").read_bytes(), (saved / "log.jsonl").read_bytes())


def frozen():
    model = tiny()
    model.token_embedding.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "settings", "text", "difference"),
    [
        (lambda: tiny(d_mlp=9), {}, TEXT, "model.d_mlp .*24.* 9"),
        (tiny, dict(steps=8, seed=1), TEXT, "training.steps .*7.*8; training.seed .*0.*1"),
        (tiny, {}, TEXT.flip(0), "text "),
        (lambda: tiny().double(), {}, TEXT, "dtype .*float32.*float64"),
        (frozen, {}, TEXT, "frozen .*token_embedding.weight"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(saved, model, settings, text, difference):
    before = (saved / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match=f"same run; {difference}"):
        train(model(), text, config(**settings), directory=saved, resume=True)
    assert (saved / "checkpoint.pt").read_bytes() == before


def test_a_checkpoint_of_another_version_is_refused(saved, monkeypatch):
    monkeypatch.setattr(run_module, "CODE_VERSION", 1000)
    with pytest.raises(ValueError, match="code .*1000"):
        train(tiny(), TEXT, config(), directory=saved, resume=True)


def test_a_file_that_is_not_a_checkpoint_is_an_error(saved):
    torch.save({"model": {}}, saved / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"checkpoint.pt: 'run' is missing from the file"):
        train(tiny(), TEXT, config(), directory=saved, resume=True)


def test_a_damaged_checkpoint_is_refused_or_gives_the_same(saved):
    """Flip bits, set blocks to zero, or cut off the end of a checkpoint.

    Some changes hit bytes without a meaning. Then the resumed run gives the same result.
    """
    path, straight = saved / "checkpoint.pt", tiny()
    train(straight, TEXT, config())
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    for kind in ["flip"] * 36 + ["zero"] * 18 + ["cut"] * 6:
        data, at = bytearray(whole), draw.randrange(len(whole))
        if kind == "flip":
            data[at] ^= 1 << draw.randrange(8)
        elif kind == "zero":
            data[at : at + 64] = bytes(len(data[at : at + 64]))
        path.write_bytes(data[:at] if kind == "cut" else data)
        model, refusal = tiny(), ""
        try:
            train(model, TEXT, config(), directory=saved, resume=True)
        except ValueError as error:
            refusal = str(error)
        assert same(weights(model), weights(tiny() if refusal else straight))
        assert (str(path) in refusal, "\n" in refusal) == (bool(refusal), False)
        refused += bool(refusal)
    assert refused > 30


def test_a_read_only_directory_is_said(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for method in ("open", "unlink"):
        monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(OSError, match=r"log.jsonl .*Read-only.*no checkpoint"):
        train(tiny(), TEXT, config(), directory=tmp_path)


def test_there_must_be_something_to_resume(tmp_path):
    for directory in (tmp_path, tmp_path / "new"):
        with pytest.raises(FileNotFoundError, match="checkpoint.pt"):
            train(tiny(), TEXT, config(), directory=directory, resume=True)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="directory"):
        train(tiny(), TEXT, config(), resume=True)


@pytest.mark.parametrize("job", [train, evaluate])
def test_only_plain_models_are_trained_and_evaluated(job):
    """The error comes before any work, and names the ways for models of `transformers`."""
    arguments = (TrainingConfig(steps=1),) if job is train else ()
    with pytest.raises(TypeError, match=r"got a Linear \(from_hf\(model\).*cross_entropy"):
        # Without the checks of types, which users do not have.
        inspect.unwrap(job)(torch.nn.Linear(2, 2), torch.zeros(100, dtype=torch.long), *arguments)
