"""ActivationCache: names, slices, options at capture time, and files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hooks import ActivationCache, CacheError, HookedRunner, HookError, HookPoint, UnknownNameError


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


def test_short_forms_count_the_models_layers_not_the_caches(runner, tokens):
    _, cache = runner.run_with_cache(tokens, names="blocks.1.resid_post")
    assert torch.equal(cache["resid_post", -2], cache["blocks.1.resid_post"])
    with pytest.raises(UnknownNameError, match=r"blocks.2.resid_post.*close matches: blocks.1"):
        cache["resid_post", -1]
    with pytest.raises(CacheError, match="needs every layer, and blocks.0.resid_post, blocks.2"):
        cache.stack("resid_post")


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("blocks.1.attn.patern", "close matches: blocks.1.attn.pattern"),
        (("scale", 1), "ambiguous in layer 0: blocks.0.ln1.scale or blocks.0.ln2.scale"),
        (("pattern", 3), "'pattern' has layers 0 to 2, not 3"),
        (("pattern", -4), "'pattern' has layers 0 to 2, not -4"),
        (("embed", 0), r"no value of a layer is named 'embed'; close matches: (?!.*\bembed\b)"),
    ],
)
def test_a_key_that_is_not_there(cache, key, match):
    with pytest.raises(KeyError, match=match):
        cache[key]
    assert cache.get(key) is None


def test_stack_is_layer_first(cache):
    stacked = cache.stack("attn.z")
    assert stacked.shape == (3, 4, 7, 2, 5)
    assert all(torch.equal(stacked[n], cache["z", n]) for n in range(3))


def test_at_slices_by_axis_name_and_drops_integers(cache):
    part = cache.at(pos=slice(5, None), batch=0)
    assert torch.equal(part["resid_mid", 1], cache["resid_mid", 1][0, 5:])
    assert part.axes(("resid_mid", 1)) == ("pos", "d_model")
    assert torch.equal(part["pattern", 1], cache["pattern", 1][0])
    assert torch.equal(cache.at(head=[1, 0])["z", 2], cache["z", 2][:, :, [1, 0]])
    with pytest.raises(UnknownNameError, match="close matches: head"):
        cache.at(heads=1)
    with pytest.raises(ValueError, match="at most one axis takes a list"):
        cache.at(query=[1], key=[2])


def test_to_device_and_dtype(cache):
    double = cache.to(torch.float64)
    assert double["embed"].dtype == torch.float64
    assert double.axes("embed") == ("batch", "pos", "d_model")
    assert cache.to("meta")["q", 0].device.type == "meta"
    assert cache["embed"].dtype == torch.float32


def test_nbytes_counts_shared_memory_once(runner, tokens):
    _, cache = runner.run_with_cache(tokens, names=["blocks.0.resid_post", "blocks.1.resid_pre"])
    assert cache.nbytes == 4 * 7 * 10 * 4
    # Learned positions are one [pos, d_model] slice of the table, whatever the batch.
    _, cache = runner.run_with_cache(tokens, names="blocks.*.mlp.pre")
    assert cache.nbytes == 3 * 4 * 7 * 13 * 4


def test_a_cache_cannot_be_written_to(cache):
    with pytest.raises(TypeError, match="does not support item assignment"):
        cache["embed"] = torch.zeros(1)
    with pytest.raises(TypeError, match="does not support item deletion"):
        del cache["embed"]
    with pytest.raises(CacheError, match="only a lazy cache"):
        cache.drop()


def test_repr_groups_layers(cache):
    text = repr(cache)
    assert text.startswith("ActivationCache of 55 values, ")
    assert "blocks.0-2.attn.pattern    float32 [4, 2, 7, 7]  batch head query key" in text


def test_save_and_load_keep_names_order_axes_and_values(cache, model, tmp_path):
    path = tmp_path / "run.safetensors"
    cache.save(path)
    loaded = ActivationCache.load(path, model)
    assert list(loaded) == list(cache)
    for name, value in cache.items():
        assert torch.equal(loaded[name], value)
        assert loaded.axes(name) == cache.axes(name)
    assert torch.equal(loaded["resid_post", -1], cache["resid_post", -1])
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_saving_a_slice_writes_the_slice_only(cache, tmp_path):
    path = tmp_path / "part.safetensors"
    cache.at(pos=[2]).save(path)
    loaded = ActivationCache.load(path)
    assert torch.equal(loaded["z", 1], cache["z", 1][:, [2]])
    cache.at(batch=slice(0, 1)).save(path)
    assert torch.equal(ActivationCache.load(path)["k", 1], cache["k", 1][:1])


def test_files_that_are_not_whole_caches(cache, tmp_path, runner):
    path = tmp_path / "run.safetensors"
    cache.save(path)
    whole = path.read_bytes()
    for length in (0, 5, 300, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CacheError, match="not a whole safetensors file"):
            ActivationCache.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(CacheError, match=r"not a cache: its format is None"):
        ActivationCache.load(path)
    with pytest.raises(FileNotFoundError):
        ActivationCache.load(tmp_path / "nowhere")


def test_a_failed_save_leaves_the_old_file(cache, tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    cache.save(path)
    before = path.read_bytes()

    def full_disk(values, partial, **kwargs):
        partial.write_bytes(b"some")
        raise OSError("No space left on device")

    monkeypatch.setattr("hooks.storage.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        cache.at(batch=0).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.safetensors"]


def test_a_cache_of_another_configuration_is_refused(cache, tmp_path):
    from models import Transformer, TransformerConfig

    cache.save(tmp_path / "a")
    other = Transformer(TransformerConfig(vocab_size=3, n_ctx=2, n_layers=1, n_heads=1, d_model=2))
    with pytest.raises(CacheError, match="from a model with config hash"):
        ActivationCache.load(tmp_path / "a", other)


def test_config_hash_follows_config_or_shapes(model):
    from hooks.storage import config_hash

    class Described(nn.Linear):
        def __init__(self, size, described):
            super().__init__(size, 2)
            self.config = type("Config", (), {"to_dict": lambda self: described})()

    assert config_hash(nn.Linear(2, 3)) == config_hash(nn.Linear(2, 3))
    assert config_hash(nn.Linear(2, 3)) != config_hash(nn.Linear(3, 2))
    assert config_hash(Described(1, {"a": 1})) == config_hash(Described(4, {"a": 1}))
    assert config_hash(Described(1, {"a": 1})) != config_hash(Described(1, {"a": 2}))
    moved = {"a": 1, "_name_or_path": "b", "use_cache": False, "transformers_version": "5"}
    assert config_hash(Described(1, {"a": 1})) == config_hash(Described(1, moved))
    assert config_hash(Described(1, {"a": {3, 4}})) == config_hash(Described(1, {"a": {4, 3}}))
    assert config_hash(Described(1, {"a": nn.Linear})) != config_hash(Described(1, {"a": nn.GELU}))
    assert config_hash(nn.Linear(2, 3)) != config_hash(nn.Bilinear(1, 2, 3))
    assert config_hash(model) == HookedRunner(model).config_hash


@pytest.mark.parametrize("positions", [[5, 0, -1], slice(2, 6, 3)])
def test_positions_are_cut_at_capture(runner, tokens, positions):
    _, full = runner.run_with_cache(tokens)
    _, part = runner.run_with_cache(tokens, positions=positions)
    assert torch.equal(part["v", 1], full["v", 1][:, positions])
    assert torch.equal(part["pattern", 1], full["pattern", 1][:, :, positions])
    assert torch.equal(part["ln_final.scale"], full["ln_final.scale"][:, positions])
    for value in part.values():
        assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize(
    ("positions", "match"),
    [([3, 7], r"\[3, 7\] do not all lie in the 7 of embed"), ([-8], "do not all"), (slice(7, 9), "select none of the 7")],
)  # fmt: skip
def test_positions_that_are_not_there(runner, tokens, positions, match):
    with pytest.raises(HookError, match=match):
        runner.run_with_cache(tokens, names="embed", positions=positions)


def test_positions_need_axes(runner, tokens):
    with pytest.raises(HookError, match="blocks.0 declares none"):
        runner.run_with_cache(tokens, names="blocks.0", positions=[0])


def test_dtype_and_device_are_applied_at_capture(runner, tokens):
    _, full = runner.run_with_cache(tokens, names="blocks.*.attn.z")
    _, half = runner.run_with_cache(tokens, names="blocks.*.attn.z", dtype=torch.bfloat16)
    assert torch.equal(half["z", 2], full["z", 2].bfloat16())
    _, meta = runner.run_with_cache(tokens, names="blocks.*.attn.z", device="meta")
    assert meta["z", 2].device.type == "meta"


def test_windows_keep_vectors_inside_and_norms_everywhere(runner, tokens):
    windows = torch.zeros(4, 7, dtype=torch.bool)
    windows[0, 2:4] = windows[3, 6] = True
    _, full = runner.run_with_cache(tokens, mode="residual")
    _, cache = runner.run_with_cache(tokens, mode="residual", windows=windows)
    for layer in range(3):
        for short in ("resid_pre", "resid_mid", "resid_post"):
            stream = full[short, layer]
            expected = torch.stack([stream[0, 2], stream[0, 3], stream[3, 6]])
            assert torch.equal(cache[short, layer], expected)
            norms = stream.double().square().sum(-1).sqrt().float()
            torch.testing.assert_close(cache[f"{short}.norm", layer], norms)
        assert torch.equal(cache["pattern", layer], full["pattern", layer])
    assert cache.axes(("resid_mid", 0)) == ("window", "d_model")
    assert cache.axes(("resid_mid.norm", 0)) == ("batch", "pos")
    assert cache.stack("resid_post").shape == (3, 3, 10)
    assert cache.stack("resid_post.norm").shape == (3, 4, 7)
    _, lazy = runner.run_with_cache(tokens, mode="residual", windows=windows, lazy=True)
    assert set(lazy) == set(cache)
    for name in cache:
        torch.testing.assert_close(lazy[name], cache[name], atol=1e-5, rtol=0)


def test_windows_of_another_shape_or_kind(runner, tokens):
    with pytest.raises(HookError, match=r"windows are \[batch, pos\], \(4, 7\) at .*\(4, 9\)"):
        runner.run_with_cache(tokens, mode="residual", windows=torch.ones(4, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="give one of them"):
        runner.run_with_cache(tokens, windows=torch.ones(4, 7, dtype=torch.bool), positions=[1])


def test_windows_without_a_point_of_the_stream_are_refused(runner, tokens):
    windows = torch.ones(4, 7, dtype=torch.bool)
    for call in (runner.run_with_cache, runner.plan, runner.capture):
        with pytest.raises(ValueError, match="none of its points is asked for"):
            call(tokens, names="*.attn.pattern", windows=windows)


@pytest.mark.usefixtures("unchecked")
def test_windows_are_boolean(runner, tokens):
    with pytest.raises(ValueError, match="windows are boolean, not torch.int64"):
        runner.run_with_cache(tokens, windows=torch.ones(4, 7, dtype=torch.int64))


def test_saved_description_is_readable_json(cache, tmp_path):
    from safetensors import safe_open

    cache.save(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        description = json.loads(file.metadata()["cache"])
    assert description["axes"]["blocks.0.attn.q"] == ["batch", "pos", "head", "d_head"]
    assert description["config_hash"] == cache.config_hash


@pytest.mark.usefixtures("unchecked")
def test_indices_of_other_kinds(cache):
    for index in (np.int64(3), torch.tensor(3)):
        assert torch.equal(cache.at(pos=index)["embed"], cache["embed"][:, 3])
        assert cache.at(pos=index).axes("embed") == ("batch", "d_model")
    assert torch.equal(cache.at(pos=np.array([3, 1]))["embed"], cache["embed"][:, [3, 1]])
    with pytest.raises(ValueError, match="at most one axis takes a list"):
        cache.at(query=(1, 2), key=np.array([2, 3]))
    for index in (True, None, 1.0, [True, False], ["a"]):
        with pytest.raises(TypeError, match="an integer, a slice or a list of integers, not"):
            cache.at(pos=index)


@pytest.mark.usefixtures("unchecked")
def test_positions_of_other_kinds(runner, tokens):
    for positions in (np.array([1, 5]), torch.tensor([1, 5]), range(1, 6, 4)):
        _, part = runner.run_with_cache(tokens, names="embed", positions=positions)
        assert part["embed"].shape == (4, 2, 10)
    for positions in (3, "12", [1.0], [True, False], torch.ones(2, 2)):
        with pytest.raises(TypeError, match="a list of integers, not"):
            runner.run_with_cache(tokens, names="embed", positions=positions)


@pytest.mark.usefixtures("unchecked")
def test_keys_of_other_kinds(cache):
    for key in (3, ("pattern", "1"), ("pattern", 1, 2), None):
        with pytest.raises(TypeError, match="a key is a name or a"):
            cache[key]


def test_caches_are_equal_only_to_themselves(cache):
    assert cache == cache
    assert cache != cache.at()
    assert len({cache, cache}) == 1


def test_slices_of_a_partial_cache_still_know_the_models_layers(runner, tokens):
    _, cache = runner.run_with_cache(tokens, names=["blocks.1.resid_post", "blocks.1.mlp"])
    for part in (cache.at(pos=slice(2)), cache.to(torch.float64)):
        with pytest.raises(UnknownNameError):
            part["resid_post", -1]
        with pytest.raises(UnknownNameError):
            part["mlp", -1]


def test_short_forms_where_some_layers_have_no_such_point():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(3, 3)) if n % 2 else nn.ModuleDict({"q": nn.Linear(3, 3)})
                for n in range(5)
            )

        def forward(self, x):
            for block in self.blocks:
                x = block["q"](x) if isinstance(block, nn.ModuleDict) else block(x)
            return x

    _, cache = HookedRunner(Some().eval()).run_with_cache(torch.ones(2, 3))
    assert torch.equal(cache["q", -1], cache["blocks.4.q"])
    assert cache.stack("q").shape == (3, 2, 3)
    with pytest.raises(UnknownNameError, match="has layers 0 to 4, not 3"):
        cache["q", 3]


def test_integers_keep_their_type():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.embed = nn.Identity(), nn.Embedding(2000, 3)

        def forward(self, tokens):
            return self.embed(self.same(tokens))

    runner, tokens = HookedRunner(Tokens().eval()), torch.tensor([257, 1001])
    _, cache = runner.run_with_cache(tokens, dtype=torch.bfloat16)
    assert cache["same"].tolist() == [257, 1001]
    assert cache.to(torch.float16)["same"].tolist() == [257, 1001]


def test_norms_of_half_precision_do_not_overflow():
    model = nn.Sequential()
    model.resid_post = HookPoint("batch pos d_model")
    model.forward = lambda x: model.resid_post(x)
    value = torch.full((1, 1, 4), 60000.0, dtype=torch.float16)
    _, cache = HookedRunner(model.eval()).run_with_cache(
        value, windows=torch.zeros(1, 1, dtype=torch.bool)
    )
    assert cache["resid_post.norm"].item() == 120000.0


def test_slices_carry_gradients(runner, tokens):
    logits, cache = runner.run_with_cache(tokens, names="embed", grads=True)
    logits.sum().backward()
    assert torch.equal(cache.at(pos=3).grads["embed"], cache.grads["embed"][:, 3])
    assert cache.to(torch.float64).grads["embed"].dtype == torch.float64


def test_files_with_our_mark_and_no_whole_description(tmp_path):
    good = {"axes": {"a": ["batch"]}, "known": [], "config_hash": "0"}
    for described in (None, "{", "[]", json.dumps({"axes": {}}), json.dumps(good)):
        metadata = {"format": "hookscope-cache-1"} | (
            {} if described is None else {"cache": described}
        )
        save_file({"b": torch.zeros(2)}, tmp_path / "a", metadata=metadata)
        with pytest.raises(CacheError, match="does not describe its values") as caught:
            ActivationCache.load(tmp_path / "a")
    assert str(caught.value).endswith("names and axes differ")
    metadata["cache"] = json.dumps({"axes": {"b": ["batch"]}, "known": []})
    save_file({"b": torch.zeros(2)}, tmp_path / "a", metadata=metadata)
    expected = r"by \['axes', 'config_hash', 'known'\] but by \['axes', 'known'\]$"
    with pytest.raises(CacheError, match=expected):
        ActivationCache.load(tmp_path / "a")
    with pytest.raises(CacheError, match="not a whole safetensors file"):
        ActivationCache.load(tmp_path)


def test_saving_where_there_is_no_directory(cache, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no directory .*nowhere"):
        cache.save(tmp_path / "nowhere" / "a")
