"""Runs during which Python does not wait for the device, counted on a pretended device.

`tests.pretended` explains the device, its `stops` and its `moves`.
"""

import functools
import math
import sys

import pytest
import torch

import interp
from hooks import CacheError, HookedRunner
from interp import cross_entropy, edits, kl_divergence, log_prob, logit_diff, run_with_cache, sweep
from models import (
    RotaryBase,
    TrainingConfig,
    Transformer,
    TransformerConfig,
    generate,
    row_generator,
    skip_token_checks,
)
from models.training.run import Run
from tests.pretended import DEVICE, SECOND, Devices, split


@pytest.fixture
def device():
    with Devices() as device:
        yield device


def made(where, **changes):
    """Return a random model on a device. Its weights are the same on every device."""
    sizes = dict(vocab_size=23, n_ctx=17, n_layers=2, n_heads=2, d_model=12, d_mlp=13)
    torch.manual_seed(0)
    # Create the model on the device. Moving it would separate tied weights: PyTorch replaces each
    # weight of a tensor subclass by a new one.
    with torch.device(where):
        model = Transformer(TransformerConfig(**sizes | changes)).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape).to(where) * 0.4)
    return model


@pytest.fixture
def asked(monkeypatch):
    """The devices for which random generators are requested.

    The generators are made on the CPU, because PyTorch makes none for a device that does not exist.
    """
    devices = []

    def on_cpu(seed, row, device):
        devices.append(device)
        return row_generator(seed, row)

    monkeypatch.setattr("models.running.generation.row_generator", on_cpu)
    return devices


ROTARY = dict(positions="rotary", norm="rmsnorm", embed_scale=3.3, n_heads=3, n_kv_heads=1)
CAPPED = ROTARY | dict(n_heads=2, window=3, attn_cap=2.0, qk_norm="head")
PADDED = torch.arange(7) >= torch.tensor([0, 2, 5, 6])[:, None]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("changes", [{}, ROTARY, CAPPED])
@pytest.mark.parametrize(
    "mask", [{}, {"attention_mask": PADDED}, {"query_key_mask": torch.ones(7, 7).tril()}]
)
def test_a_forward_and_a_backward_pass_do_not_wait(device, tokens, changes, mask):
    model, there = made("cpu", **changes), made(DEVICE, **changes)
    model(tokens, **mask)[PADDED].square().mean().backward()
    real = PADDED.to(DEVICE).nonzero(as_tuple=True)

    def run():
        loss = there(tokens, **mask)[real].square().mean()
        loss.backward()
        with skip_token_checks():
            there(moved)
        return loss

    moved = tokens.to(DEVICE)
    loss, stops, _ = device.counted(run)
    assert not stops
    torch.testing.assert_close(loss.cpu(), model(tokens, **mask)[PADDED].square().mean())
    grads = zip(model.parameters(), there.parameters(), strict=True)
    for one, other in grads:
        torch.testing.assert_close(one.grad, other.grad.cpu())
    # Tokens that are already on the device are copied to the CPU once, for a check.
    assert sum(device.counted(lambda: there(moved))[1].values()) == 1


def test_tokens_outside_the_vocabulary_are_refused_before_they_move(device, tokens):
    there = made(DEVICE)
    tokens[2, 3] = 23
    with pytest.raises(ValueError, match="23 at row 2, position 3"):
        there(tokens)
    with pytest.raises(ValueError, match="23 at row 2, position 3"):
        there(tokens.to(DEVICE))


def test_a_context_that_moves_to_the_cpu_is_complete(device, tokens):
    changes = ROTARY | dict(window=3, window_layers=(1,), window_rotary=RotaryBase(theta=7.0))
    contexts = [made(x, **changes).context(tokens, attention_mask=PADDED) for x in (DEVICE, "cpu")]
    moved, expected = (context.to(torch.device("cpu")) for context in contexts)
    assert torch.equal(moved.positions, expected.positions)
    assert torch.equal(moved.masks[0], expected.masks[0])
    torch.testing.assert_close(moved.rotation, expected.rotation)
    torch.testing.assert_close(moved.window_rotation, expected.window_rotation)


@pytest.mark.parametrize("options", [{}, dict(temperature=1.5, top_k=19, top_p=0.99, min_p=0.01)])
@pytest.mark.parametrize("rows", [[[1, 5, 9, 2, 6]], [[2], [1, 8, 3]]])
def test_a_generation_on_a_device(device, asked, options, rows):
    model, there = made("cpu"), made(DEVICE)
    expected = generate(model, rows, max_new_tokens=5, **options)
    assert generate(there, rows, max_new_tokens=5, **options) == expected
    options = options | dict(stop=[22, *expected[-1][-2:]])
    expected = generate(model, rows, max_new_tokens=5, **options)
    assert len(expected[-1]) < len(rows[-1]) + 5
    assert generate(there, rows, max_new_tokens=5, **options) == expected


