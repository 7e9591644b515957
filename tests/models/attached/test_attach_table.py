"""`attach` on more than a hundred architectures of `transformers`.

The numbers are the numbers of the model without points, and `remove` leaves nothing behind.
"""

import copy
import functools
import inspect
import types

import pytest
import torch

from hooks import HookedRunner, HookError
from interp import edits
from models import attach
from tests.attachable import BATCH, CACHE, LAYERS, MODELS, POS, VOCAB, config_of, made
from tests.attachable import agree as close

ATTENTION = "attn.q attn.k attn.v attn.scores attn.pattern attn.z"
HIDDEN, LN1, LN2 = "mlp.pre mlp.post", "ln1.scale ln1.normalized", "ln2.scale ln2.normalized"
SHAPE = f"resid_pre {LN1} {ATTENTION} attn_out resid_mid {LN2} {HIDDEN} mlp_out resid_post"

# The points of SHAPE that at least one block of a model does not have. Mixtures of experts also
# lack the hidden values of the MLP.
LACKS = {
    "diffllama": ATTENTION,  # each layer computes attention twice
    "falcon gpt_neox": "resid_mid",
    "openai-gpt": HIDDEN,  # the activation is a function, not a module
    # Only the last block lacks them.
    "gpt_neox_japanese": f"attn_out resid_mid mlp_out {LN2} {HIDDEN}",
    # The second block has linear attention
    "lara_mini qwen3_5_text qwen3_next": f"{ATTENTION} attn_out",
    "jamba lfm2": f"{ATTENTION} attn_out {HIDDEN}",  # a block has a state space, or a convolution
    "bamba lfm2_moe": f"{ATTENTION} attn_out",
    # Parallel blocks with one norm
    "codegen cohere cohere2 cohere2_moe gptj phi": f"resid_mid {LN2}",
    "exaone4 flex_olmo olmo2 olmo3": f"{LN1} {LN2}",  # norms of outputs only
    "modernbert-decoder": LN1,  # the first block has none
    "jetmoe": HIDDEN,
    # The stream is scaled, not only added to.
    "doge": f"attn_out resid_mid mlp_out {LN2} {HIDDEN}",
    "gemma4_text": "resid_mid mlp_out",  # a scaled sum of several
    "granitemoeshared": "resid_mid mlp_out",
}
LACKS = {name: set(lacks.split()) for names, lacks in LACKS.items() for name in names.split()}


@functools.lru_cache(maxsize=1)
def world(name):
    """Return the model, its twins without points, and tokens."""
    w = types.SimpleNamespace(name=name, model=made(name), eager=made(name, "eager"))
    w.sdpa = copy.deepcopy(w.model)
    generator = torch.Generator().manual_seed(1)
    w.tokens, w.others = torch.randint(3, VOCAB, (2, BATCH, POS), generator=generator)
    w.takes = inspect.signature(w.model.forward).parameters
    return w


def run(model, tokens, **given):
    return model(input_ids=tokens, **{"use_cache": False} | given)


def same(ours, theirs, what):
    assert torch.equal(ours, theirs), what


USUAL = SHAPE.split()


# In these models, a sink takes a part of the attention. It is not a key: the pattern does not
# contain its weight, and the model scales z instead.
SINKS = ("granite_swa", "granitemoe_swa")


def twin_of(w, runner):
    """Return the reference for hooks at all points: the eager model if there are patterns."""
    return w.eager if any(name.endswith("pattern") for name in runner.points) else w.sdpa


def logits(w):
    """Check the logits bitwise: with hooks at all points, they equal the model with eager
    attention, and without hooks, they equal the model with sdpa.

    Falcon is compared up to rounding, because its eager code divides where other kernels multiply.
    """
    equal = close if w.name in ("falcon", *SINKS) else same
    with attach(w.model) as attached:
        runner = HookedRunner(w.model)
        names = (f"blocks.{n}.{name}" for n in range(len(w.model.blocks)) for name in USUAL)
        # Each point exists, or `left_out` gives the reason.
        for name in (*names, "ln_final.normalized"):
            reasons = [part for part in attached.left_out if f".{part}." in f".{name}."]
            assert (name in runner.points) or reasons, name
        for part in attached.left_out:
            assert not all(
                f"blocks.{n}.{part}" in runner.points for n in range(len(w.model.blocks))
            )
        output, cache = runner.run_with_cache(input_ids=w.tokens, use_cache=False)
        assert torch.equal(run(w.model, w.tokens).logits, run(w.sdpa, w.tokens).logits)
        twin = twin_of(w, runner)
    patterns = [value for name, value in cache.items() if name.endswith("attn.pattern")]
    theirs = run(twin, w.tokens, output_hidden_states=True, output_attentions=bool(patterns))
    equal(output.logits, theirs.logits, "logits")
    for layer, stream in enumerate(theirs.hidden_states[:LAYERS]):
        equal(cache["resid_pre", layer], stream, "resid_pre")
        if layer:
            equal(cache["resid_post", layer - 1], stream, "resid_post")
    if "ln_final.normalized" in cache:
        equal(cache["ln_final.normalized"], theirs.hidden_states[-1], "ln_final")
    attentions = theirs.attentions if patterns and w.name not in SINKS else ()
    for ours, other in zip(patterns, attentions, strict=w.name not in SINKS):
        equal(ours, other, "pattern")


