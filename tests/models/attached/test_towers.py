"""Encoders, decoders, and towers for images and sounds.

The reference is a copy of the model that is not attached, with PyTorch's own hooks.
"""

import copy
import io

import pytest
import torch
from torch import nn

from hooks import ActivationCache, EditError, HookedRunner, HookPoint, NeverFiredError
from hooks.base import tensors_in
from interp import edits
from interp.protocol import of
from models import attach, detach
from tests import seeing
from tests.seeing import made

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

STACKS = ("", "encoder.", "decoder.", "vision.", "audio.")
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(not seeing.is_there(name), reason="needs a later transformers"),
    )
    for name in seeing.ALL
]
every_model = pytest.mark.parametrize("name", NAMES)


def numbers(output):
    """Return the logits, or the first tensor of a model without logits."""
    logits = getattr(output, "logits", None)
    return next(tensors_in(output)) if logits is None else logits


def blocks_of(model):
    """Yield the prefix of the points of each stack, and the paths of its blocks."""
    paths = {module: path for path, module in model.named_modules()}
    for prefix in STACKS:
        owner = getattr(model, prefix.rstrip("."), None) if prefix else model
        if hasattr(owner, "blocks"):
            yield prefix, [paths[points.module] for points in owner.blocks]


def attached_pair(name):
    model, example, given = made(seeing.ALL[name])
    twin = copy.deepcopy(model)
    return model, twin, attach(model, example=example), given


def changed(twin, path, change, given):
    """Return the output of the copy in a run whose raw hook changes the output of a module."""

    def put(module, args, output):
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    # This hook must run first, because transformers collects hidden states with hooks of its own.
    handle = twin.get_submodule(path).register_forward_hook(put, prepend=True)
    try:
        return numbers(twin(**given))
    finally:
        handle.remove()


def together(value):
    """Return a value with the batch and the positions in one axis.

    In some models, the patches of all images are in one axis, because images have different sizes.
    """
    return value.reshape(-1, value.shape[-1])


@torch.no_grad()
@pytest.mark.sampled(16)
@every_model
def test_unhooked_numbers_are_the_models_and_removal_leaves_nothing(name):
    model, twin, attached, given = attached_pair(name)
    plain, keys = numbers(twin(**given)), [*twin.state_dict()]
    assert torch.equal(numbers(model(**given)), plain)
    assert [*model.state_dict()] == keys
    assert not {*attached.left_out} - {
        "vision.ln_final",
        "audio.ln_final",
        "encoder.ln_final",
        "decoder.ln_final",
    } or (
        name == "qwen3_5"  # linear attention has no patterns
    )
    attached.remove()
    assert torch.equal(numbers(model(**given)), plain)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds == [type(module).__name__ for module in twin.modules()]
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        assert {*vars(module)} == {*vars(other)}


def raw_values(twin, given, modules):
    """Return the inputs and outputs of modules in a run of the copy, recorded by raw hooks."""
    values, handles = {}, []

    def keep(path, what, value):
        values[path, what] = next(tensors_in(value)).clone()

    for path in modules:
        module = twin.get_submodule(path)
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: keep(path, "read", (args, kwargs)),
                with_kwargs=True,
            )
        )
        handles.append(
            module.register_forward_hook(lambda _, args, out, path=path: keep(path, "gave", out))
        )
    twin(**given)
    for handle in handles:
        handle.remove()
    return values


@torch.no_grad()
@pytest.mark.sampled(16)
@every_model
def test_streams_are_the_inputs_and_outputs_of_blocks(name):
    model, twin, _, given = attached_pair(name)
    # Cache no patterns, so that the model and its copy run the same kernels.
    _, cache = HookedRunner(model).run_with_cache(**given, names=["*resid_pre", "*resid_post"])
    stacks = dict(blocks_of(model))
    wanted = {"encoder.", "decoder."} if seeing.ALL[name] in seeing.PAIRED else {""}
    assert wanted <= {*stacks}
    assert len(stacks) == (1 if name == "vit" else 2)
    for prefix, paths in stacks.items():
        raw = raw_values(twin, given, paths)
        for n, path in enumerate(paths):
            for point, what in (("resid_pre", "read"), ("resid_post", "gave")):
                value = cache[f"{prefix}blocks.{n}.{point}"]
                assert torch.equal(together(value), together(raw[path, what]))
        last = cache[f"{prefix}blocks.{len(paths) - 1}.resid_post"]
        assert torch.equal(cache[f"{prefix}resid_post", -1], last)
        assert torch.equal(cache[f"{prefix}blocks.*.resid_post", -1], last)


