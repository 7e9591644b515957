"""Attached models whose residual stream has several vectors for each token.

The references are copies of the models with PyTorch's own hooks.
"""

import copy

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookError
from interp import (
    Pairs,
    activation_patching,
    decompose,
    direct_logit_attribution,
    edge_attribution,
    edits,
    jacobian_lens,
    log_prob,
    logit_lens,
    tuned_lens,
)
from models import attach
from tests.attachable import BATCH, CACHE, LAYERS, MORE, POS, TOKENS, agree, config_of, made

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

KINDS = [kind for kind in ("deepseek_v4", "gemma3n_text", "hy_v4") if kind in MORE]
OTHERS = TOKENS.flip(0, 1)
N_STREAMS, D_MODEL = 3, 24

# The modules of a block whose outputs are the values of points. Gemma 3n has norms after both
# sublayers. The other two models read all vectors in a module before the MLP.
OUTPUTS = {
    "deepseek_v4": {"attn_out": "self_attn", "mlp_out": "mlp", "ln1": "input_layernorm"},
    "hy_v4": {"attn_out": "self_attn", "mlp_out": "mlp", "ln1": "input_layernorm"},
    "gemma3n_text": {
        "attn_out": "post_attention_layernorm",
        "mlp_out": "post_feedforward_layernorm",
        "ln1": "input_layernorm",
    },
}


def logits_of(model, tokens=TOKENS):
    return model(input_ids=tokens, use_cache=False).logits


def raw(kind, tokens=TOKENS):
    """Return the logits and the values of a model without points, by PyTorch's own hooks."""
    twin = made(kind, "eager")
    values = {}
    attended = {}
    handles = []

    def first(value):
        return value[0] if isinstance(value, tuple) else value

    def third(stream):
        return stream.movedim(0, 2) if kind == "gemma3n_text" else stream

    def keep(name, change=lambda value: value):
        return lambda module, args, output: values.update({name: change(first(output)).clone()})

    for n, block in enumerate(twin.model.layers):
        start = f"blocks.{n}."
        for name, path in OUTPUTS[kind].items():
            name = f"{name}.normalized" if name == "ln1" else name
            handles.append(block.get_submodule(path).register_forward_hook(keep(start + name)))
        handles.append(block.register_forward_hook(keep(f"{start}resid_post", third)))

        def entering(module, args, start=start):
            values[f"{start}resid_pre"] = third(args[0]).clone()

        handles.append(block.register_forward_pre_hook(entering))
        if hasattr(block, "ffn_hc"):

            def between(module, args, start=start):
                values[f"{start}resid_mid"] = args[0].clone()

            handles.append(block.ffn_hc.register_forward_pre_hook(between))
        attended[block.self_attn] = start

    kernel = transformers.AttentionInterface()
    module = __import__(type(twin).__module__, fromlist=["eager_attention_forward"])

    def attention(attending, q, k, v, mask, **kwargs):
        z, pattern = module.eager_attention_forward(attending, q, k, v, mask, **kwargs)
        start = attended[attending] + "attn."
        own = q.shape[2]
        values[f"{start}q"] = q.transpose(1, 2).clone()
        values[f"{start}k"] = k[:, :, :own].transpose(1, 2).clone()
        values[f"{start}v"] = v[:, :, :own].transpose(1, 2).clone()
        values[f"{start}pattern"] = pattern[..., :own].clone()
        values[f"{start}z"] = z.clone()
        return z, pattern

    # Only calls of this model's classes change.
    interface = type(kernel).get_interface
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(kernel), "get_interface", lambda *args: attention)
        logits = logits_of(twin, tokens)
    assert type(kernel).get_interface is interface
    return logits, values


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_points_have_the_values_of_raw_hooks(kind):
    model = made(kind, "eager")
    before = logits_of(model)
    expected, values = raw(kind)
    assert torch.equal(before, expected)
    with attach(model) as attached:
        runner = HookedRunner(model)
        # Points change no number.
        assert torch.equal(logits_of(model), expected)
        output, cache = runner.run_with_cache(TOKENS, use_cache=False)
        agree(output.logits, expected)
        stream = runner.points["blocks.1.resid_pre"]
        assert stream.axes == ("batch", "pos", "stream", "d_model")
        assert cache["resid_pre", 1].shape == (BATCH, POS, N_STREAMS, D_MODEL)
        assert values.keys() <= cache.keys()
        for name, value in values.items():
            agree(cache[name], value, name)
        agree(cache["embed"], values["blocks.0.resid_pre"][:, :, 0])
        assert ("resid_mid" in attached.left_out) == (kind == "gemma3n_text")
        assert not {"attn_out", "mlp_out", "scores", "ln_final"} & {*attached.left_out}
        _, lazy = runner.run_with_cache(TOKENS, use_cache=False, lazy=True)
        for name in values:
            agree(lazy[name], values[name], name)
        captured = runner.capture(TOKENS, names="blocks.1.attn_out", use_cache=False)
        agree(captured["attn_out", 1], values["blocks.1.attn_out"])
    assert torch.equal(logits_of(model), expected)