def points(w):
    with attach(w.model):
        names = HookedRunner(w.model).points
    final = {"ln_final.scale", "ln_final.normalized"} - names.keys()
    assert "embed" in names
    # nanochat runs its final norm twice, so it has no points.
    assert bool(final) == (w.name in [*POST, "nanochat"])
    blocks = [of_layer(names, layer).keys() for layer in range(LAYERS)]
    lacks = LACKS.get(w.name, set()) | set(HIDDEN.split() if "moe_topk" in MODELS[w.name] else ())
    assert set(SHAPE.split()) - set.intersection(*map(set, blocks)) == lacks


def of_layer(cache, layer):
    """Return the values of a layer by their short names."""
    start = f"blocks.{layer}."
    return {n.removeprefix(start): value for n, value in cache.items() if n.startswith(start)}


# The norms of a block, in models whose norms read the sum of the stream and a sublayer.
BART = ("self_attn_layer_norm", "final_layer_norm")
BERT = ("attention.output.LayerNorm", "output.LayerNorm")
POST = dict.fromkeys(("bart", "marian", "plbart"), BART)
POST |= dict.fromkeys(("bert", "electra", "roberta"), BERT) | {"openai-gpt": ("ln_1", "ln_2")}


def norms_of(w, layer):
    if w.name not in POST:
        return [lambda x: x] * 2
    lists = [module for module in w.sdpa.modules() if isinstance(module, torch.nn.ModuleList)]
    block = next(blocks[layer] for blocks in lists if len(blocks) == LAYERS)
    return [block.get_submodule(name) for name in POST[w.name]]


