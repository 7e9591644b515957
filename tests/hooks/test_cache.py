"""ActivationCache: names, slices, options at capture time, and files."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hooks import ActivationCache, CacheError, HookedRunner, HookError, HookPoint, UnknownNameError
from hooks.lazy import LazyValues
from interp.inputs.cached import text_of


@pytest.fixture
def cache(runner, tokens):
    return runner.run_with_cache(tokens)[1]


def test_short_forms(cache):
    assert cache["pattern", 1] is cache["blocks.1.attn.pattern"]
    assert cache["resid_post", -1] is cache["blocks.2.resid_post"]
    assert cache["ln2.scale", -3] is cache["blocks.0.ln2.scale"]
    assert cache.name(("mlp.pre", 2)) == "blocks.2.mlp.pre"
    assert ("pattern", 2) in cache
    assert ("pattern", 3) not in cache
    assert 7 not in cache
    stacked = cache.stack("attn.z")
    assert stacked.shape == (3, 4, 7, 2, 5)
    assert all(torch.equal(stacked[n], cache["z", n]) for n in range(3))


def test_short_forms_count_the_models_layers_not_the_caches(runner, tokens):
    _, cache = runner.run_with_cache(tokens, names="blocks.1.resid_post")
    for part in (cache, cache.at(pos=slice(2)), cache.to(torch.float64)):
        assert torch.equal(part["resid_post", -2], part["blocks.1.resid_post"])
        with pytest.raises(UnknownNameError, match=r"blocks.2.resid_post.*blocks.1"):
            part["resid_post", -1]
        with pytest.raises(CacheError, match=r"blocks.0.resid_post, blocks.2"):
            part.stack("resid_post")


def test_short_forms_if_some_layers_lack_the_point():
    blocks = [nn.Sequential(OrderedDict({"pq"[n % 2]: nn.Linear(3, 3)})) for n in range(4)]
    _, cache = HookedRunner(nn.Sequential(*blocks).eval()).run_with_cache(torch.ones(2, 3))
    assert torch.equal(cache["p", -1], cache["2.p"])
    assert cache.stack("q").shape == (2, 2, 3)
    assert "0,2.p  float32 [2, 3]" in repr(cache)
    with pytest.raises(UnknownNameError, match="0 to 2.* 3"):
        cache["p", 3]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("error", "key", "match"),
    [
        (KeyError, "blocks.1.attn.patern", "blocks.1.attn.pattern"),
        (KeyError, ("scale", 1), "blocks.0.ln1.scale.*blocks.0.ln2.scale"),
        (KeyError, ("pattern", -4), "0 to 2.* -4"),
        (KeyError, ("embed", 0), r"'embed'; close matches: (?!.*\bembed\b)"),
        (TypeError, 3, "3"),
    ],
)
def test_a_key_that_is_not_there(cache, error, key, match):
    with pytest.raises(error, match=match):
        cache[key]
    assert key not in cache


def test_a_question_whether_a_value_is_there_searches_for_no_close_matches(cache, monkeypatch):
    monkeypatch.setattr("difflib.get_close_matches", lambda *args, **kwargs: 1 / 0)
    for key in ("blocks.1.attn.patern", ("patern", 1), ("scale", 1)):
        assert key not in cache
        assert cache.get(key) is None


def test_at_slices_by_axis_name_and_drops_integers(cache):
    part = cache.at(pos=slice(5, None), batch=0)
    assert torch.equal(part["resid_mid", 1], cache["resid_mid", 1][0, 5:])
    assert part.axes(("resid_mid", 1)) == ("pos", "d_model")
    assert torch.equal(part["pattern", 1], cache["pattern", 1][0, :, 5:]), "as pos= cuts"
    whole = cache.at(pos=slice(5, None), query=slice(None), batch=0)
    assert torch.equal(whole["pattern", 1], cache["pattern", 1][0])
    assert torch.equal(cache.at(head=[1, 0])["z", 2], cache["z", 2][:, :, [1, 0]])
    with pytest.raises(UnknownNameError, match="close matches: head"):
        cache.at(heads=1)


@pytest.mark.usefixtures("unchecked")
def test_indices_of_other_kinds(runner, tokens, cache):
    inside = np.array([False, True, False, False, True, True, False])
    masks = (
        inside,
        torch.tensor(inside),
        list(inside),
        inside.tolist(),
        list(torch.tensor(inside)),
    )
    for mask in masks:
        assert torch.equal(cache.at(pos=mask)["embed"], cache["embed"][:, [1, 4, 5]])
        _, part = runner.run_with_cache(tokens, names="*.attn.pattern", pos=mask)
        torch.testing.assert_close(part["pattern", 2], cache["pattern", 2][:, :, [1, 4, 5]])
        plan = runner.plan(tokens, names="*.attn.pattern", pos=mask)
        assert plan.nbytes == 3 * 4 * 2 * 3 * 7 * 4
    with pytest.raises(IndexError, match=r"\[2\].*4, 7, 10"):
        cache.at(pos=[True, False])
    for index in (np.int64(3), torch.tensor(3), np.array([3, 1], np.uint8)):
        part = cache.at(pos=index)
        assert torch.equal(part["embed"], cache["embed"][:, index.tolist()])
        assert part.axes("embed") == ("batch", *["pos"] * index.ndim, "d_model")
    # PyTorch would broadcast the two lists.
    with pytest.raises(ValueError, match="query.*key"):
        cache.at(query=(1, 2), key=np.array([2, 3]))
    for index in (True, None, 1.0, "all", torch.tensor(True), [[[1, 2]]]):
        with pytest.raises(TypeError, match="integer"):
            cache.at(pos=index)
    for index in ([], slice(7, None), ~inside & inside):
        with pytest.raises(CacheError, match=r"embed \[4, 7, 10\]"):
            cache.at(pos=index)


def test_to_device_and_dtype(runner, tokens, cache):
    double = cache.to(torch.float64)
    assert torch.equal(double["embed"], cache["embed"].double())
    assert double.axes("embed") == ("batch", "pos", "d_model")
    assert cache.to("meta")["q", 0].device.type == "meta"
    _, half = runner.run_with_cache(tokens, names="blocks.*.attn.z", dtype=torch.bfloat16)
    assert torch.equal(half["z", 2], cache["z", 2].bfloat16())
    _, meta = runner.run_with_cache(tokens, names="blocks.*.attn.z", device="meta")
    assert meta["z", 2].device.type == "meta"


@pytest.mark.usefixtures("unchecked")
def test_targets_that_would_spoil_values(runner, tokens, cache):
    for dtype in (torch.int8, torch.bool):
        for convert in (cache.to, lambda dtype: runner.run_with_cache(tokens, dtype=dtype)):
            with pytest.raises(ValueError, match=str(dtype)):
                convert(dtype)
    with pytest.raises(TypeError, match="float"):
        cache.to(3.5)


def test_integers_keep_their_type():
    runner, tokens = HookedRunner(nn.Sequential(nn.Identity()).eval()), torch.tensor([257, 1001])
    _, cache = runner.run_with_cache(tokens, dtype=torch.bfloat16)
    assert cache["0"].tolist() == [257, 1001]
    assert cache.to(torch.float16)["0"].tolist() == [257, 1001]


def test_a_cache_is_shown_by_layers_and_equal_only_to_itself(cache):
    assert "blocks.0-2.attn.pattern    float32 [4, 2, 7, 7]  batch head query key" in repr(cache)
    with pytest.raises(CacheError, match="lazy"):
        cache.drop()
    assert cache != cache.at()
    assert len({cache, cache}) == 1


def test_save_and_load_keep_names_order_axes_and_values(cache, model, tmp_path):
    path = tmp_path / "run.safetensors"
    cache.save(path)
    loaded = ActivationCache.load(path, model)
    assert list(loaded) == list(cache)
    for name, value in cache.items():
        assert torch.equal(loaded[name], value)
        assert loaded.axes(name) == cache.axes(name)
    assert torch.equal(loaded["resid_post", -1], cache["resid_post", -1])
    cache.at(pos=[2], batch=slice(0, 1)).save(path)
    assert torch.equal(ActivationCache.load(path)["z", 1], cache["z", 1][:1, [2]])
    for name in ("run.png", "run.JSON", "run.pt"):
        with pytest.raises(ValueError, match=rf"\.safetensors, or have no suffix; got .*{name}"):
            cache.save(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.usefixtures("unchecked")
def test_a_lazy_cache_is_saved_with_the_values_of_one_block_in_memory(
    runner, tokens, tmp_path, monkeypatch
):
    """A part of a lazy cache is saved in the same way."""
    _, cache = runner.run_with_cache(tokens, lazy=True)
    part = cache.at(pos=slice(1, None, 2))
    several, computed, sizes = LazyValues.several, [], []

    def watched(values, names):
        assert all(reference.expired() for reference in computed)
        read = several(values, names)
        held = {value.untyped_storage().data_ptr() for value in values.held()}
        # Queries, keys and values are views of one tensor.
        storages = [value.untyped_storage() for value in read.values()]
        memories = {storage.data_ptr(): storage for storage in storages}
        new = [memory for pointer, memory in memories.items() if pointer not in held]
        computed.extend(map(StorageWeakRef, new))
        sizes.append(sum(map(len, new)))
        return read

    with monkeypatch.context() as patch:
        patch.setattr(LazyValues, "several", watched)
        cache.save(tmp_path / "whole")
        _, eager = runner.run_with_cache(tokens)
        block = sum(eager[name].nbytes for name in eager if name.startswith("blocks.1."))
        # The sizes of the values that were computed for each step of the save: none for the values
        # that the run kept, then the values of one block each.
        assert sizes[:4] == [0, block, block, block]
        part.save(tmp_path / "part")
    assert all(reference.expired() for reference in computed)
    for lazy, file in ((cache, "whole"), (part, "part")):
        loaded, plain = ActivationCache.load(tmp_path / file), load_file(tmp_path / file)
        assert list(loaded) == list(lazy)
        # Read all values in one call, because a value that is read alone may come from a fused
        # kernel.
        for name, value in zip(lazy, lazy.read(*lazy), strict=True):
            assert torch.equal(loaded[name], value)
            assert torch.equal(plain[name], value)
            assert loaded.axes(name) == lazy.axes(name)
    whole = ActivationCache.load(tmp_path / "whole")
    for name, value in eager.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
def test_a_block_that_cannot_run_again_leaves_no_file(model, runner, tokens, tmp_path):
    _, cache = runner.run_with_cache(tokens, lazy=True)
    with torch.no_grad():
        next(model.blocks[2].parameters()).mul_(2.0)
    with pytest.raises(CacheError, match=r"blocks.2 changed after the run"):
        cache.save(tmp_path / "a")
    assert not [*tmp_path.iterdir()]


def test_gradients_are_saved_too(runner, tokens, tmp_path):
    output, cache = runner.run_with_cache(tokens, names=["embed", "*.attn.z"], grads=True)
    cache.save(tmp_path / "early")
    output.square().sum().backward()
    cache.save(tmp_path / "late")
    loaded = ActivationCache.load(tmp_path / "late")
    assert list(loaded) == list(loaded.grads) == list(cache)
    assert all(torch.equal(loaded.grads[name], cache.grads[name]) for name in cache)
    assert torch.equal(loaded.at(pos=2).grads["z", 1], cache.grads["z", 1][:, 2])
    with pytest.raises(CacheError, match="grads=True"):
        _ = ActivationCache.load(tmp_path / "early").grads


def test_a_cache_is_written_into_a_directory_that_exists(cache, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cache.save(tmp_path / "nowhere" / "a")


@pytest.mark.parametrize("positions", [[5, 0, -1], slice(2, 6, 3), torch.tensor([1, 5]), range(2)])
@pytest.mark.usefixtures("unchecked")
def test_positions_are_cut_at_capture(runner, tokens, positions):
    _, full = runner.run_with_cache(tokens)
    _, part = runner.run_with_cache(tokens, pos=positions)
    assert torch.equal(part["v", 1], full["v", 1][:, positions])
    assert torch.equal(part["pattern", 1], full["pattern", 1][:, :, positions])
    assert torch.equal(part["ln_final.scale"], full["ln_final.scale"][:, positions])
    for value in part.values():
        assert value.untyped_storage().nbytes() == value.nbytes
    both, value = HookedRunner(nn.Sequential(HookPoint("pos query")).eval()), torch.randn(7, 9)
    _, part = both.run_with_cache(value, pos=positions)
    assert torch.equal(part["0"], value[positions][:, positions])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("error", "name", "positions", "match"),
    [
        (HookError, "embed", [3, 7], "-7 to 6; got 7"),
        (HookError, "embed", [-8], "-8"),
        (HookError, "embed", slice(7, 9), "embed .* 7 places; got nothing"),
        (HookError, "blocks.0", [0], "blocks.0"),
        (TypeError, "embed", 3, "3"),
        (HookError, "embed", [True, False], "length 7; got 2"),
        (HookError, "embed", np.zeros(7, bool), "7 places; got nothing"),
        (TypeError, "embed", [True, 3], "True"),
        (TypeError, "embed", torch.tensor(True), "True"),
    ],
)
def test_positions_that_cannot_be(runner, tokens, error, name, positions, match):
    with pytest.raises(error, match=match):
        runner.run_with_cache(tokens, names=name, pos=positions)


class Reader(nn.Module):
    """A model with arguments of every kind."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, attention_mask=None, *rest, scale=1.0, **others):
        x.zero_()
        if isinstance(others.get("ids"), torch.Tensor):
            others["ids"].zero_()
        return self.linear(x)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_cache_has_the_inputs_of_its_run(model, tokens, lazy, tmp_path):
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[1, 5:] = False
    _, cache = HookedRunner(model).run_with_cache(tokens, attention_mask=mask, lazy=lazy)
    expected = tokens.clone(), mask.clone()
    tokens.zero_(), mask.zero_()
    cache.save(tmp_path / "a")
    copied = pickle.loads(pickle.dumps(cache))
    for one in (
        cache,
        cache.at(pos=0),
        copied,
        copy.deepcopy(cache),
        ActivationCache.load(tmp_path / "a"),
    ):
        assert torch.equal(one.inputs["tokens"], expected[0])
        assert torch.equal(one.inputs["attention_mask"], expected[1])
        text = text_of(one)
        assert all(map(torch.equal, (text.tokens, text.attention_mask), expected))