@torch.no_grad()
def each_point_matters(kind):
    """Edit each point in one row of a batch. The logits of this row change."""
    model = made(kind)
    with attach(model):
        runner = HookedRunner(model)
        _, plain = runner.run_with_cache(TOKENS[:1], use_cache=False)
        points = [name for name in plain if plain[name].is_floating_point()]

        def edit(row, value, point):
            generator = torch.Generator().manual_seed(row)
            value[row] *= 1 + torch.rand(value[row].shape, generator=generator)

        hooks = {}
        for row, name in enumerate(points):
            hooks[name] = lambda value, point, row=row: edit(row, value, point)
        tokens = TOKENS[:1].expand(len(points) + 1, POS)
        logits = runner.run_with_hooks(tokens, hooks=hooks, use_cache=False).logits
    moved = (logits[:-1] - logits[-1]).abs().amax((1, 2))
    assert moved.isfinite().all()
    still = {name for name, gap in zip(points, moved, strict=True) if gap < 1e-4}
    # All that the first layer of DeepSeek V4 computes from this norm is normalized again.
    assert still == ({"blocks.0.ln1.scale"} if kind == "deepseek_v4" else set())


def edited_by_hand(kind, path, edit):
    """Return the logits of a model whose module has another output or input, by a raw hook."""
    twin = made(kind)
    handle = twin.get_submodule(path).register_forward_hook(edit)
    logits = logits_of(twin)
    handle.remove()
    return logits


@torch.no_grad()
def edits_are_raw_edits(kind):
    """Edit one vector of the stream, and steer attention. Raw hooks give the same logits."""
    axis = 0 if kind == "gemma3n_text" else 2
    vector = torch.linspace(-1, 2, D_MODEL)

    def without_second(module, args, output):
        stream = output[0] if isinstance(output, tuple) else output
        changed = stream.clone()
        changed.select(axis, 1).zero_()
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def steered(module, args, output):
        if isinstance(output, tuple):
            return output[0] + vector, *output[1:]
        return output + vector

    expected = [
        edited_by_hand(kind, "model.layers.0", without_second),
        edited_by_hand(kind, f"model.layers.1.{OUTPUTS[kind]['attn_out']}", steered),
    ]
    model = made(kind)
    hooks = [
        {"blocks.0.resid_post": edits.zero(stream=1)},
        {"blocks.1.attn_out": edits.add(vector)},
    ]
    with attach(model):
        for hook, other in zip(hooks, expected, strict=True):
            output = HookedRunner(model).run_with_hooks(TOKENS, hooks=hook, use_cache=False)
            agree(output.logits, other)


