"""A model on several devices: the copies between them, and the same numbers as on one device."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_map

import interp
from hooks import HookedRunner
from interp import edits, logit_diff, sweep
from models import KVCache, Transformer, TransformerConfig, attach
from tests.analyses import ANALYSES, CLEAN, REAL, cached
from tests.pretended import DEVICE, SECOND, Devices, split
from tests.reference import BATCH, POS, SIZES, VARIANTS, VOCAB, separately, some_tokens, variant


@pytest.fixture
def devices():
    with Devices() as devices:
        yield devices


@torch.no_grad()
def moves(name, layers, cache, *places):
    """Return the copies between devices in a run of a padded text.

    With a cache of keys, one more token is read after the text.
    """
    config = TransformerConfig(**SIZES | VARIANTS[name] | dict(n_layers=layers))
    with Devices() as devices:
        model, found = split(Transformer(config).eval(), *places), []
        tokens = torch.zeros(BATCH, POS, dtype=torch.long, device=DEVICE)
        mask, cache = torch.ones(BATCH, POS, dtype=torch.bool, device=DEVICE), cache and cache()
        for piece, given in ((tokens, mask), (tokens[:, :1], None))[: 1 + (cache is not None)]:
            devices.moves.clear()
            logits, values = HookedRunner(model).run_with_cache(
                piece, attention_mask=given, kv_cache=cache, names="*.resid_post"
            )
            found.append([move for move in devices.moves if move[1].type != "cpu"])
            assert (logits.shape, logits.device) == ((*piece.shape, VOCAB), DEVICE)
            for layer in range(layers):
                assert values["resid_post", layer].device == places[layer * len(places) // layers]
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "name", ["pre", "like llama", "like gemma 3", "window of one layer", "sinusoidal"]
)
@pytest.mark.parametrize("cache", [None, KVCache])
def test_stream_and_context_move_once_per_change_of_device(name, cache):
    assert not any(moves(name, 2, cache, DEVICE))
    found = moves(name, 2, cache, DEVICE, SECOND)
    assert found == moves(name, 5, cache, DEVICE, SECOND)
    for moved, width in zip(found, (POS, 1), strict=False):
        streams = [place for shape, place in moved if shape == (BATCH, width, SIZES["d_model"])]
        assert streams == [SECOND, DEVICE]
        assert all(place == SECOND for _, place in moved[:-1])


def noted(model):
    """Return a list that gets the layer, the rows and the positions of each call of a block."""
    calls = []
    for layer, block in enumerate(model.blocks):

        def forward(resid, context, layer=layer, block=block):
            calls.append((layer, *resid.shape[:2]))
            return type(block).forward(block, resid, context)

        block.forward = forward
    return calls


APART = dict.fromkeys(("token_embedding", "position_embedding"), SECOND)


@pytest.mark.parametrize(
    ("name", "mask", "apart"),
    [("pre", {}, {}), ("like gemma 2", {"attention_mask": REAL}, {}), ("untied", {}, APART)],
)
def test_a_sweep_resumes_as_on_one_device(devices, name, mask, apart):
    model, there = (variant(name, n_layers=5) for _ in range(2))
    split(there, DEVICE, SECOND, DEVICE, **apart)
    tokens, metric = some_tokens(), logit_diff(3, 1)
    at = ["embed", "blocks.0.attn.z", "blocks.1.resid_pre", "blocks.3.mlp_out", "blocks.4.attn.v"]
    given = [{point: edits.scale(0.3, pos=[4, 6])} for point in at]
    alone = [separately(model, tokens, [edit], metric, **mask) for edit in given]
    with torch.no_grad():
        there(tokens, **mask)
    once, calls = [*devices.moves], noted(there)
    devices.moves.clear()
    found = sweep(there, tokens, given, metric, **mask).values
    # The calls are the unedited run, a run that measures memory, and the edited rows. Each row
    # begins at the block that it changes first.
    rows = zip(range(5), (10, 15, 15, 20, 25), strict=True)
    assert calls == [
        *((n, BATCH, POS) for n in range(5)),
        (0, BATCH, POS),
        *((*row, 3) for row in rows),
    ]
    assert devices.moves[: len(once)] == once
    resumed = [(*shape, place) for shape, place in devices.moves[len(once) :]]
    width = SIZES["d_model"]
    assert resumed[-2:] == [(15, 3, width, SECOND), (20, 3, width, DEVICE)]
    # Before that, the output of each block is compared with the input of the next block.
    assert apart or resumed[:-2] == [(BATCH, POS, width, place) for place in (DEVICE, SECOND)]
    torch.testing.assert_close(found.cpu(), torch.cat(alone))


def test_what_is_read_of_all_layers_is_where_the_first_is(devices):
    there = split(variant("pre", n_layers=3), SECOND, DEVICE, SECOND)
    cache = HookedRunner(there).run_with_cache(some_tokens(), names="*.z")[1]
    assert there.W_Q.device == there.b_out.device == cache.stack("z").device == SECOND


@pytest.mark.sampled(32)
@pytest.mark.filterwarnings("ignore:.* should add up")
@pytest.mark.parametrize("analysis", ANALYSES.values(), ids=ANALYSES)
def test_an_analysis_gives_the_numbers_of_one_device(devices, analysis):
    changes = dict(n_layers=2, n_kv_heads=3, positions="rotary", tied_unembed=False)
    model, there = (variant("sandwich", **changes) for _ in range(2))
    split(there, DEVICE, SECOND, token_embedding=SECOND)
    expected, found = analysis(model), analysis(there)
    found = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, found)
    torch.testing.assert_close(found, expected, equal_nan=True)


# Analyses that run on every attached model, and analyses that also need views of weights.
OF_POINTS = ["attribution", "logit lens", "heads"]
OF_WEIGHTS = ["edges", "paths to logits", "logits", "why, from a cache on the CPU"]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *((kind, OF_POINTS + OF_WEIGHTS) for kind in ("llama", "gpt2", "cohere2", "qwen3_moe")),
        ("gemma2", OF_POINTS + OF_WEIGHTS[:2]),
        ("gpt_oss", [*OF_POINTS, "edges", "logits"]),
        ("deepseek_v3", OF_POINTS),
    ],
)
def test_an_attached_model_gives_the_numbers_of_the_cpu(devices, kind, names):
    made = pytest.importorskip("tests.attachable", reason="needs the extra hf").made
    model = made(kind)
    there, plain = (copy.deepcopy(model).to(DEVICE) for _ in range(2))
    attach(model)
    attach(there)
    assert torch.equal(there(CLEAN).logits.cpu(), plain(CLEAN.to(DEVICE)).logits.cpu())
    _, cache = interp.run_with_cache(there, CLEAN)
    expected = dict(cached(model).items())
    torch.testing.assert_close({n: v.cpu() for n, v in cache.items()}, expected)
    for name in names:
        found = tree_map(lambda x: x.cpu() if torch.is_tensor(x) else x, ANALYSES[name](there))
        torch.testing.assert_close(found, ANALYSES[name](model), equal_nan=True)