@torch.no_grad()
@pytest.mark.sampled(16)
@every_model
def test_points_have_the_values_of_their_names(name):
    model, _, _, given = attached_pair(name)
    runner = HookedRunner(model)
    output, cache = runner.run_with_cache(**given)
    plain = numbers(model(**given))
    torch.testing.assert_close(numbers(output), plain, atol=1e-5, rtol=1e-4)
    for point in runner.points.values():
        value = cache[point.name]
        assert value.ndim == len(point.axes)
        near = value + 0.5 * seeing.drawn(*value.shape)
        new = runner.run_with_hooks(**given, hooks={point.name: lambda x, at, near=near: near})
        assert not torch.allclose(numbers(new), plain, atol=1e-6), f"{point} does not act"
    for pattern in [name for name in cache if name.endswith(".pattern")]:
        q, k, v, scores, z = (cache[pattern[:-7] + part] for part in ("q", "k", "v", "scores", "z"))
        k, v = (part.repeat_interleave(q.shape[2] // v.shape[2], 2) for part in (k, v))
        rows = cache[pattern].sum(-1)
        torch.testing.assert_close(rows, torch.ones_like(rows))
        torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", cache[pattern], v), z)
        products = torch.einsum("bqhd,bkhd->bhqk", q, k)
        scale = (products * scores).sum() / products.square().sum()
        torch.testing.assert_close(products * scale, scores, atol=1e-5, rtol=1e-4)
    # In BART, norms read the sums, so the sums themselves have no points.
    if name == "bart":
        return
    for mid in [name for name in cache if name.endswith(".resid_mid")]:
        parts = {part: cache.get(mid[:-3] + part) for part in ("pre", "mid_cross", "post")}
        block = mid[: -len("resid_mid")]
        added = "mixer_out" if f"{block}mixer_out" in cache else "attn_out"
        torch.testing.assert_close(parts["pre"] + cache[block + added], cache[mid])
        last = cache[mid]
        if parts["mid_cross"] is not None:
            last = parts["mid_cross"]
            torch.testing.assert_close(cache[mid] + cache[f"{block}cross_out"], last)
        torch.testing.assert_close(last + cache[f"{block}mlp_out"], parts["post"])


@torch.no_grad()
@pytest.mark.sampled(16)
@every_model
def test_edits_match_raw_hooks(name):
    model, twin, _, given = attached_pair(name)
    runner = HookedRunner(model)
    _, cache = runner.run_with_cache(**given, names=["*.z", "*.resid_post"])
    for prefix, paths in blocks_of(model):
        where, path = f"{prefix}blocks.1.resid_post", paths[1]
        shape = cache[where].shape

        def zeroed(value, shape=shape):
            value = value.clone()
            value.view(shape)[:, 2] = 0
            return value

        ours = numbers(runner.run_with_hooks(**given, hooks={where: edits.zero(pos=2)}))
        assert torch.equal(ours, changed(twin, path, zeroed, given)), where
        linears = {
            f"{path}.{inner}"
            for inner, module in twin.get_submodule(path).named_modules()
            if isinstance(module, nn.Linear)
        }
        raw = raw_values(twin, given, linears)
        for attention in ("attn", "cross"):
            if (z := f"{prefix}blocks.1.{attention}.z") not in cache:
                continue
            if name == "qwen3_5" and not prefix:
                # Here the output map reads z times a gate.
                continue
            flat, width = together(cache[z].flatten(2)), cache[z].shape[-1]
            reads_z = next(
                path
                for (path, what), value in raw.items()
                if what == "read"
                and value.numel() == flat.numel()
                and torch.equal(together(value), flat)
            )

            def without_head(module, args, width=width):
                value = args[0].clone()
                value[..., width : 2 * width] = 0
                return (value,)

            handle = twin.get_submodule(reads_z).register_forward_pre_hook(without_head)
            theirs = numbers(twin(**given))
            handle.remove()
            ours = numbers(runner.run_with_hooks(**given, hooks={z: edits.zero(head=1)}))
            assert torch.equal(ours, theirs), z


@torch.no_grad()
@pytest.mark.sampled(6)
@pytest.mark.parametrize("make", seeing.TOWERS, ids=lambda make: make.__name__)
def test_features_are_put_into_the_stream(make):
    if not seeing.is_there(make.__name__):
        pytest.skip("needs a later transformers")
    model, example, given = made(make)
    attach(model, example=example)
    runner = HookedRunner(model)
    output, cache = runner.run_with_cache(**given)
    tower = "audio" if "input_features" in given else "vision"
    places = given["input_ids"] == seeing.IMAGE
    merged, features = cache["merged"], cache[f"{tower}.projected"]
    assert torch.equal(merged[places], together(features)[: int(places.sum())])
    assert torch.equal(merged[~places], cache["embed"][~places])
    torch.testing.assert_close(merged, cache["resid_pre", 0])
    gone = runner.run_with_hooks(**given, hooks={"merged": edits.zero(pos=4)})
    zeroed = model.get_input_embeddings()(given["input_ids"]).clone()
    zeroed[places] = together(features)[: int(places.sum())]
    zeroed[:, 4] = 0
    assert not torch.allclose(gone.logits, output.logits)
    texts = runner.run_with_cache(torch.tensor([[3, 5, 7]]))[1]
    assert not [name for name in texts if name.startswith(tower)]
    assert f"{tower}.blocks.0.resid_pre" in texts.skipped
    with pytest.raises(NeverFiredError, match="projected"):
        runner.run_with_cache(torch.tensor([[3, 5, 7]]), names=f"{tower}.projected")


@torch.no_grad()
@pytest.mark.sampled(60)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@every_model
def test_points_are_the_same_in_every_precision(name, dtype, attention):
    def in_dtype(given):
        return given and {
            key: value.to(dtype) if value.is_floating_point() else value
            for key, value in given.items()
        }

    points = []
    for cast in (False, True):
        model, example, given = made(seeing.ALL[name])
        model.set_attn_implementation(attention)
        if cast:
            model, example, given = model.to(dtype), in_dtype(example), in_dtype(given)
        plain = numbers(model(**given))
        attach(model, example=example)
        assert torch.equal(numbers(model(**given)), plain)
        points.append([*HookedRunner(model).points])
    assert points[0] == points[1]


@torch.no_grad()
def test_lazy_caches_have_towers():
    for make in (seeing.llava, seeing.qwen3_vl, seeing.t5, seeing.whisper):
        model, example, given = made(make)
        attach(model, example=example)
        runner = HookedRunner(model)
        eager = runner.run_with_cache(**given, use_cache=False)[1]
        lazy = runner.run_with_cache(**given, use_cache=False, lazy=True)[1]
        assert [*lazy] == [*eager]
        for name, value in eager.items():
            torch.testing.assert_close(lazy[name], value, atol=1e-5, rtol=1e-4)


GENERATED = {"t5": seeing.t5, "bart": seeing.bart, "whisper": seeing.whisper}
CHANGES = {
    "decoder.blocks.1.resid_post": lambda: edits.add(3 * seeing.drawn(16), pos=slice(2, 4)),
    "encoder.blocks.1.resid_post": lambda: edits.add(5 * seeing.drawn(16), pos=-1),
    "decoder.blocks.0.cross.k": lambda: edits.scale(3.0, encoder_pos=2),
    "decoder.blocks.1.attn.v": lambda: edits.scale(-3.0, pos=1),
}


@torch.no_grad()
@pytest.mark.sampled(16)
@pytest.mark.parametrize("point", CHANGES)
@pytest.mark.parametrize("name", GENERATED)
def test_generation_under_edits_is_that_without_a_cache(name, point):
    model, example, given = made(GENERATED[name])
    given = {key: value for key, value in given.items() if not key.startswith("decoder")}
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, -2:] = 0
    options = dict(max_new_tokens=6, do_sample=False)
    plain = model.generate(**given, **options)
    with attach(model, example=example):
        assert torch.equal(model.generate(**given, **options), plain)
        with HookedRunner(model).hooks({point: CHANGES[point]()}):
            cached = model.generate(**given, **options, use_cache=True)
            alone = model.generate(**given, **options, use_cache=False)
    assert torch.equal(cached, alone)
    assert torch.equal(model.generate(**given, **options), plain)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.is_gradient")  # peft causes this warning
@pytest.mark.parametrize("make", [seeing.t5, seeing.bart], ids=["t5", "bart"])
def test_an_adapter_on_an_encoder_with_a_decoder(make):
    peft = pytest.importorskip("peft", reason="needs peft")
    model, _, given = made(make)
    torch.manual_seed(0)
    lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, r=2)
    model = peft.get_peft_model(model, lora).eval()
    plain, source = model(**given).logits, dict(input_ids=given["input_ids"])
    options = dict(max_new_tokens=5, do_sample=False)
    written = model.generate(**source, **options)
    with attach(model):
        assert torch.equal(model(**given).logits, plain)
        assert torch.equal(model.generate(**source, **options), written)
        hooks = {"decoder.blocks.0.cross.v": edits.scale(-2.0, encoder_pos=1)}
        with HookedRunner(model).hooks(hooks):
            cached = model.generate(**source, **options)
            alone = model.generate(**source, **options, use_cache=False)
        assert torch.equal(cached, alone)
        assert not torch.allclose(
            HookedRunner(model).run_with_hooks(**given, hooks=hooks).logits, plain
        )
        # The encoder does not run, and the error says so for its points.
        with pytest.raises(NeverFiredError, match="encoder"):
            HookedRunner(model).run_with_cache(
                **given, encoder_outputs=model.get_encoder()(**source)
            )


