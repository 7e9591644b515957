"""The training loop: what it learns, what it draws, and what it reports."""

import math

import pytest
import torch

from models import (
    TrainingConfig,
    Transformer,
    TransformerConfig,
    evaluate,
    next_token_loss,
    sample,
    split,
    train,
)


def tiny(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, n_ctx=8, n_layers=1, n_heads=2, d_model=6)
    return Transformer(TransformerConfig(**sizes | changes))


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
    drawn = sample(text, 200, 4, torch.Generator().manual_seed(0))
    assert drawn.shape == (200, 4)
    assert (drawn.diff(dim=1) == 1).all()
    assert set(drawn[:, 0].tolist()) == set(range(8))
    with pytest.raises(ValueError, match="a text of 11 tokens has no stretch of 12"):
        sample(text, 1, 12, torch.Generator())


def test_evaluation_is_the_mean_over_consecutive_windows():
    model = tiny(dropout=0.5).train()
    text = torch.randint(5, (27,), generator=torch.Generator().manual_seed(1))
    value = evaluate(model, text, batch=2)
    assert model.training
    model.eval()
    losses = []
    for start in (0, 8, 16):
        log_probs = model(text[None, start : start + 8]).log_softmax(-1)[0]
        losses += [-log_probs[i, text[start + i + 1]].item() for i in range(8)]
    assert value == pytest.approx(sum(losses) / 24, rel=1e-6)
    with pytest.raises(ValueError, match="a text of 8 tokens has no window of 8 and a next token"):
        evaluate(model, text[:8])


def test_an_untrained_model_is_near_uniform_and_a_trained_one_is_certain():
    model = tiny()
    text = torch.tensor([0, 1] * 50)
    with torch.no_grad():
        model.unembedding.weight.zero_()
    assert evaluate(model, text) == pytest.approx(math.log(5))
    model = tiny()
    steps = []
    losses = train(
        model,
        lambda generator: sample(text, 6, 8, generator),
        TrainingConfig(steps=120, learning_rate=2e-2, warmup=10),
        after_step=lambda step, loss: steps.append((step, loss)),
    )
    assert evaluate(model, text) < 0.05
    assert steps == list(enumerate(losses, 1))


def test_training_is_decided_by_its_seeds():
    def run(seed):
        text = torch.randint(5, (60,), generator=torch.Generator().manual_seed(2))
        config = TrainingConfig(steps=5, seed=seed)
        return train(tiny(), lambda generator: sample(text, 3, 8, generator), config)

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_one_step_is_adamws():
    model, text = tiny(), torch.arange(10).remainder(5)[None]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    next_token_loss(model(text[:, :8]), text[:, :8]).mean().backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    gradients = {n: p.grad * min(1, 1 / (norm + 1e-6)) for n, p in model.named_parameters()}
    config = TrainingConfig(steps=1, learning_rate=0.1, warmup=4, weight_decay=0.5)
    train(model, lambda generator: text[:, :8], config)
    rate = 0.1 / 4
    for name, parameter in model.named_parameters():
        decay = 0.5 if parameter.ndim > 1 else 0.0
        # In the first step both moments are the gradient's own, once their bias is corrected.
        step = gradients[name] / (gradients[name].abs() + 1e-8)
        expected = before[name] * (1 - rate * decay) - rate * step
        torch.testing.assert_close(parameter, expected, atol=1e-4, rtol=1e-3)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    config = TrainingConfig(steps=100, learning_rate=1.0, warmup=10)
    assert [config.rate(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert config.rate(10) == pytest.approx(1.0)
    assert config.rate(55) == pytest.approx(0.55)
    assert config.rate(100) == pytest.approx(0.1)
