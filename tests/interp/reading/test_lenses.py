"""Fitted lenses, compared with closed forms, and with Jacobians and gradients of autograd."""

import copy
import operator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hooks import CacheError, HookPoint, ModeError
from hooks.base._torch import PeakBytes
from interp import JacobianLens, TunedLens, jacobian_lens, logit_lens, run_with_cache, tuned_lens
from tests.shipped import pydoc

SKIP, D = 2, 5
TEXTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7]]


def small(**options):
    from models import Transformer, TransformerConfig

    sizes = dict(vocab_size=13, n_ctx=17, n_layers=3, n_heads=2, d_model=6, d_mlp=11)
    model = Transformer(TransformerConfig(**sizes | options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


KINDS = {
    "gpt2": {},
    "llama": dict(norm="rmsnorm", positions="rotary", mlp="gated", n_heads=3, n_kv_heads=1),
    "sandwich": dict(norm_place="sandwich", window=3),
    "parallel": dict(parallel=True),
}


class Sums(nn.Module):
    """A model of two linear blocks. The first maps each position, and the second also adds up a map
    of the earlier positions.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, D)
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for block in self.blocks:
            block.resid_pre, block.resid_post = (HookPoint("batch pos d_model") for _ in range(2))
            block.own, block.earlier = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.blocks[0].earlier.weight.data.zero_()
        self.unembed = nn.Linear(D, 13)
        self.config = SimpleNamespace(vocab_size=13, n_layers=2, d_model=D)

    def forward(self, tokens):
        stream = self.embedding(tokens)
        for block in self.blocks:
            x = block.resid_pre(stream)
            stream = block.resid_post(block.own(x) + block.earlier(x.cumsum(1)))
        return self.unembed(stream)


@pytest.mark.parametrize("length", [4, 7])
def test_the_jacobian_lens_of_a_linear_model_in_closed_form(length):
    model = Sums().double().eval()
    lens = jacobian_lens(model, [[1] * length], skip=SKIP)
    first, second = (block.own.weight for block in model.blocks)
    # The last position does not count. A position that is n positions before the last but one is
    # added up n + 1 times.
    added = sum(n + 1 for n in range(length - 1 - SKIP)) / (length - 1 - SKIP)
    last = second + added * model.blocks[1].earlier.weight
    torch.testing.assert_close(lens.weight, torch.stack([last @ first, last]))
    assert not lens.bias.any()
    assert lens.error.isnan().all()


def jacobians(model, text):
    """Return the mean Jacobians [layer, out, in] of one text, computed by running the blocks.

    Earlier positions do not depend on later positions.
    """
    tokens = torch.tensor([text])
    context = model.context(tokens)
    stream, found = model.input_resid(tokens, context).detach(), []
    for layer, block in enumerate(model.blocks):

        def rest(x, layer=layer):
            for block in model.blocks[layer:]:
                x = block(x, context)
            return x[0, SKIP:-1].sum(0)

        whole = torch.autograd.functional.jacobian(rest, stream)[:, 0]  # [out, pos, in]
        found.append(whole[:, SKIP:-1].mean(1))
        stream = block(stream, context).detach()
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_jacobian_lens_is_the_mean_of_all_jacobians(kind):
    model = small(**KINDS[kind])
    each = torch.stack([jacobians(model, text) for text in TEXTS])
    # The lens works although the caller has switched gradients off.
    with torch.no_grad():
        lens = jacobian_lens(model, map(torch.tensor, TEXTS), skip=SKIP)
    torch.testing.assert_close(lens.weight, each.mean(0))
    # This is the variance of the mean.
    spread = (each - each.mean(0)).square().sum((0, 2, 3)) / 2 / 3
    torch.testing.assert_close(lens.error, spread.sqrt() / each.mean(0).flatten(1).norm(dim=1))
    assert lens.n_texts == 3
    assert all(weight.grad is None for weight in model.parameters())


def test_shards_merge_into_the_joint_fit():
    model = small()
    joint = jacobian_lens(model, TEXTS, skip=SKIP)
    first, second = (jacobian_lens(model, part, skip=SKIP) for part in (TEXTS[:2], TEXTS[2:]))
    merged = first.merged(second)
    assert merged.n_texts == 3
    torch.testing.assert_close(merged.weight, joint.weight)
    torch.testing.assert_close(merged.error, joint.error)
    with pytest.raises(ValueError, match="one model"):
        first.merged(jacobian_lens(small(n_layers=2), TEXTS, skip=SKIP))
    with pytest.raises(ValueError, match="one model"):
        first.merged(jacobian_lens(small(parallel=True), TEXTS, skip=SKIP))


def test_memory_stays_within_its_bound():
    model, text = small(d_model=34, d_mlp=130), [torch.arange(13)]
    with pytest.raises(ValueError, match="max_bytes must be at least") as refused:
        jacobian_lens(model, text, skip=SKIP, max_bytes=1)
    least = int(str(refused.value).split()[5].replace(",", ""))
    whole, peaks = jacobian_lens(model, text, skip=SKIP), []
    for budget in (least, 2 * least):
        with PeakBytes() as memory:
            lens = jacobian_lens(model, text, skip=SKIP, max_bytes=budget)
        peaks.append(memory.peak)
        assert memory.peak <= budget + 3 * lens.weight.nbytes
        torch.testing.assert_close(lens.weight, whole.weight)
    assert peaks[1] > 1.5 * peaks[0]


def test_fits_refuse_what_they_cannot_read():
    model = small()
    with pytest.raises(ValueError, match=r"at least 18 tokens.*got 17 in text 0"):
        jacobian_lens(model, [[1] * 17])
    with pytest.raises(ValueError, match=r"at least 4 tokens.*got 3 in text 1"):
        jacobian_lens(model, [[1] * 4, [1] * 3], skip=SKIP)
    for wrong in ({"skip": -1}, {"max_bytes": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
            jacobian_lens(model, [[1] * 17], **{"skip": SKIP} | wrong)
    for fit in (jacobian_lens, tuned_lens):
        with pytest.raises(ValueError, match="at least"):
            fit(model, [])
        with pytest.raises(ValueError, match=r"at least one token.*text 0"):
            fit(model, [[]])
        with torch.inference_mode(), pytest.raises(ValueError, match="inference mode"):
            fit(model, [[1] * 20])
        with pytest.raises(ModeError):
            fit(small().train(), TEXTS)
    with pytest.raises(KeyError, match="resid_pre"):
        jacobian_lens(nn.Sequential(nn.Linear(2, 3)).eval(), [[1] * 20])
    for wrong, value in (("steps", 0), ("batch", 0), ("learning_rate", -1.0)):
        with pytest.raises(ValueError, match=wrong.replace("_", " ")):
            tuned_lens(model, TEXTS, **{wrong: value})
    with pytest.raises(ValueError, match=r"list of at least one token.*text 1"):
        tuned_lens(model, [[3], []], steps=2, batch=1)
    wrong = copy.deepcopy(model)
    wrong.blocks[0].mlp.output.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="losses must be finite"):
        tuned_lens(wrong, TEXTS, steps=1)


def mean_kl(model, weights, biases):
    """Return the KL of each layer over all positions of all texts, in nats.

    Each text runs alone.
    """
    sums, count = 0, 0
    for text in TEXTS:
        tokens = torch.tensor([text])
        context = model.context(tokens)
        stream, logs = model.input_resid(tokens, context), []
        for block, weight, bias in zip(model.blocks, weights, biases, strict=True):
            x = stream.detach()
            logs.append(model.unembed(x + x @ weight.T + bias).log_softmax(-1))
            stream = block(stream, context)
        final = model.unembed(stream.detach()).log_softmax(-1).detach()
        terms = [final.exp() * (final - own) for own in logs]
        sums, count = sums + torch.stack([x.sum() for x in terms]), count + len(text)
    return sums / count


def test_the_tuned_lens_takes_steps_of_adam_at_a_falling_rate(monkeypatch):
    # Compute the logits of five positions at a time.
    monkeypatch.setattr("interp.reading.affine._LOGITS_AT_ONCE", 13 * 4 * 5)
    model = small()
    lens = tuned_lens(model, TEXTS, steps=2, batch=3, learning_rate=0.01)
    parts = [torch.zeros(3, *shape).double().requires_grad_() for shape in ((6, 6), (6,))]
    adam, losses = torch.optim.Adam(parts), []
    for rate in (0.01, 0.005):
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        losses.append(mean_kl(model, *parts))
        losses[-1].sum().backward(inputs=parts)
        adam.step()
    torch.testing.assert_close(lens.losses, torch.stack(losses).detach())
    torch.testing.assert_close(lens.weight - torch.eye(6), parts[0].detach())
    torch.testing.assert_close(lens.bias, parts[1].detach())
    assert all(weight.grad is None for weight in model.parameters())
    assert lens.rows == 2 * sum(map(len, TEXTS))
    first, last = (step.mean() for step in losses)
    assert f"for 42 numbers a layer; mean KL {first:.3f} to {last:.3f} nats" in repr(lens)


def test_each_text_is_read_before_any_is_read_again():
    model, options = small(), dict(steps=3, batch=1, learning_rate=0.0)
    losses = [tuned_lens(model, TEXTS, seed=seed, **options).losses[:, 0] for seed in range(5)]
    assert len({tuple(found.tolist()) for found in losses}) > 1
    for found in losses:
        torch.testing.assert_close(found.sort().values, losses[0].sort().values)


def kl_of(model, tokens, lens=None):
    _, cache = run_with_cache(model, tokens, names=["*.resid_pre", "*.resid_post"])
    return logit_lens(model, cache, lens=lens, top_k=1).kl.mean((1, 2))


def test_both_lenses_find_a_planted_map():
    model = Sums().double().eval()
    model.blocks[1].earlier.weight.data.zero_()
    tokens = torch.randint(13, (7, 11))
    plain = kl_of(model, tokens)
    exact = kl_of(model, tokens, jacobian_lens(model, tokens, skip=SKIP))
    fitted = kl_of(model, tokens, tuned_lens(model, tokens, steps=300, learning_rate=0.03))
    assert plain[:2].min() > 0.01
    assert exact.abs().max() < 1e-12
    assert fitted.abs().max() < 1e-4
    assert plain[2] == exact[2] == fitted[2] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_published_form_is_the_residual_of_the_map(dtype, tmp_path):
    model = small().to(dtype)
    linear = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    torch.save(linear.state_dict(), tmp_path / "params.pt")
    lens, tokens = TunedLens.from_params(tmp_path / "params.pt"), torch.tensor(TEXTS[:1])
    _, cache = run_with_cache(model, tokens, mode="residual")
    with torch.no_grad():
        entering = cache.stack("resid_pre")
        wanted = [(x + own(x.float())).to(dtype) for x, own in zip(entering, linear, strict=True)]
        # If the lens multiplied in half precision, most entries would be rounded differently.
        assert (lens(entering) - torch.stack(wanted)).abs().gt(1e-5).float().mean() < 0.1
        logs = model.unembed(torch.stack(wanted).flatten(0, 1)).double().log_softmax(-1)
    found = logit_lens(model, cache, lens=lens, targets=tokens).target_probabilities[:3, 0].log()
    expected = logs.gather(-1, tokens.expand(3, -1)[..., None])[..., 0]
    atol = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)
    torch.save(linear.state_dict() | {"other": torch.zeros(3)}, tmp_path / "params.pt")
    with pytest.raises(CacheError, match=r"params.pt must hold .*other"):
        TunedLens.from_params(tmp_path / "params.pt")
    with pytest.raises(FileNotFoundError):
        TunedLens.from_params(tmp_path / "none.pt")


def test_lenses_are_kept(tmp_path):
    model, path = small(), tmp_path / "lens"
    tokens = torch.tensor(TEXTS[:1])
    for lens in (jacobian_lens(model, TEXTS, skip=SKIP), tuned_lens(model, TEXTS, steps=2)):
        lens.save(path)
        loaded = type(lens).load(path)
        for name, value in vars(lens).items():
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(getattr(loaded, name), value) if name != "n_texts" else loaded.n_texts == 3
        assert torch.equal(kl_of(model, tokens, loaded), kl_of(model, tokens, lens))
        other = TunedLens if isinstance(lens, JacobianLens) else JacobianLens
        with pytest.raises(ValueError, match=r"\.safetensors, .*got .*lens\.html"):
            lens.save(tmp_path / "lens.html")
        with pytest.raises(CacheError, match=f"complete {other._format}"):
            other.load(path)


def test_a_lens_of_another_model_is_refused():
    lens, tokens = tuned_lens(small(), TEXTS, steps=1), torch.tensor(TEXTS[:1])
    for options, reason in (({"d_model": 8}, r"\[3, 8, 8\]"), ({"parallel": True}, "config hash")):
        with pytest.raises(ValueError, match=f"{reason}.*; got"):
            kl_of(small(**options), tokens, lens)


def test_lenses_print_at_most_forty_lines():
    model, tokens = small(n_layers=45), torch.tensor(TEXTS[:1])
    _, cache = run_with_cache(model, tokens, mode="residual")
    lines = repr(logit_lens(model, cache)).splitlines()
    assert 30 < len(lines) <= 40
    assert lines[-1].startswith("45 ")
    lens = tuned_lens(small(), tokens, steps=1)
    assert repr(lens).startswith(f"TunedLens [layer {len(lens.weight)}, d_model 6], fitted in 1 ")


def test_a_vocabulary_smaller_than_top_k_is_given_whole():
    model, tokens = small(), torch.tensor(TEXTS[:1])
    _, cache = run_with_cache(model, tokens, mode="residual")
    readout, vocab = logit_lens(model, cache, top_k=500), model.config.vocab_size
    assert readout.tokens.shape[-1] == vocab
    assert (readout.tokens.sort(-1).values == torch.arange(vocab)).all()


def test_ranks_of_nan_are_nan():
    model, tokens = small(), torch.tensor(TEXTS[:1])
    torch.nn.init.constant_(next(model.blocks[1].parameters()), torch.nan)
    _, cache = run_with_cache(model, tokens, mode="residual")
    ranks = logit_lens(model, cache, targets=tokens).target_ranks
    assert ranks[:2].max() < 13
    assert ranks[2:].isnan().all()


def test_ranks_at_padding_are_nan():
    model = small()
    tokens = torch.tensor([[3, 1, 4], [0, 5, 9]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    _, cache = run_with_cache(model, tokens, mode="residual", attention_mask=mask)
    ranks = logit_lens(model, cache, targets=tokens).target_ranks
    alone = run_with_cache(model, tokens[1:, 1:], mode="residual")[1]
    assert ranks[:, 1, 0].isnan().all()
    assert torch.equal(
        ranks[:, 1, 1:], logit_lens(model, alone, targets=tokens[1:, 1:]).target_ranks[:, 0]
    )


def test_a_large_vocabulary_never_exists_whole():
    model, peaks = small(vocab_size=50_257, n_ctx=202, n_layers=1, d_model=2).float(), []
    for pos in (101, 202):
        _, cache = run_with_cache(model, torch.zeros(1, pos).long(), mode="residual")
        with PeakBytes() as memory:
            logit_lens(model, cache)
        peaks.append(memory.peak)
    assert peaks[1] < 1.02 * peaks[0] < 2**28


@pytest.mark.parametrize("at_once", [1, 130])
def test_positions_read_in_parts_are_each_in_their_place(monkeypatch, at_once):
    """With 4 streams and a vocabulary of 13, the logits are computed for one or for two of the
    seven positions at a time.
    """
    from interp.reading import affine

    model = small()
    _, cache = run_with_cache(
        model, [TEXTS[0], TEXTS[0][::-1]], names=["*.resid_pre", "*.resid_post"]
    )
    monkeypatch.setattr(affine, "_LOGITS_AT_ONCE", at_once)
    readout = logit_lens(model, cache, top_k=3)
    streams = [*(cache["resid_pre", layer] for layer in range(3)), cache["resid_post", 2]]
    log_probs = torch.stack([model.unembed(stream).log_softmax(-1) for stream in streams])
    assert torch.equal(readout.tokens, log_probs.topk(3).indices)
    torch.testing.assert_close(readout.entropy, -(log_probs.exp() * log_probs).sum(-1))
    kl = (log_probs[-1].exp() * (log_probs[-1] - log_probs)).sum(-1)
    torch.testing.assert_close(readout.kl, kl)


def test_on_the_bundled_model_the_tuned_lens_is_better_at_every_layer():
    from pydoc_data.topics import topics

    from models import load_tokenizer, train_test_split

    model, tokenizer = pydoc(), load_tokenizer("pydoc-4l")
    # In other versions of Python, the documentation has characters that the tokenizer does not
    # have.
    text = "".join(char for char in "\n".join(topics.values()) if char in tokenizer.characters)
    tokens = torch.tensor(tokenizer.encode(text))
    training, held_out = (
        part[: len(part) // 64 * 64].view(-1, 64) for part in train_test_split(tokens)
    )
    held_out = held_out[::29]
    lens = tuned_lens(model, training, steps=40)
    plain, tuned = kl_of(model, held_out), kl_of(model, held_out, lens)
    assert (tuned[:-1] < 0.8 * plain[:-1]).all(), (plain, tuned)
    assert tuned[-1] == plain[-1] == 0
