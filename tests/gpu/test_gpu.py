"""Models on a GPU give the numbers of the CPU in every precision, and Python does not wait for the
GPU.

`python -m pytest tests/gpu -o addopts=` needs no network. Apart from PyTorch, it needs only the
libraries that the project needs to run.
"""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hooks import HookedRunner
from interp import edits
from models import Sampling, TrainingConfig, causal_mask, generate, row_generator, train
from models.training.run import Run
from tests.bench.gpu import half
from tests.bench.timing import peak_on_gpu
from tests.gpu.kinds import KINDS, TOLERANCE, gap, on_cpu, pair, tokens

REAL = torch.arange(13) >= torch.tensor([0, 4, 9])[:, None]
MASKS = {
    "whole": {},
    "left": dict(attention_mask=REAL),
    "right": dict(attention_mask=REAL.flip(1)),
    "pairs": dict(
        query_key_mask=causal_mask(13) & ((torch.arange(13) != 2) | torch.eye(13).bool())
    ),
}


def test_a_gpu_is_at_hand():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device: the tests of this folder ran on the CPU only")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits(where, kind, dtype, mask):
    model, exact = pair(kind, where, dtype)
    text, options = tokens(), MASKS[mask]
    real = options.get("attention_mask", torch.ones_like(text)).bool()
    expected = exact(text, **options)[real]
    assert gap(model(text, **options)[real.to(where)], expected) < TOLERANCE[dtype]
    # The same with tokens that are already on the device, and with the explicit computation.
    there = {name: value.to(where) for name, value in options.items()}
    logits, cache = HookedRunner(model).run_with_cache(text.to(where), names="*.pattern", **there)
    assert gap(logits[real.to(where)], expected) < TOLERANCE[dtype]
    sums = (
        cache["pattern", -1]
        .sum(-1)
        .double()[real.to(where)[:, None].expand(-1, model.config.n_heads, -1)]
    )
    assert (sums - 1).abs().max() < TOLERANCE[dtype]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pos", [37, 129, 257, 513])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "gemma", "odd heads"])
@torch.no_grad()
def test_long_texts_of_odd_lengths(where, kind, dtype, pos):
    """Fused kernels work in blocks, and the explicit softmax in vectors of several numbers."""
    if where == "cpu" and pos > 129:
        pytest.skip("only a GPU has kernels for this, and a CPU takes long")
    model, exact = pair(kind, where, dtype)
    text = tokens(2, pos)
    expected = exact(text)
    assert gap(model(text), expected) < TOLERANCE[dtype]
    logits, cache = HookedRunner(model).run_with_cache(text, names="*.pattern")
    assert gap(logits, expected) < TOLERANCE[dtype]
    assert cache["pattern", -1].triu(1).count_nonzero() == 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]
)
@pytest.mark.filterwarnings("ignore")  # PyTorch warns about kernels that it cannot use
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
@torch.no_grad()
def test_attention_backends(where, kind, dtype, backend):
    model, exact = pair(kind, where, dtype)
    text = tokens(3, 24)
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            logits = model(text)
    except RuntimeError as error:
        if not any(said in str(error) for said in ("No available", "No viable", "cuDNN")):
            raise
        pytest.skip(f"{backend} has no kernel for {dtype} here")
    assert gap(logits, exact(text)) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore")  # PyTorch warns about slow norms of mixed dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(where, kind):
    model, exact = pair(kind, where)
    text = tokens()
    with torch.autocast(where, torch.bfloat16):
        logits, cache = HookedRunner(model).run_with_cache(
            text, names=["*.q", "*.k", "*.v"], detach=False
        )
        loss = logits.square().mean()
    assert gap(logits, exact(text)) < TOLERANCE[torch.bfloat16]
    assert len({cache[name, 0].dtype for name in "qkv"}) == 1
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_keys_leave_gradients_finite(where, kind, dtype):
    """A query at padding on the left sees no key. Its softmax must not make gradients NaN."""
    model, exact = pair(kind, where, dtype)
    text = tokens()
    for one in (model, exact):
        one(text, attention_mask=REAL)[REAL.to(one.W_E.device)].double().square().mean().backward()
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert one.grad.isfinite().all()
        assert gap(one.grad, other.grad) < TOLERANCE[dtype] * 5


