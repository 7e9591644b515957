"""Attached models that read a text in several pieces, as in a generation.

Positions must be right with padding, in models that keep a state instead of keys, and with virtual
tokens (the trained vectors of prefix tuning and prompt tuning).
"""

import copy
import re
import warnings
from functools import partial

import pytest
import torch

from hooks import HookedRunner, HookError, SelectionError, start_of_piece
from interp import edits, head_scores, logit_lens
from models import attach, skip_token_checks
from tests import attachable, tiny
from tests.attachable import CACHE, made
from tests.shipped import pydoc

transformers = attachable.transformers
ROWS = [[3, 5, 7, 2, 9], [4, 6], [8, 3, 5]]
# These models take no `position_ids`. They count the columns of the batch.
WITHOUT_POSITIONS = {"bart", "blenderbot", "marian", "mbart", "plbart"}


def padded(rows, width):
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", attachable.MODELS)
@torch.no_grad()
def test_left_padding_changes_no_number_of_any_architecture(name):
    model = made(name)
    alone = [model(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    tokens, mask = padded(ROWS, 6)
    with attach(model):
        if name in WITHOUT_POSITIONS:
            with pytest.raises(ValueError, match="must be padded on the right"):
                model(tokens, attention_mask=mask, use_cache=False)
            right = mask.flip(1)
            model(tokens, attention_mask=right, use_cache=False)
            return
        forms = [dict(attention_mask=mask), dict(attention_mask=mask.bool())]
        for form in forms:
            logits = model(tokens, **form, use_cache=False).logits
            for n, row in enumerate(ROWS):
                allowed = 2e-5 * float(alone[n].abs().max())
                torch.testing.assert_close(logits[n, -len(row) :], alone[n], rtol=0, atol=allowed)
        assert torch.equal(
            HookedRunner(model).run_with_hooks(tokens, **form, use_cache=False).logits, logits
        )


@pytest.mark.parametrize("name", ["gpt2", "stablelm", "roberta"])
@torch.no_grad()
def test_positions_with_padding_for_all_kinds_of_calls(name):
    model = made(name)
    tokens, mask = padded(ROWS, 6)
    counted = (mask.cumsum(1) - 1).clamp(min=0) + (name == "roberta")
    wanted = model(tokens, attention_mask=mask, position_ids=counted).logits
    others = model(tokens, attention_mask=mask, position_ids=counted + 2).logits
    with attach(model):
        assert torch.equal(
            model(tokens, attention_mask=mask, position_ids=counted + 2).logits, others
        )
        embeddings = model.get_input_embeddings()(tokens)
        if name != "roberta":  # roberta adds an offset to the positions
            found = model(inputs_embeds=embeddings, attention_mask=mask).logits
            torch.testing.assert_close(found, wanted)
        # With a cache of keys, the positions are the positions of the new tokens.
        first = model(tokens[:, :4], attention_mask=mask[:, :4], use_cache=True)
        second = model(tokens[:, 4:], attention_mask=mask, **{CACHE: first[CACHE]})
        found = torch.cat([first.logits, second.logits], 1)
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("shape", [(2, 3), (2, 9), (1, 6)])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_mask_of_another_shape_is_an_error(name, shape):
    """Otherwise `transformers` fills a short mask, and position -1 would be another token."""
    model = made(name)
    tokens = torch.arange(12).view(2, 6)
    with attach(model), pytest.raises(ValueError, match=r"attention_mask must be.* \[2, 6\]"):
        HookedRunner(model).run_with_cache(tokens, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_mask_of_other_numbers_is_an_error_as_in_a_plain_model(name):
    tokens, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4] = 2
    model, plain = made(name), pydoc()
    with pytest.raises(ValueError, match="got 2") as of_plain:
        plain(tokens, attention_mask=mask)
    with attach(model):
        with pytest.raises(ValueError, match=re.escape(str(of_plain.value))):
            HookedRunner(model).run_with_cache(tokens, attention_mask=mask)
        with skip_token_checks():
            HookedRunner(model).run_with_cache(tokens, attention_mask=mask)


STATES = {
    "mamba": dict(state_size=5, time_step_rank=3),
    "mamba2": dict(state_size=5, num_heads=4, head_dim=12, n_groups=1, expand=2),
    "falcon_mamba": dict(state_size=5, time_step_rank=3),
    "rwkv": dict(attention_hidden_size=24),
    "recurrent_gemma": dict(lru_width=24, attention_window_size=4, num_hidden_layers=3),
}


@pytest.fixture(params=STATES)
def stateful(request, monkeypatch):
    """An attached model that keeps a state instead of keys and values."""
    monkeypatch.setitem(attachable.MODELS, request.param, STATES[request.param])
    model = made(request.param)
    with attach(model):
        yield model


@pytest.mark.filterwarnings("ignore")  # models warn that they use slow code
@torch.no_grad()
def test_edits_of_generation_count_from_the_start_of_the_text_without_keys(stateful):
    model, runner = stateful, HookedRunner(stateful)
    prompt = torch.tensor([ROWS[0]])
    new = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = model.generate(prompt, **new)
    seen = []
    with runner.hooks({"blocks.0.resid_post": lambda v, point: seen.append(start_of_piece())}):
        model.generate(prompt, **new)
    assert seen == [0, 5, 6, 7]
    # Edit one column, and compare the logits of the generation with a run of the whole text.
    vector = torch.full((24,), 3.0)
    for pos in (2, 6):
        hooks = {"blocks.1.resid_post": edits.add(vector, pos=pos)}
        with runner.hooks(hooks):
            written = model.generate(prompt, **new)
            whole = model(written[:, :-1], use_cache=False).logits
        assert torch.equal(whole[0, 4:].argmax(-1), written[0, 5:])
        assert torch.equal(written[:, : pos + 1], plain[:, : pos + 1])


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "pos", [-1, -2, slice(-1, None), slice(-3, -1), [-2, -1], slice(5, None), 7]
)
@pytest.mark.parametrize("name", ["llama", "mpt", "gemma3_text", "phi"])
@torch.no_grad()
def test_edits_of_generation_without_a_cache_act_as_with_one(name, pos):
    model = made(name)
    own = model.generate
    prompt, mask = padded(ROWS[:1] if pos == 7 else ROWS, 5)
    new = dict(
        attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    vector = 30 * torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    plain = model.generate(prompt, **new)
    with attach(model):
        with HookedRunner(model).hooks({"blocks.0.resid_post": edits.add(vector, pos=pos)}):
            cached, whole = (model.generate(prompt, use_cache=use, **new) for use in (True, False))
        assert torch.equal(model.generate(prompt, use_cache=False, **new), plain)
    assert torch.equal(cached, whole)
    assert not torch.equal(cached, plain)
    assert model.generate == own


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_states_of_several_texts_are_separate():
    attachable_sizes = attachable.SIZES | STATES["mamba"]
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**attachable_sizes)).eval()
    with attach(model):
        starts = []
        runner = HookedRunner(model)
        with runner.hooks({"blocks.0.resid_post": lambda v, p: starts.append(start_of_piece())}):
            one = model(torch.tensor([ROWS[0]]), use_cache=True)[CACHE]
            two = model(torch.tensor([ROWS[1]]), use_cache=True)[CACHE]
            copied = copy.deepcopy(one)
            for cache in (one, two, one, copied):
                model(torch.tensor([[7]]), **{CACHE: cache}, use_cache=True)
            one.reset()
            model(torch.tensor([ROWS[2]]), **{CACHE: one}, use_cache=True)
        assert starts == [0, 0, 5, 2, 6, 5, 0]