@pytest.mark.parametrize("options", [{}, dict(temperature=1.5)])
def test_a_generation_of_a_model_on_two_devices(device, asked, options):
    model, there = (made(where, tied_unembed=False) for where in ("cpu", DEVICE))
    options = dict(options, prompts=[[2], [1, 8, 3]], max_new_tokens=4, stop=(5, 6, 7))
    expected = generate(model, **options)
    there.token_embedding, there.position_embedding = (
        model.token_embedding,
        model.position_embedding,
    )
    asked.clear()
    assert generate(there, **options) == expected
    assert set(asked) <= {DEVICE}


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(pos=[1, -2]),
        dict(pos=[False, True, True, False, True, False, False]),
        dict(device="cpu"),
        dict(device="cpu", dtype=torch.bfloat16, pos=slice(2, 5)),
        dict(device="cpu", names="blocks.*.attn.v", inference=True),
    ],
)
def test_a_cached_run_waits_once_and_only_for_values_on_the_cpu(device, tokens, options):
    model, there = made("cpu"), made(DEVICE)
    options = dict(options)
    guard = torch.inference_mode if options.pop("inference", False) else torch.no_grad
    with guard():
        run = lambda: HookedRunner(there).run_with_cache(tokens, **options)[1]  # noqa: E731
        cache, stops, waits = device.counted(run)
        expected = HookedRunner(model).run_with_cache(tokens, **options)[1]
    assert not stops
    assert waits == ("device" in options)
    assert cache.keys() == expected.keys()
    for name, value in cache.items():
        assert value.is_cpu == ("device" in options)
        assert value.dtype == expected[name].dtype
        torch.testing.assert_close(value.cpu(), expected[name], atol=1e-5, rtol=1e-2)


def test_positions_are_cut_on_each_device(device, tokens):
    options = dict(names="*.resid_post", pos=[1, -1])
    parted, model = split(made(DEVICE), DEVICE, SECOND), made("cpu")
    cache, expected = (
        HookedRunner(m).run_with_cache(tokens, **options)[1] for m in (parted, model)
    )
    for layer, place in enumerate((DEVICE, SECOND)):
        value = cache["resid_post", layer]
        assert value.device == place
        torch.testing.assert_close(value.cpu(), expected["resid_post", layer], atol=1e-5, rtol=0)


def test_masks_of_windows_are_on_the_device_of_the_stream(device, tokens):
    _, cache = HookedRunner(made("cpu")).run_with_cache(tokens, mode="residual")
    inside = torch.stack([cache["resid_post", layer][PADDED] for layer in range(2)], 1)
    assert torch.equal(interp.residual_stream(cache, PADDED.to(DEVICE)).vectors, inside)


def test_generations_and_gradients_arrive_whole(device, tokens):
    caches = []
    for model in (made("cpu"), made(DEVICE)):
        runner, options = HookedRunner(model), dict(names="*.attn.v", device="cpu")
        run = functools.partial(generate, model, max_new_tokens=3)
        caches.append(runner.run_with_cache(tokens, run=run, **options)[1])
        logits, cache = runner.run_with_cache(tokens, grads=True, **options)
        logits.square().sum().backward()
        # Copy the gradients now. Nothing waits for them later, as a cache does for its values.
        caches.append({name: grad.clone() for name, grad in cache.grads.items()})
        caches.append(runner.run_with_cache(tokens, names="*.attn.v")[1].to("cpu"))
    for one, other in zip(caches[:3], caches[3:], strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], atol=1e-4, rtol=1e-4)


def test_a_value_that_two_points_share_is_copied_once(device, tokens):
    runner = HookedRunner(made(DEVICE))
    with torch.no_grad():
        cache = runner.run_with_cache(tokens, names="blocks.*.resid_*", device="cpu")[1]
    # Five values are copied: the stream before the first block, and the streams after the two
    # sublayers of both blocks.
    assert len(device.moves) == 5
    assert cache["resid_post", 0] is cache["resid_pre", 1]


FIRST_PADDED = (torch.arange(7) > 0).expand(4, 7)
SHORTER = FIRST_PADDED & (torch.arange(7) < torch.tensor([7, 5, 4, 3])[:, None])