@pytest.mark.parametrize("kind", ["gpt2", "gemma", "mistral"])
def test_gradients_of_a_text_of_several_blocks(where, kind):
    model, exact = pair(kind, where)
    text = tokens(1, 513 if where == "cuda" else 29)
    for one in (model, exact):
        one(text).double().square().mean().backward()
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert gap(one.grad, other.grad) < TOLERANCE[torch.float32] * 5


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
@torch.no_grad()
def test_blocks_on_the_cpu(where, kind):
    """If a block is on the CPU, the stream that is copied to it is complete before it is read."""
    model, exact = pair(kind, where)
    model.blocks[1].cpu()
    logits = model(tokens(), attention_mask=REAL)[REAL.to(where)]
    assert gap(logits, exact(tokens(), attention_mask=REAL)[REAL]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("options", [{}, dict(temperature=0.7, top_k=40, top_p=0.95, min_p=0.01)])
@pytest.mark.parametrize("stop", [(), (1, 2, 3)])
@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_generation(where, kind, stop, options):
    model, _ = pair(kind, where)
    prompts = [row[keep].tolist() for row, keep in zip(tokens(), REAL, strict=True)]
    options = dict(options, max_new_tokens=5, stop=stop)
    expected = generate(model, prompts, **options)
    if not options.get("temperature"):
        assert expected == generate(copy.deepcopy(on_cpu(kind)).float(), prompts, **options)
    alone = generate(model, prompts[1:2], **options | dict(seed=row_generator(0, 1, where)))
    assert alone == expected[1:2]


@pytest.mark.parametrize("how", [dict(backend="aot_eager"), dict(mode="reduce-overhead")])
def test_compiled_generation(where, how):
    """On a GPU, the steps are compiled, also with an edit. On a CPU, they run uncompiled."""
    model, _ = pair("gemma", where)
    prompts = [row[keep].tolist() for row, keep in zip(tokens(), REAL, strict=True)]
    options = dict(max_new_tokens=9, stop=())
    plain = generate(model, prompts, **options)
    with torch.compiler.set_stance("default" if where == "cuda" else "force_eager"):
        try:
            assert generate(model, prompts, compiled=how, **options) == plain
        except RuntimeError as error:
            if where == "cpu":
                raise
            pytest.skip(f"PyTorch cannot compile here: {str(error).partition(chr(10))[0]}")
        shorter = [prompt[:2] for prompt in prompts]
        expected = generate(model, shorter, **options)
        assert generate(model, shorter, compiled=how, **options) == expected
        steer = edits.add(torch.randn(96, device=where) * 5, pos=-1)
        with HookedRunner(model).hooks({"blocks.0.mlp_out": steer}):
            expected = generate(model, prompts, **options)
            assert generate(model, prompts, compiled=how, **options) == expected != plain


@torch.no_grad()
def test_draws_follow_the_odds(where):
    odds = torch.tensor([0.1, 0.2, 0.3, 0.4])
    rows, own = odds.log().expand(4000, -1).to(where), torch.Generator(where).manual_seed(7)
    drawn = Sampling(temperature=1.0).choose(rows, [own] * 4000)
    assert (drawn.cpu().bincount() / 4000 - odds).abs().max() < 0.03


@pytest.mark.parametrize("options", [{}, dict(lazy=True), dict(pos=[1, -1])])
@torch.no_grad()
def test_cached_runs_without_a_stop(where, without_stops, options):
    model, exact = pair("llama", where)
    runner, text = HookedRunner(model), tokens()
    # In the first run, libraries start and wait for the GPU, so it is not part of the check.
    runner.run_with_cache(text, **options)
    with without_stops():
        cache = runner.run_with_cache(text, **options)[1]
    kept = runner.run_with_cache(text, device="cpu", **options)[1]
    expected = HookedRunner(exact).run_with_cache(text, **options)[1]
    for name, value in expected.items():
        assert kept[name].is_cpu
        assert cache[name].device.type == where
        assert gap(cache[name], value) < TOLERANCE[torch.float32]
        assert gap(kept[name], value) < TOLERANCE[torch.float32]


def test_training_without_a_stop(where, without_stops):
    model, _ = pair("gpt2", where)
    run = Run(model, TrainingConfig(steps=5, warmup=0), {}, None)
    run.update(tokens())
    with without_stops():
        for _ in range(3):
            run.update(tokens())
    run.settle()
    torch.cuda.synchronize() if where == "cuda" else None
    assert run.records[-1]["loss"] < run.records[0]["loss"]
    model.W_E.data[0, 0] = torch.nan
    run.update(tokens())
    with pytest.raises(FloatingPointError, match="step 5"):
        run.settle()


def test_training_equals_that_on_the_cpu(where):
    text, config = tokens(1, 2000)[0], TrainingConfig(steps=4, batch_size=3, warmup=0)
    model, _ = pair("llama", where)
    model.extend_context(19)
    other = copy.deepcopy(model).cpu()
    losses = [train(one, text, config).losses for one in (model, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
@torch.no_grad()
def test_peak_memory_of_a_long_text(where, kind):
    """No matrix of all queries and keys is formed. It would take 16 times the allowed memory."""
    if where == "cpu":
        pytest.skip("PyTorch counts the memory of a GPU")
    model, pos = copy.deepcopy(on_cpu(kind)).to(where, half()), 2**14
    model.config = model.config.replace(n_ctx=pos)
    if kind == "gpt2":
        model.position_embedding = torch.nn.Embedding(pos, 96, device=where, dtype=half())
    text = tokens(1, pos)
    model(text, last=1)
    # The text is so long that the 32 MiB of workspace of CUDA's matrix products do not matter.
    scores = model.config.n_heads * pos**2 * 2
    assert peak_on_gpu(lambda: model(text, last=1)) * 2**20 < scores / 16