@torch.no_grad()
def patching(kind):
    """Check that patching has the effects of patching by hand."""
    model = made(kind)
    metric = log_prob(5)
    with attach(model):
        runner = HookedRunner(model)
        _, clean = runner.run_with_cache(OTHERS, use_cache=False)
        base = metric(logits_of(model))
        pairs = Pairs(OTHERS, TOKENS, metric=metric)
        by_head = activation_patching(model, pairs, site="z", over=("layer", "head")).values
        by_layer = activation_patching(model, pairs, site="mlp_out", over=("layer",)).values

        def effect(name, **where):
            hook = {name: edits.replace(clean[name], **where)}
            output = runner.run_with_hooks(TOKENS, hooks=hook, use_cache=False)
            return metric(output.logits) - base

        for layer in range(LAYERS):
            agree(by_head[layer, 2], effect(f"blocks.{layer}.attn.z", head=2), tolerance=1e-4)
            agree(by_layer[layer], effect(f"blocks.{layer}.mlp_out"), tolerance=1e-4)


def refusals(kind):
    """Check that analyses of one vector for each token raise an error with the reason."""
    model = made(kind)
    reason = "3 vectors for each token|one vector (of the stream )?for each token"
    with attach(model):
        _, cache = HookedRunner(model).run_with_cache(TOKENS, use_cache=False)
        pairs = Pairs(OTHERS, TOKENS, metric=log_prob(5))
        calls = [
            lambda: logit_lens(model, cache),
            lambda: decompose(model, cache),
            lambda: direct_logit_attribution(model, cache),
            lambda: edge_attribution(model, pairs),
            lambda: tuned_lens(model, TOKENS),
            lambda: jacobian_lens(model, TOKENS, skip=1),
        ]
        for call in calls:
            with pytest.raises((TypeError, ValueError), match=reason) as caught:
                call()
            assert "\n" not in str(caught.value)