@torch.no_grad()
@pytest.mark.parametrize("form", ["copied", "saved"])
@pytest.mark.parametrize("name", ["qwen3_vl", "bart", "t5"])
def test_copies_have_points_of_their_own(name, form):
    model, twin, attached, given = attached_pair(name)
    plain = numbers(twin(**given))
    if form == "copied":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    points = [*HookedRunner(other).points]
    assert points == [*HookedRunner(model).points]
    hooks = {point: edits.zero() for point in points if point.endswith("0.resid_post")}
    assert not torch.allclose(
        numbers(HookedRunner(other).run_with_hooks(**given, hooks=hooks)), plain
    )
    attached.remove()
    assert torch.equal(numbers(other(**given)), plain)
    detach(other)
    assert torch.equal(numbers(other(**given)), plain)
    assert not [part for part in other.modules() if isinstance(part, HookPoint)]


@torch.no_grad()
def test_padding_of_an_encoder_and_its_decoder_is_separate(tmp_path):
    model, _, given = made(seeing.t5)
    attach(model)
    runner = HookedRunner(model)
    mask = torch.ones_like(given["input_ids"])
    mask[1, 4:] = 0
    other = torch.ones_like(given["decoder_input_ids"])
    other[0, 3:] = 0
    masks = dict(attention_mask=mask, decoder_attention_mask=other)
    _, cache = runner.run_with_cache(**given, **masks)
    cache.save(tmp_path / "cache")
    loaded = ActivationCache.load(tmp_path / "cache")
    read, written = cache["encoder.resid_post", 1], cache["decoder.resid_post", 1]
    for each in (cache, loaded, cache.at(batch=slice(None))):
        last = each.at(pos=-1)
        assert torch.equal(last["encoder.resid_post", 1], torch.stack([read[0, -1], read[1, 3]]))
        assert torch.equal(
            last["decoder.resid_post", 1], torch.stack([written[0, 2], written[1, -1]])
        )
    kept = runner.run_with_cache(**given, **masks, pos=[-1])[1]
    assert torch.equal(kept["encoder.resid_post", 1][1, 0], read[1, 3])
    hooks = {"encoder.blocks.0.resid_post": edits.add(seeing.drawn(16), pos=-1)}
    edited = runner.run_with_hooks(**given, **masks, hooks=hooks).logits
    by_hand = {"encoder.blocks.0.resid_post": edits.add(seeing.drawn(16), pos=[[6], [3]])}
    assert torch.equal(edited, runner.run_with_hooks(**given, **masks, hooks=by_hand).logits)