def test_inputs_are_bound_by_name_and_copied(tmp_path):
    runner, ids, mask = HookedRunner(Reader().eval()), torch.tensor([4, 2]), torch.zeros(2, 1)
    given = {"ids": ids, "kind": "a", "n": 3, "none": None, "half": 0.5, "many": [1], "real": True}
    _, cache = runner.run_with_cache(torch.ones(1, 3), mask, "rest", scale=2, **given)
    mask += 1
    cache.save(tmp_path / "a")
    for inputs in (cache.inputs, ActivationCache.load(tmp_path / "a").inputs):
        plain = {
            name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)
        }
        assert plain == {"scale": 2, "kind": "a", "n": 3, "none": None, "half": 0.5, "real": True}
        assert inputs["ids"].tolist() == [4, 2]
        assert inputs["attention_mask"].tolist() == [[0], [0]]
        assert inputs.keys() == plain.keys() | {"ids", "attention_mask"}
    assert text_of(cache) is None
    _, cache = runner.run_with_cache(mode="none", run=lambda: runner.model(torch.ones(1, 3)))
    assert cache.inputs == {}
    with pytest.raises(TypeError, match="missing.*'x'"):
        runner.run_with_cache(lacking=3)


def test_a_cache_refuses_a_model_of_other_weights(tmp_path):
    def linear(by=0.0):
        made = nn.Sequential(nn.Linear(5, 7).requires_grad_(False)).eval()
        made[0].weight.copy_(torch.arange(35.0).view(7, 5))
        made[0].bias.fill_(1)
        made[0].weight[3] += by
        return made

    model = linear()
    _, cache = HookedRunner(model).run_with_cache(torch.ones(2, 5))
    cache.save(tmp_path / "a")
    copies = cache, pickle.loads(pickle.dumps(cache)), ActivationCache.load(tmp_path / "a")
    for one in copies:
        for same in (model, linear(), copy.deepcopy(model)):
            one.require_weights_of(same)
        ActivationCache.load(tmp_path / "a", linear())
        with pytest.raises(CacheError, match="weights"):
            one.require_weights_of(linear(1.0))
        with pytest.raises(CacheError, match="config"):
            one.require_weights_of(nn.Sequential(nn.Linear(7, 5)))
    with pytest.raises(CacheError, match="weights"):
        ActivationCache.load(tmp_path / "a", linear(1.0))
    model[0].weight.zero_()
    with pytest.raises(CacheError, match="a run before 0.weight was changed: run the model again"):
        cache.require_weights_of(model)
    # A file that is written now does not claim the changed weights for the old values.
    cache.save(tmp_path / "b")
    ActivationCache.load(tmp_path / "b").require_weights_of(linear())
    HookedRunner(model).run_with_cache(torch.ones(2, 5))[1].require_weights_of(model)
    del model, same
    # The model of the cache does not exist any more, so its weights cannot be compared.
    cache.require_weights_of(linear(1.0))