@torch.no_grad()
def generation(kind):
    """Check that edits at positions act in the steps of a generation."""
    model = made(kind)
    hooks = {
        "blocks.0.attn_out": edits.scale(1.5, pos=[1, 5]),
        "blocks.1.resid_pre": edits.scale(1.5, pos=[1, 5], stream=0),
        "blocks.*.attn.z": edits.scale(1.5, pos=[2, 4]),
    }
    with attach(model):
        runner = HookedRunner(model)
        with runner.hooks(hooks):
            written = model.generate(
                TOKENS[:, :4],
                attention_mask=torch.ones_like(TOKENS[:, :4]),
                max_new_tokens=4,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            assert written[CACHE] is not None
            whole = logits_of(model, written.sequences[:, :-1])
        for step, ours in enumerate(written.logits):
            agree(ours, whole[:, 3 + step], f"step {step}")
        if kind == "deepseek_v4":
            # One tensor of the cache is both the keys and the values.
            with pytest.raises(HookError, match="one tensor"):
                runner.run_with_hooks(TOKENS, hooks={"blocks.0.attn.k": edits.scale(2)})


JOBS = [each_point_matters, edits_are_raw_edits, patching, refusals, generation]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_streams_of_several_vectors(job, kind):
    job(kind)


@torch.no_grad()
def test_keys_of_several_positions_are_not_keys_of_positions():
    if "deepseek_v4" not in KINDS:
        pytest.skip("needs another transformers")
    kind = "deepseek_v4"
    twin = made(kind)
    # Two windows of three tokens have one key each, after the keys of the seven tokens.
    seen = []
    compressor = twin.model.layers[1].self_attn.compressor
    handle = compressor.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    logits_of(twin)
    handle.remove()
    assert seen[0].shape[2] == 2
    model = made(kind)
    with attach(model):
        runner = HookedRunner(model)
        _, cache = runner.run_with_cache(TOKENS, use_cache=False)
        assert cache["pattern", 1].shape[2:] == (POS, POS)
        assert cache["k", 1].shape[:2] == (BATCH, POS)
        # An edit of a key changes only queries that see it.
        hook = {"blocks.1.attn.scores": edits.add(torch.tensor(3.0), key=4)}
        with runner.hooks(hook):
            _, changed = runner.run_with_cache(TOKENS, names="blocks.1.attn.*", use_cache=False)
        gap = (changed["pattern", 1] - cache["pattern", 1]).abs().amax((0, 1, 3))
        assert not gap[:4].any()
        assert (gap[4:] > 0).all()


@pytest.mark.parametrize("kind", ["deepseek_v32", "hy_v4"])
@torch.no_grad()
def test_texts_that_are_longer_than_the_chosen_keys_have_the_logits_of_the_model(kind):
    """`attach` runs 7 tokens, which all fit among the 9 keys that each query chooses."""
    config = config_of(kind)
    config.index_topk = 9
    model = made(kind, config=config)
    twin = copy.deepcopy(model)
    tokens = torch.cat([TOKENS, OTHERS], 1)
    with attach(model):
        assert torch.equal(logits_of(model, tokens), logits_of(twin, tokens))
        output, _ = HookedRunner(model).run_with_cache(tokens, use_cache=False)
        agree(output.logits, logits_of(twin, tokens))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        q, k, v = (map_(x).unflatten(-1, (2, 6)).transpose(1, 2) for map_ in self.maps[:3])
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = torch.matmul(q, k.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        z = torch.matmul(torch.softmax(scores, -1), v)
        return self.maps[3](z.transpose(1, 2).flatten(2))


class Mean(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, streams):
        return streams.mean(self.axis)


class Block(nn.Module):
    """A block of a model of one's own, with two vectors for each token.

    With `copies`, the modules that combine the vectors read copies of them.
    """

    def __init__(self, axis, copies):
        super().__init__()
        self.axis, self.copies = axis, copies
        self.combine_one, self.combine_two = Mean(axis), Mean(axis)
        self.one = Attention()
        self.two = nn.Sequential(nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12))

    def forward(self, streams):
        for combine, sublayer in ((self.combine_one, self.one), (self.combine_two, self.two)):
            output = sublayer(combine(streams.clone() if self.copies else streams))
            streams = streams + torch.stack([output, output * 0.5], self.axis)
        return streams


class Twofold(nn.Module):
    def __init__(self, axis, copies):
        super().__init__()
        self.axis = axis
        self.embed_tokens = nn.Embedding(29, 12)
        self.layers = nn.ModuleList(Block(axis, copies) for _ in range(2))
        self.head = nn.Linear(12, 29)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        streams = torch.stack([x, x * 2], self.axis)
        for layer in self.layers:
            streams = layer(streams)
        return self.head(streams.sum(self.axis))


@pytest.mark.parametrize(("axis", "copies"), [(0, False), (2, True)])
@torch.no_grad()
def test_a_model_of_one_s_own_has_the_points_of_its_sublayers(axis, copies):
    model = Twofold(axis, copies).eval()
    expected = model(TOKENS)
    outputs = []
    handle = model.layers[1].two.register_forward_hook(lambda *call: outputs.append(call[-1]))
    model(TOKENS)
    handle.remove()
    with attach(model) as attached:
        logits, cache = HookedRunner(model).run_with_cache(TOKENS)
        agree(logits, expected)
        # An edit of a copy would not change the later stream.
        assert ("resid_mid" in attached.left_out) == copies
        if not copies:
            half = (cache["attn_out", 0], cache["attn_out", 0] * 0.5)
            agree(cache["resid_mid", 0], cache["resid_pre", 0] + torch.stack(half, 2))
        agree(cache["mlp_out", 1], outputs[0])
        # The second vector gets half of each output.
        change = cache["resid_post", 1] - cache["resid_pre", 1]
        agree(change[:, :, 0], cache["attn_out", 1] + cache["mlp_out", 1])
        agree(change[:, :, 1] * 2, change[:, :, 0])
        assert cache["pattern", 0].shape == (BATCH, 2, POS, POS)
        hook = {"blocks.0.resid_post": edits.zero(stream=slice(None))}
        without = HookedRunner(model).run_with_hooks(TOKENS, hooks=hook)
    # Without a stream, the last block sees the same zeros at all positions.
    agree(without, without[:1, :1].expand_as(without))