@pytest.mark.parametrize(("name", "old"), [("llama", "past_key_values"), ("mamba", "cache_params")])
@torch.no_grad()
def test_a_cache_may_have_the_name_of_older_versions(name, old, monkeypatch):
    """In these tests, a warning is an error. So the library must not warn about the old name."""
    monkeypatch.setitem(attachable.MODELS, name, attachable.MODELS.get(name, {}))
    model, tokens = made(name), torch.tensor([ROWS[0]])
    wanted = model(tokens, use_cache=False).logits[:, -2:]
    with attach(model):
        starts = []
        with HookedRunner(model).hooks({"embed": lambda v, p: starts.append(start_of_piece())}):
            first = model(tokens[:, :3], use_cache=True)
            held = first.cache if attachable.IS_5_24 else first[old]
            logits = [
                model(tokens[:, n : n + 1], **{old: held}, use_cache=True).logits for n in (3, 4)
            ]
    assert starts == [0, 3, 4]
    torch.testing.assert_close(torch.cat(logits, 1), wanted, rtol=1e-4, atol=1e-5)


# Both warnings come from peft. The second says that it passes the cache by its old and new name.
@pytest.mark.filterwarnings("ignore:.is_gradient", "ignore:Both .past_key_values")
@torch.no_grad()
def test_virtual_tokens_of_prefix_tuning_are_no_positions():
    peft = pytest.importorskip("peft", reason="needs peft")
    model = made("llama")
    chosen = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(model, chosen).eval()
    tokens, mask = padded(ROWS[:2], 5)
    with warnings.catch_warnings():
        # In the run that `attach` makes first, peft uses the old name of the cache. The library
        # warns about it.
        warnings.filterwarnings("ignore", ".*past_key_values", FutureWarning)
        attached = attach(model)
    with attached:
        runner = HookedRunner(model)
        for given in ({}, dict(attention_mask=mask)):
            name, vector = "blocks.0.resid_post", torch.full((24,), 3.0)
            _, cache = runner.run_with_cache(tokens, **given)
            assert cache[name].shape[1] == 5
            with runner.hooks({name: edits.add(vector, pos=4)}, receipts=True):
                _, edited = runner.run_with_cache(tokens, **given)
            wanted = cache[name].clone()
            wanted[:, 4] += vector
            torch.testing.assert_close(edited[name], wanted)
            last = cache.at(pos=-2)[name]
            torch.testing.assert_close(last, cache[name][:, 3])
            _, lazy = runner.run_with_cache(tokens, **given, lazy=True)
            for point in ("blocks.1.attn.pattern", "blocks.1.resid_post"):
                torch.testing.assert_close(lazy[point], cache[point])
        # Virtual tokens come before the text and its padding. They are not padding, so an edit acts
        # on their keys too.
        more = {"blocks.1.attn.pattern": edits.add(torch.tensor(0.2))}
        with runner.hooks(more):
            together = model(input_ids=tokens, attention_mask=mask).logits
            for n, row in enumerate(ROWS[:2]):
                alone = model(input_ids=torch.tensor([row])).logits[0]
                torch.testing.assert_close(together[n][mask[n] > 0], alone, rtol=1e-4, atol=1e-5)
        # The pattern of another run has the keys of virtual tokens too. The edit copies them.
        _, source = runner.run_with_cache((tokens + 2) % 23, attention_mask=mask)
        point = "blocks.1.attn.pattern"
        with runner.hooks({point: edits.replace(source, query=-1)}):
            _, edited = runner.run_with_cache(tokens, attention_mask=mask)
        torch.testing.assert_close(edited[point][..., -1, :], source[point][..., -1, :])
        with runner.hooks({name: lambda v, p: seen.append(start_of_piece())}):
            seen = []
            model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False)
        assert seen == [0, 5, 6]