def columns(kind):
    """Return an edit and a metric whose positions or tokens are numbers on the CPU."""
    vectors, rows = torch.randn(4, 7, 12), [[1], [2], [3], [4]]
    text = torch.arange(28).view(4, 7) % 23
    return {
        "columns": (edits.zero(pos=rows), logit_diff([1, 2, 3, 4], 5)),
        "holes": (edits.add(torch.ones(12), pos=[1, 4]), log_prob(3, pos=[2, 3, 4, 5])),
        "source": (
            edits.replace(vectors, source_pos=rows, pos=2),
            cross_entropy(text, attention_mask=FIRST_PADDED),
        ),
        "mean": (
            edits.mean(vectors, attention_mask=SHORTER.to(DEVICE), pos=slice(1, None)),
            kl_divergence(torch.randn(4, 7, 23), None, attention_mask=FIRST_PADDED),
        ),
        "resample": (edits.resample(vectors, attention_mask=torch.ones(4, 7)), log_prob(3, pos=-2)),
        "noise": (edits.noise(1.0), logit_diff(3, 4)),
        "span": (edits.project_out(torch.randn(12)), logit_diff(3, 4)),
        "early": (edits.zero(pos=1), logit_diff(3, 4)),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["columns", "holes", "source", "mean", "resample", "noise", "span", "early"]
)
def test_a_sweep_waits_as_often_for_any_number_of_edits(device, tokens, kind):
    model, there, (edit, metric) = made("cpu"), made(DEVICE), columns(kind)
    point = "embed" if kind == "early" else "blocks.1.resid_pre"

    def swept(model, n, place):
        given = tokens.to(place), [{point: edit}] * n, metric
        return sweep(model, *given, attention_mask=FIRST_PADDED).values

    (_, once, _), (found, often, _) = (
        device.counted(lambda n=n: swept(there, n, DEVICE)) for n in (1, 5)
    )
    assert often == once
    torch.testing.assert_close(found.cpu(), swept(model, 5, "cpu"), atol=1e-4, rtol=1e-4)


def test_receipts_wait_when_they_are_read(device):
    runner = HookedRunner(torch.nn.Sequential(torch.nn.Tanhshrink()))
    x, factors = (torch.tensor(rows).to(DEVICE) for rows in ([[2.0], [7.0]], [[1.0], [3.0]]))
    with runner.hooks({"0": lambda value, point: value * factors}, receipts=True) as context:
        for _ in range(3):
            assert not device.counted(lambda: runner.model(x))[1]
    (receipt,) = context.receipts
    assert (receipt.calls, receipt.rows) == (3, 3)
    assert receipt.largest == pytest.approx(2 * (7 - math.tanh(7)))


def test_scores_of_heads_read_the_tokens_once(device):
    model, there, text = made("cpu"), made(DEVICE), interp.repeated_tokens(23, period=7)
    caches = [
        HookedRunner(one).run_with_cache(tokens, names="*.pattern")[1]
        for one, tokens in ((model, text), (there, text.to(DEVICE)))
    ]
    found, stops, _ = device.counted(
        lambda: interp.head_scores(there, caches[1], "induction").values
    )
    assert sum(stops.values()) == 1
    torch.testing.assert_close(
        found.cpu(), interp.head_scores(model, caches[0], "induction").values
    )


@pytest.mark.parametrize("changes", [{}, {"norm_place": "sandwich"}, {"embed_norm": True}])
def test_sums_of_parts_are_computed_on_the_device_of_the_cache(device, changes):
    models, text = (made("cpu", **changes), made(DEVICE, **changes)), torch.randint(23, (3, 7))
    caches = [HookedRunner(one).run_with_cache(text)[1] for one in models]
    models, caches = (*models, models[1]), [*caches, caches[1].to("cpu")]
    for reading, options in [
        (interp.decompose, {"neurons": True}),
        (interp.direct_logit_attribution, {"right": text, "wrong": 3}),
        (interp.direct_logit_attribution, {"right": text[:, 0], "pos": -1, "neurons": True}),
        (interp.accumulated_logits, {"right": text}),
    ]:
        expected, found, beside = (
            reading(*given, **options).values for given in zip(models, caches, strict=True)
        )
        assert found.device.type == torch.device(DEVICE).type
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close(beside, expected)