def check_identities(w, cache, edited=()):
    """Check the sums of a cache, such as `resid_mid = resid_pre + attn_out`.

    Args:
        w: the world.
        cache: the values.
        edited: the point that is edited in each row. A sum is not checked in a row in which the
            sum itself or its norm is edited.
    """

    def equal(name, total, norm="none"):
        own = (name, f"{block}{norm}.scale", f"{block}{norm}.normalized")
        rows = [n for n in range(len(total)) if n >= len(edited) or edited[n] not in own]
        close(cache[name][rows], total[rows], name)

    for layer in range(LAYERS):
        at, block = of_layer(cache, layer), f"blocks.{layer}."
        first, second = norms_of(w, layer)
        total = at["resid_pre"] + at.get("attn_out", 0) + at.get("mixer_out", 0)
        if "resid_mid" in at and {"attn_out", "mixer_out"} & at.keys():
            equal(block + "resid_mid", first(total), "ln1" if w.name in POST else "none")
        total = at.get("resid_mid", total)
        if "mlp_out" in at:
            equal(
                block + "resid_post",
                second(total + at["mlp_out"]),
                "ln2" if w.name in POST else "none",
            )
        if "attn.pattern" in at:
            heads = at["attn.pattern"].shape[1]
            v = at["attn.v"].repeat_interleave(heads // at["attn.v"].shape[2], 2)
            equal(block + "attn.z", torch.einsum("bhqk,bkhd->bqhd", at["attn.pattern"], v))


def everywhere(w):
    """Edit each point in one row of a batch. The logits of this row change, the other rows stay the
    same, and all sums hold.
    """
    with attach(w.model):
        runner = HookedRunner(w.model)
        _, plain = runner.run_with_cache(input_ids=w.tokens[:1], use_cache=False)
        # Indices of experts are read only. Edit the weights of experts instead.
        points = [n for n in plain if len(plain[n]) == 1 and plain[n].is_floating_point()]
        tokens = w.tokens[:1].expand(len(points) + 1, POS)

        def edit(row, value, point):
            generator = torch.Generator().manual_seed(row)
            value[row] *= 1 + torch.rand(value[row].shape, generator=generator)

        hooks = {name: functools.partial(edit, row) for row, name in enumerate(points)}
        with runner.hooks(hooks):
            output, cache = runner.run_with_cache(input_ids=tokens, use_cache=False)
    check_identities(w, plain)
    check_identities(w, cache, points)
    moved = (output.logits[:-1] - output.logits[-1]).abs().amax((1, 2))
    assert moved.isfinite().all()
    still = {name.split(".", 2)[-1] for name, gap in zip(points, moved, strict=True) if gap < 1e-4}
    assert still == INERT.get(w.name, set())


# The values of the first points determine the value of the second point.
DETERMINED = {
    ("attn.q", "attn.k", "attn.v"): "attn.z",
    ("attn.scores", "attn.v"): "attn.z",
    ("attn.pattern", "attn.v"): "attn.z",
    ("attn.z",): "attn_out",
    ("mlp.post",): "mlp_out",
}
# In these models z does not determine attn_out, because attention's output is gated, or experts
# read z.
GATED = {"afmoe", "axk2", "dots3_note_text", "jetmoe", "laguna", "qwen3_5_text", "qwen3_next"}
# In these models, other values matter too: the mask of attention depends on values, or later blocks
# read the tokens.
FED = {"doge": ("attn.q", "attn.scores"), "gemma4_text": ("resid_pre", "resid_post")}


def carried(w):
    """Copy values of another text into this text, each kind of value in a row of its own.

    The values that they determine (`DETERMINED`), or the logits, then equal the other text.
    """
    with attach(w.model):
        runner = HookedRunner(w.model)
        _, source = runner.run_with_cache(input_ids=w.others[:1], use_cache=False)
        logits = run(w.model, w.others[:1]).logits[0]
        cases = [
            ([f"blocks.{n}.resid_{p}"], None) for n in range(LAYERS) for p in ("pre", "mid", "post")
        ]
        for sources, target in DETERMINED.items():
            for n in range(LAYERS):
                cases.append(([f"blocks.{n}.{s}" for s in sources], f"blocks.{n}.{target}"))
        cases = [(s, t) for s, t in cases if source.keys() >= {*s, *([t] if t else [])}]
        cases = [(s, t) for s, t in cases if not s[0].endswith(FED.get(w.name, ()))]

        def edit(value, point):
            for row, (sources, _) in enumerate(cases):
                if point.name in sources:
                    value[row] = source[point.name][0]

        hooks = {name: edit for sources, _ in cases for name in sources}
        with runner.hooks(hooks):
            tokens = w.tokens[:1].expand(len(cases), POS)
            output, cache = runner.run_with_cache(input_ids=tokens, use_cache=False)
    for row, (sources, target) in enumerate(cases):
        if target is None:
            close(output.logits[row], logits, sources)
        elif (w.name, target[-8:]) not in [(name, "attn_out") for name in GATED]:
            close(cache[target][row], source[target][0], sources)


# Edits of these scales have no effect, because the next norm removes them. It is a norm of the
# hidden values of the MLP, or of queries, keys and values.
INERT = {"bitnet": {"ln2.scale"}, "gemma4_text": {"ln1.scale"}}
# These models count the columns of the batch with padding, and take no `position_ids`.
COLUMNS = ("bart", "blenderbot", "marian", "mbart", "plbart")


def with_positions(w, mask):
    """Return the arguments for padded texts. Positions count real tokens."""
    given = {"attention_mask": mask}
    if "position_ids" in w.takes:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return given


def padding(w):
    """Check that a padded text has the same values as the text alone."""
    lengths = (POS, 4, 6)
    for side in ("right",) if w.name in COLUMNS else ("left", "right"):
        mask = torch.zeros(BATCH, POS, dtype=torch.long)
        for row, length in enumerate(lengths):
            mask[row, slice(length) if side == "right" else slice(POS - length, None)] = 1
        tokens = w.tokens * mask
        with attach(w.model):
            runner = HookedRunner(w.model)
            run_with_cache = functools.partial(runner.run_with_cache, use_cache=False)
            output, cache = run_with_cache(input_ids=tokens, **with_positions(w, mask))
            theirs = run(twin_of(w, runner), tokens, **with_positions(w, mask)).logits
            for row, length in enumerate(lengths):
                real = mask[row].nonzero()[:, 0]
                alone = with_positions(w, torch.ones(1, length, dtype=torch.long))
                single, values = run_with_cache(input_ids=w.tokens[row, real][None], **alone)
                # With sinks, the sums are computed in another order.
                bound = 1e-5 if w.name in SINKS else 1e-6
                close(output.logits[row, real], theirs[row, real], "twin", bound)
                close(output.logits[row, real], single.logits[0], "logits")
                for name in values:
                    ours = cache[name][row]
                    for dim, axis in enumerate(runner.points[name].axes[1:]):
                        if axis in ("pos", "query", "key"):
                            ours = ours.index_select(dim, real)
                    close(ours, values[name][0], name)


def keeps_heads(w):
    """Return True if the cache of a model contains the keys and values of heads.

    Some models store the vectors from which keys and values are computed.
    """
    _, cache = HookedRunner(w.model).run_with_cache(input_ids=w.tokens, use_cache=False)
    if "blocks.0.attn.k" not in cache:
        return True
    kept = getattr(run(w.model, w.tokens, use_cache=True), CACHE, None)
    # openai-gpt has no cache of keys.
    if kept is None:
        return True
    return kept.layers[0].keys.shape[1] == cache["attn.k", 0].shape[2]


def generation(w):
    """Check an edit at a position of the text, in the prompt and in the steps of a generation.

    It has the effect of the same edit in one run of the whole text.
    """
    sites = ["resid_pre", "attn_out", "mlp_out", "attn.q", "attn.k", "attn.v", "attn.z"]
    with attach(w.model):
        runner = HookedRunner(w.model)
        keeps = keeps_heads(w)
        # In doge, the masks of later steps depend on the values.
        if not keeps or w.name == "doge":
            sites.remove("attn.k")
            sites.remove("attn.v")
        if not keeps:
            with pytest.raises(HookError, match="keys"):
                runner.run_with_hooks(input_ids=w.tokens, hooks={"*.attn.k": edits.scale(1.5)})
        names = [f"blocks.{n}.{site}" for n in range(LAYERS) for site in sites]
        names = [name for name in names if name in runner.points]
        hooks = {name: edits.scale(1.5, pos=[1, 5]) for name in names}
        with runner.hooks(hooks):
            made = w.model.generate(
                w.tokens[:, :4],
                attention_mask=torch.ones_like(w.tokens[:, :4]),
                max_new_tokens=4,
                use_cache=True,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            assert made[CACHE] is not None
            texts = made.sequences[:, :-1]
            given = with_positions(w, torch.ones_like(texts))
            full = run(w.model, texts, **given).logits
        plain = run(w.model, texts, **given).logits
    assert made.sequences.shape == (BATCH, 8)
    for step, ours in enumerate(made.logits):
        close(ours, full[:, 3 + step], f"step {step}")
    assert (full - plain).abs().max() > 1e-3


def one_config(w):
    """Check that `attach` does not change another model that has the same config object."""
    config = config_of(w.name)
    one = made(w.name, config=config)
    two = copy.deepcopy(one, {id(config): config})
    with attach(one):
        runner = HookedRunner(one)
        name = "blocks.0.resid_post"
        with runner.hooks({name: lambda value, point: value * 0}):
            edited = run(one, w.tokens).logits
            assert torch.equal(run(two, w.tokens).logits, run(w.sdpa, w.tokens).logits)
        assert not torch.equal(edited, run(w.sdpa, w.tokens).logits)


def seen(model):
    """Return everything that `attach` could leave behind in a model, to compare it."""
    state = {name: (id(module), dict(vars(module))) for name, module in model.named_modules()}
    inner = {
        name: {k: dict(v) for k, v in fields.items() if isinstance(v, dict)}
        for name, (_, fields) in state.items()
    }
    return state, inner, [*model.state_dict()], copy.deepcopy(model.config.to_dict())


def removal(w):
    before, (state, inner, keys, config) = run(w.model, w.tokens).logits, seen(w.model)
    with attach(w.model) as attached:
        assert [*w.model.state_dict()] == keys
        assert attach(w.model) is attached
        HookedRunner(w.model).run_with_cache(input_ids=w.tokens, use_cache=False)
    after = seen(w.model)
    assert after[0].keys() == state.keys()
    for name in state:
        assert state[name][0] == after[0][name][0], name
        assert state[name][1].keys() == after[0][name][1].keys(), name
        for field, value in state[name][1].items():
            assert after[0][name][1][field] is value, (name, field)
        assert {k: v.keys() for k, v in inner[name].items()} == {
            k: v.keys() for k, v in after[1][name].items()
        }
    assert after[2:] == (keys, config)
    assert torch.equal(run(w.model, w.tokens).logits, before)


JOBS = [points, logits, everywhere, carried, padding, generation, one_config, removal]


def pytest_generate_tests(metafunc):
    """Make the cases: a job is one of the checks above, and runs on one architecture.

    With --full, every job runs on every architecture. Otherwise two jobs run on each architecture,
    and the next architecture gets other jobs.
    """
    count = len(JOBS) if metafunc.config.getoption("full") else 2
    cases = [
        (name, JOBS[(n + i * 3) % len(JOBS)]) for n, name in enumerate(MODELS) for i in range(count)
    ]
    metafunc.parametrize("name, job", cases, ids=lambda part: getattr(part, "__name__", part))


@pytest.mark.sampled(24)
@torch.no_grad()
def test_attached(name, job):
    job(world(name))