@pytest.mark.filterwarnings("ignore:.is_gradient")  # peft causes this warning
@torch.no_grad()
def test_virtual_tokens_of_prompt_tuning_are_positions_of_the_base_model():
    peft = pytest.importorskip("peft", reason="needs peft")
    tokens, chosen = (
        torch.tensor(ROWS[:1]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    )
    tuned = peft.get_peft_model(made("llama"), chosen).eval()
    with pytest.raises(ValueError, match="pass the adapter as run="):
        attach(tuned)
    expected = tuned(tokens, output_hidden_states=True)
    with attach(tuned.get_base_model()) as attached:
        output, cache = HookedRunner(attached.model).run_with_cache(tokens, run=tuned)
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(cache["resid_post", 0], expected.hidden_states[1])


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba", "jamba"])
@torch.no_grad()
def test_mixers_of_positions_other_than_attention_have_a_name(name, monkeypatch):
    monkeypatch.setitem(attachable.MODELS, name, attachable.MODELS.get(name, {}))
    model, tokens = made(name), torch.tensor([ROWS[0]])
    twin = copy.deepcopy(model)
    with attach(model):
        runner = HookedRunner(model)
        last = next(n for n in (1, 0) if f"blocks.{n}.mixer_out" in runner.points)
        point, block = f"blocks.{last}.mixer_out", f"blocks.{last}."
        names = [point, f"{block}resid_*"]
        logits, cache = runner.run_with_cache(tokens, names=names, use_cache=False)
        rest = cache.get(f"{block}resid_mid", cache[f"{block}resid_post"])
        assert torch.equal(cache[f"{block}resid_pre"] + cache[point], rest)
        cut = runner.run_with_hooks(tokens, hooks={point: edits.zero()}, use_cache=False).logits
    blocks = next(m for m in twin.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    names = ("mixer", "conv", "linear_attn", "mamba")
    mixer = next(m for n, m in blocks[last].named_children() if n in names)

    def nothing(module, args, output):
        changed = output if isinstance(output, torch.Tensor) else output[0]
        zeros = torch.zeros_like(changed)
        return zeros if changed is output else (zeros, *output[1:])

    assert torch.equal(twin(tokens, use_cache=False).logits, logits.logits)
    mixer.register_forward_hook(nothing)
    assert torch.equal(twin(tokens, use_cache=False).logits, cut)


@torch.no_grad()
def test_an_mlp_in_its_own_block_is_not_a_mixer(monkeypatch):
    sizes = dict(ssm_state_size=6, mamba_num_heads=4, mamba_head_dim=12, n_groups=1, chunk_size=4)
    monkeypatch.setitem(attachable.MODELS, "nemotron_h", sizes)
    model = made("nemotron_h")
    with attach(model):
        names = {name.partition(".")[2] for name in HookedRunner(model).points if "_out" in name}
    kinds = [type(m).__name__ for n, m in model.named_modules() if n.endswith(".mixer")]
    expected = {
        "Mamba2Mixer": "mixer_out",
        "Attention": "attn_out",
        "MLP": "mlp_out",
        "MoE": "mlp_out",
    }
    last = {n: next(v for k, v in expected.items() if k in kind) for n, kind in enumerate(kinds)}
    assert names == {f"{n}.{name}" for n, name in last.items()}


@torch.no_grad()
def test_a_cache_of_a_padded_generation_knows_its_texts():
    model = made("llama")
    tokens, mask = padded(ROWS, 5)

    def generated(tokens, attention_mask):
        options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        return model.generate(tokens, attention_mask=attention_mask, **options)

    attach(model)
    runner = HookedRunner(model)
    texts, cache = runner.run_with_cache(tokens, attention_mask=mask, run=generated)
    assert torch.equal(cache.inputs["input_ids"], texts[:, :-1])
    whole = torch.cat([mask, torch.ones(3, 3)], 1).bool()
    assert torch.equal(cache.real(), whole)
    for n, real in enumerate(whole):
        alone = runner.run_with_cache(texts[n, :-1][real][None])[1]
        for kind in ("current_token", "previous_token", "first_token", "distance", "entropy"):
            torch.testing.assert_close(
                head_scores(model, cache, kind).values[..., n],
                head_scores(model, alone, kind).values[..., 0],
            )
        lens, expected = logit_lens(model, cache), logit_lens(model, alone)
        torch.testing.assert_close(lens.entropy[:, n, real], expected.entropy[:, 0])
        assert lens.entropy[:, n, ~real].isnan().all()
    # A printed lens leaves padding out.
    turned = logit_lens(model, cache.at(batch=[1]))
    printed = repr(turned).splitlines()[2:]
    assert {len(line.split()) for line in printed} == {1 + int(whole[1].sum())}
    # The tokens of the run are in another order than the rows of this cache.
    with pytest.raises(ValueError, match="tokens"):
        head_scores(model, cache.at(batch=[1, 0, 2]), "induction")


KNOCKED = ["gpt2", "llama", "gemma2", "bloom", "gpt_neox", "gpt_oss", "qwen2", "falcon"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", KNOCKED)
@torch.no_grad()
def test_a_query_without_keys_attends_to_nothing(name, side):
    """The output `z` of such a query is zero.

    The kernels of `transformers` mask with the lowest finite number, not with -inf. If all scores
    of a query were this number, a softmax would give equal weights to all masked keys.
    """
    model = made(name)
    width = 6
    tokens, mask = padded(ROWS, width)
    if side == "right":
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in ROWS])
        mask = mask.flip(1)
    attach(model)
    runner, given = HookedRunner(model), dict(attention_mask=mask, use_cache=False)
    for query in (-1, slice(-2, None)):
        hooks = {"blocks.1.attn.scores": edits.knockout(query=query, head=[0, 2])}
        with runner.hooks(hooks):
            output, cache = runner.run_with_cache(tokens, **given, names="*.pattern")
        zeroed = {"blocks.1.attn.z": edits.zero(pos=query, head=[0, 2])}
        expected = runner.run_with_hooks(tokens, **given, hooks=zeroed).logits
        allowed = 2e-5 * float(expected.abs().max())
        torch.testing.assert_close(
            output.logits[mask > 0], expected[mask > 0], rtol=0, atol=allowed
        )
        assert not cache.at(query=-1)["pattern", 1][:, [0, 2]].any()
        assert not output.logits.isnan().any()
    # With all keys of one query removed, gradients are still finite. Some keys can be removed while
    # others stay.
    with torch.enable_grad():
        hooks = {"blocks.0.attn.scores": edits.knockout(query=-1)}
        runner.run_with_hooks(tokens, **given, hooks=hooks).logits[mask > 0].sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    "how",
    [
        *("eos", "dict", "config", "criteria", "t5", "embeddings", "sampled"),
        *("static", "static embeddings", "static sampled"),
    ],
)
@torch.no_grad()
def test_a_cache_of_a_generation_ends_where_each_row_ends(how):
    """A row that ends early has the numbers of a generation of this row alone."""
    model = made("gpt2")
    if how == "t5":
        torch.manual_seed(0)
        sizes = dict(vocab_size=31, d_model=24, d_kv=6, d_ff=20, num_layers=2, num_heads=3)
        config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(config).eval()
    tokens = torch.tensor([[3, 5, 7, 2], [4, 6, 9, 1], [8, 3, 5, 2]])
    n_rows, names = 3, ["blocks.*.resid_post"]
    if how == "t5":
        names = ["decoder.blocks.*.resid_post"]
    width = 1 if how == "t5" else 4
    # With a static cache, the model gets a mask of queries and keys.
    more = dict(cache_implementation="static") if how.startswith("static") else {}
    how = how.removeprefix("static ")
    options = dict(max_new_tokens=6, do_sample=how in ("sampled", "t5"), use_cache=True)
    if how == "sampled":
        options |= dict(num_return_sequences=2)
        n_rows = 6
    torch.manual_seed(3)
    free = model.generate(tokens, eos_token_id=None, **options)
    # Row 0 ends at its second new token.
    stop = int(free[0, width + 1])
    ends = [row.index(stop) if stop in row else 5 for row in free[:, width:].tolist()]
    assert len({*ends}) > 1
    assert max(ends) > ends[0]
    pad = next(n for n in range(1, 20) if n not in free.unique().tolist())
    given = dict(eos_token_id=stop, pad_token_id=pad)
    if how == "config":
        given = dict(
            generation_config=transformers.GenerationConfig(
                eos_token_id=[stop], pad_token_id=pad, do_sample=False, max_new_tokens=6
            )
        )
        del options["do_sample"], options["max_new_tokens"]
    if how == "dict":
        given |= dict(return_dict_in_generate=True)
    if how == "criteria":
        stops = lambda ids, scores, **_: ids[:, -1] == stop  # noqa: E731
        given = dict(stopping_criteria=[stops], eos_token_id=pad + 1, pad_token_id=pad)
    args = (tokens,)
    if how == "embeddings":
        args = ()
        given |= dict(inputs_embeds=model.get_input_embeddings()(tokens))
    attach(model)
    runner = HookedRunner(model)
    torch.manual_seed(3)
    run = lambda: model.generate(*args, **options, **given, **more)  # noqa: E731
    _, cache = runner.run_with_cache(run=run, names=names)
    counts = [width + end for end in ends]
    assert cache.real().sum(1).tolist() == counts
    last = cache.at(pos=-1)[names[0].replace("*", "0")]
    for n in range(n_rows):
        row = free[n : n + 1, : counts[n]]
        inputs = (tokens[n : n + 1],) if how == "t5" else (row,)
        decoded = dict(decoder_input_ids=row) if how == "t5" else {}
        _, one = runner.run_with_cache(*inputs, **decoded, names=names)
        torch.testing.assert_close(last[n], one[names[0].replace("*", "0")][0, -1])
    if how == "criteria":
        unclear = dict(stopping_criteria=[stops], eos_token_id=pad, pad_token_id=pad)
        run = lambda: model.generate(tokens, **options, **unclear)  # noqa: E731
        with pytest.raises(HookError, match="where each text ends.*pad_token_id"):
            runner.run_with_cache(run=run, names=names)


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_a_generation_with_a_static_cache_knows_its_padding(name, is_given):
    """With a static cache, the model gets a mask of queries and keys, or one for each kind."""
    model = made(name)
    tokens, mask = padded(ROWS, 6)
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    options |= dict(cache_implementation="static") | (dict(attention_mask=mask) if is_given else {})
    attach(model)
    runner = HookedRunner(model)
    out, cache = runner.run_with_cache(tokens, run=partial(model.generate, **options))
    assert cache.real().sum(1).tolist() == [len(row) + 3 for row in ROWS]
    last, scores = cache.at(pos=-1)["resid_post", -1], head_scores(model, cache, "first_token")
    for n, row in enumerate(ROWS):
        text = out[n : n + 1, 6 - len(row) : -1]
        _, alone = runner.run_with_cache(text)
        torch.testing.assert_close(last[n], alone["resid_post", -1][0, -1])
        expected = head_scores(model, alone, "first_token").values[..., 0]
        torch.testing.assert_close(scores.values[..., n], expected)