def test_a_training_step_does_not_wait_for_itself(device, tokens, monkeypatch):
    # Fused Adam checks that PyTorch has a kernel for the device. Switch this check off.
    check = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(check, "_device_dtype_check_for_fused", lambda *_: None)
    runs = [Run(made(x), TrainingConfig(steps=5, warmup=0), {}, None) for x in ("cpu", DEVICE)]
    for run in runs:
        for _ in range(3):
            assert not device.counted(functools.partial(run.update, tokens))[1]
        run.settle(but=1)
        assert len(run.records) == 2
        run.settle()
    for one, other in zip(*(run.records for run in runs), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    # The check for NaN runs one step later than the step, and must still stop the training.
    model = runs[1].model
    with torch.no_grad():
        model.blocks[1].mlp.input.weight[0, 0] = torch.nan
    before = model.W_E.cpu()
    runs[1].update(tokens)
    with torch.no_grad():
        model.blocks[1].mlp.input.weight[0, 0] = 0.0
    runs[1].update(tokens)
    with pytest.raises(FloatingPointError, match="step 4"):
        runs[1].settle()
    assert torch.equal(model.W_E.cpu(), before)


def test_large_weights_in_half_precision_are_finite():
    """The check adds up values. In half precision, finite values can have an infinite sum."""
    run = Run(made("cpu").half(), TrainingConfig(steps=1), {}, None)
    weight = run.model.blocks[0].mlp.input.weight.data
    run.save()
    weight.fill_(1000.0)
    run.save()
    weight[3, 4] = -torch.inf
    with pytest.raises(FloatingPointError, match="weights"):
        run.save()


def _model(**options):
    config = dict(vocab_size=23, n_ctx=17, n_layers=2, n_heads=3, d_model=12, d_mlp=7)
    return Transformer(TransformerConfig(**config | options)).eval()


TOKENS = torch.tensor([[3, 0, 6, 2, 5]])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_values_of_our_models_are_kept_without_copies(positions):
    model, made = _model(positions=positions), {}
    handle = model.blocks[1].mlp.post.register_forward_hook(
        lambda module, args, output: made.update(post=output)
    )
    _, copied = run_with_cache(model, TOKENS)
    assert copied["blocks.1.mlp.post"].data_ptr() != made["post"].data_ptr(), "a hook acts"
    handle.remove()
    forward = model.blocks[1].mlp.output.forward
    model.blocks[1].mlp.output.forward = lambda x: made.update(post=x) or forward(x)
    _, cache = run_with_cache(model, TOKENS)
    assert cache["blocks.1.mlp.post"].data_ptr() == made["post"].data_ptr()
    assert all(torch.equal(cache[name], value) for name, value in copied.items())
    # Some values share memory: `resid_post` is the `resid_pre` of the next block, and keys are a
    # part of the tensor of queries, keys and values. Memory that is shared counts only once.
    distinct = {id(value): value for value in cache.values()}
    assert cache["resid_post", 0] is cache["resid_pre", 1]
    assert cache.nbytes == sum(value.nbytes for value in distinct.values())
    weights = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    assert not weights & {value.untyped_storage().data_ptr() for value in cache.values()}


def test_a_part_of_a_larger_memory_is_copied():
    _, cache = run_with_cache(_model(), TOKENS, names="*.v")
    assert cache.nbytes == 2 * 5 * 12 * 4
    _, cache = run_with_cache(_model(), TOKENS, names=["*.q", "*.k", "*.v"])
    assert cache.nbytes == 3 * 2 * 5 * 12 * 4
    assert cache["q", 1].untyped_storage().nbytes() == 3 * 5 * 12 * 4, "one memory, wholly kept"


def test_tensors_that_the_caller_may_write_into_are_copied():
    model, resid = _model(), torch.randn(2, 5, 12)
    before = resid.clone()
    _, cache = run_with_cache(model, resid, starting_at_layer=1, names="blocks.1.resid_pre")
    resid.zero_()
    assert torch.equal(cache["resid_pre", 1], before)

    class Returns(Transformer):
        def forward(self, tokens):
            return self.embed(self.token_embedding(tokens))

    model = Returns(model.config).eval()
    embedded, cache = run_with_cache(model, torch.tensor([[3, 0, 6]]), names="embed")
    embedded.zero_()
    assert cache["embed"].any()


def test_values_are_copied_if_writes_are_possible_or_not_counted():
    model = _model()
    runner, doubled = HookedRunner(model), lambda value, point: value.mul_(2)
    with runner.hooks({"blocks.1.resid_pre": doubled}):
        _, cache = runner.run_with_cache(TOKENS)
    torch.testing.assert_close(cache["resid_pre", 1], 2 * cache["resid_post", 0])
    with torch.inference_mode():
        _, cache = runner.run_with_cache(TOKENS)
    assert cache["resid_post", 0].untyped_storage().nbytes() == 5 * 12 * 4
    handle = model.blocks[1].resid_pre.register_forward_hook(lambda m, args, value: value.mul_(2))
    _, cache = runner.run_with_cache(TOKENS)
    handle.remove()
    torch.testing.assert_close(cache["resid_pre", 1], 2 * cache["resid_post", 0])


def test_a_write_that_the_model_denied_is_an_error():
    model = _model()
    model.blocks[1].mlp.input.forward = lambda x: x.mul_(2)[..., :7]
    with pytest.raises(CacheError, match="blocks.1.ln2.normalized later"):
        run_with_cache(model, TOKENS)
    model.overwrites_values = True
    _, cache = run_with_cache(model, TOKENS)
    torch.testing.assert_close(cache["pre", 1], 2 * cache["ln2.normalized", 1][..., :7])