def test_missing_points_have_reasons():
    model, example, given = made(seeing.qwen3_vl, rows=2)
    with attach(model, example=example) as attached:
        assert "one image" in attached.left_out["vision.attn"]
    with attach(model, example=seeing.of_qwen(1)):
        runner = HookedRunner(model)
        skipped = runner.run_with_cache(**given)[1].skipped
        assert "calls='all' stores all values" in skipped["vision.blocks.0.attn.pattern"]
        cache = runner.run_with_cache(**given, names="vision.*.pattern", calls="all")[1]
        assert cache["vision.pattern", 0].shape == (2, 1, 2, 16, 16)
        assert cache.axes(("vision.pattern", 0))[0] == "call"
    with pytest.raises(TypeError, match="example must be a tensor or a mapping"):
        attach(model, example=[1, 2])
    with pytest.raises(ValueError, match=r"use example= for other arguments"):
        attach(model, example={"pixel_values": torch.zeros(2, 2)})
    vit = made(seeing.vit)[0]
    with pytest.raises(ValueError, match=r"example={'pixel_values': tensor}"):
        attach(vit)
    with pytest.raises(ValueError, match=r"Linear has no nn.Embedding .*example={'input': tensor}"):
        attach(nn.Linear(3, 3))
    with attach(vit, example=seeing.vit()[1]):
        for step in ("run_block", "context", "input_resid"):
            with pytest.raises(TypeError, match="no blocks of a text alone"):
                of(vit, step)
    vit.blocks = nn.ModuleList([HookPoint("batch pos")])
    with pytest.raises(ValueError, match="must be free"):
        attach(vit, example=seeing.vit()[1])


@torch.no_grad()
def test_two_images_of_one_example_are_edited_by_their_calls():
    model, _, given = made(seeing.qwen3_vl, rows=2)
    attach(model, example=seeing.of_qwen(1))
    runner = HookedRunner(model)
    plain = model(**given).logits
    second = {"vision.blocks.0.attn.z": edits.zero(head=1, call=1)}
    edited = runner.run_with_hooks(**given, hooks=second).logits
    assert torch.equal(edited[0], plain[0])
    assert not torch.allclose(edited[1], plain[1])
    with pytest.raises(EditError, match="numbers from 0"):
        runner.run_with_hooks(**given, hooks={"vision.blocks.0.attn.z": edits.zero(call=-1)})