@torch.no_grad()
def test_a_padding_token_that_ends_texts_is_text_for_a_static_cache_too():
    """Without a mask, transformers takes this token of a prompt for text."""
    model = made("llama")
    attach(model)
    options = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=[0])
    run = partial(model.generate, **options, cache_implementation="static")
    tokens, _ = padded(ROWS, 6)
    out, cache = HookedRunner(model).run_with_cache(tokens, run=run)
    assert torch.equal(out, model.generate(tokens, **options))
    real = cache.real()
    assert real is None or real[:, :6].all()


@torch.no_grad()
def test_a_lazy_run_with_a_recurrent_state_names_the_argument_that_helps():
    model = tiny.model("MambaForCausalLM", state_size=4)
    attach(model)
    runner = HookedRunner(model)
    tokens = torch.randint(1, 23, (2, 9))
    with pytest.raises(HookError, match="use_cache=False"):
        runner.run_with_cache(tokens, lazy=True)
    _, expected = runner.run_with_cache(tokens, names="*.mixer_out")
    _, cache = runner.run_with_cache(tokens, names="*.mixer_out", lazy=True, use_cache=False)
    assert [*cache.keys()] == [*expected.keys()]
    for name, value in expected.items():
        torch.testing.assert_close(cache[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pos", [-1, slice(-2, None), [-3]], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_positions_from_the_end_of_a_prompt_do_not_depend_on_chunks(name, pos):
    """One run of each text alone, with a hook that writes zeros at its positions."""
    model = made(name)
    tokens, mask = padded(ROWS, 6)
    options = dict(max_new_tokens=1, do_sample=False, pad_token_id=0)
    options |= dict(output_logits=True, return_dict_in_generate=True, prefill_chunk_size=4)
    attach(model)
    runner = HookedRunner(model)

    def hook(value, point):
        value[:, [pos] if isinstance(pos, int) else pos] = 0

    # The third last token exists in two of the texts.
    chosen = [n for n, row in enumerate(ROWS) if pos != [-3] or len(row) > 2]
    expected = []
    for n in chosen:
        alone = runner.run_with_hooks(torch.tensor([ROWS[n]]), hooks={"blocks.0.resid_post": hook})
        expected.append(alone.logits[0, -1])
    with runner.hooks({"blocks.0.resid_post": edits.zero(pos=pos)}):
        found = model.generate(tokens[chosen], attention_mask=mask[chosen], **options)
        torch.testing.assert_close(found.logits[0], torch.stack(expected))
        # Two rows for each text.
        more = dict(num_return_sequences=2) | options | dict(do_sample=True, top_k=5)
        twice = model.generate(tokens[chosen], attention_mask=mask[chosen], **more)
        torch.testing.assert_close(twice.logits[0], torch.stack(expected).repeat_interleave(2, 0))
        # Without a mask, `transformers` makes a mask from the padding.
        with pytest.raises(SelectionError, match=r"prefill_chunk_size= .*pass attention_mask="):
            model.generate(tokens[chosen], **options)
        whole = model.generate(tokens[chosen][:1, 1:], **options)
        torch.testing.assert_close(whole.logits[0], expected[0][None])
    with runner.hooks({"blocks.0.resid_post": edits.zero(pos=slice(4, None))}):
        model.generate(tokens, **options)
    # A column of padding is an error in the first chunk too.
    for form in (options, more):
        with (
            runner.hooks({"blocks.0.resid_post": edits.zero(pos=0)}),
            pytest.raises(SelectionError, match="must be a real token"),
        ):
            model.generate(tokens, attention_mask=mask, **form)


@pytest.mark.parametrize("how", ["num_beams", "num_return_sequences"])
@torch.no_grad()
def test_edits_of_a_generation_select_texts_and_not_beams(how):
    """The text that an edit selects is generated alone, with the edit at all its rows."""
    model = made("gpt2")
    tokens = torch.tensor([[3, 5, 7, 2], [4, 6, 9, 1], [8, 3, 5, 2]])
    options = dict(max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    options |= {how: 2} | dict(output_logits=True, return_dict_in_generate=True)
    # With one token to choose from, both rows of a text are the same.
    options |= dict(do_sample=how != "num_beams", top_k=1)
    attach(model)
    runner = HookedRunner(model)
    generate = lambda rows: model.generate(tokens[rows], **options)  # noqa: E731
    at = "blocks.0.resid_post"

    def edited(rows, edit):
        with runner.hooks({at: edit}):
            return generate(rows)

    before, zeroed, first = (
        [generate([n]) for n in range(3)],
        [edited([n], edits.zero(pos=slice(2, None))) for n in range(3)],
        [edited([n], edits.zero(pos=[n])) for n in range(3)],
    )

    def require(found, expected):
        per_text = len(expected[0].sequences)
        for n, alone in enumerate(expected):
            rows = slice(n * per_text, (n + 1) * per_text)
            assert torch.equal(found.sequences[rows], alone.sequences)
            torch.testing.assert_close(found.logits[0][2 * n : 2 * n + 2], alone.logits[0])

    every = [0, 1, 2]
    require(
        edited(every, edits.zero(batch=1, pos=slice(2, None))), [before[0], zeroed[1], before[2]]
    )
    require(
        edited(every, edits.zero(batch=[-1, 0], pos=slice(2, None))),
        [zeroed[0], before[1], zeroed[2]],
    )
    require(edited(every, edits.zero(pos=[[0], [1], [2]])), first)
    with pytest.raises(SelectionError, match="one entry for each of 3 texts.*got 6"):
        edited(every, edits.zero(pos=[[0]] * 6))
    with pytest.raises(SelectionError, match="batch"):
        edited(every, edits.zero(batch=3))
    # A hook runs the model on other texts, whose number is not the number of texts or rows.
    other = torch.tensor([[3, 5]] * 5)
    zero = {at: edits.zero(batch=1)}
    inside = lambda value, point: runner.run_with_hooks(other, hooks=zero) and None  # noqa: E731
    with pytest.raises(SelectionError, match="unknown which text each of the 5 rows"):
        edited(every, inside)
    # A run on as many rows as texts has one row for each text.
    other = tokens
    require(edited(every, inside), before)


@pytest.mark.parametrize("n_rows", [1, 2])
@torch.no_grad()
def test_a_token_that_is_read_after_the_end_of_all_rows_is_no_text(n_rows, monkeypatch):
    """On some devices, `transformers` runs the model once more before it sees the end."""
    utils = pytest.importorskip("transformers.generation.utils")
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("this version of transformers never reads a token after the end")

    class Deferred(utils.StopCheck):
        """Reports the end one step late."""

        stopped = False

        def __call__(self, *args):
            before, self.stopped = self.stopped, super().__call__(*args)
            return before

        def finish(self):
            return 1

    model = made("gpt2")
    tokens = torch.tensor([[3, 5, 7, 2], [4, 6, 9, 1]])[:n_rows]
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    free = model.generate(tokens, eos_token_id=None, **options)
    stops = free[:, 5].tolist()
    expected = model.generate(tokens, eos_token_id=stops, **options)
    counts = [4 + next(n for n, t in enumerate(row) if t in stops) for row in free[:, 4:].tolist()]
    attach(model)
    monkeypatch.setattr(utils, "StopCheck", Deferred)
    run = lambda: model.generate(tokens, eos_token_id=stops, **options)  # noqa: E731
    rows, cache = HookedRunner(model).run_with_cache(run=run, names="blocks.0.resid_post")
    assert torch.equal(rows, expected)
    assert len(cache["blocks.0.resid_post"][0]) == rows.shape[1]
    assert cache.real().sum(1).tolist() == counts
