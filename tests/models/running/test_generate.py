"""Generation, compared with a full run of the model for every token, and with transformers."""

import copy
import functools
import re
from collections import Counter

import numpy as np
import pytest
import torch
from torch.compiler import set_stance

from hooks import HookedRunner, SelectionError
from hooks.base import Text, all_but
from interp import direct_logit_attribution, edits, head_scores
from models import (
    KVCache,
    Sampling,
    Transformer,
    TransformerConfig,
    attach,
    generate,
    generate_steps,
    row_generator,
)
from tests import tiny
from tests.models.running.written import (
    FORMS,
    N_CTX,
    NEW,
    PROMPTS,
    SIZES,
    build,
    continued,
    mistral,
)
from tests.shipped import pydoc


def calls(model):
    """Return a list that gets the length of each piece that the model reads, and its hook's
    handle.
    """
    lengths = []
    return lengths, model.register_forward_hook(
        lambda module, args, output: lengths.append(args[0].shape[1])
    )


def close(ours, theirs, atol=2e-5):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.usefixtures("unchecked")
def test_the_error_for_an_attached_model_has_a_line_that_works():
    import models

    model, attached = attached_gpt2()
    names = {"model": model, "attached": attached, "text": "x"}
    calls = [lambda: models.generate_text(model, "x", max_new_tokens=9, stop=3)]
    calls += [
        functools.partial(generate, given, "x", max_new_tokens=9) for given in (model, attached)
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"a models\.Transformer") as caught:
            call()
        line, text = re.search(
            r"(rows = .*\)), where .*; (.*) is the text", str(caught.value)
        ).groups()
        exec(line, names)
        assert len(names["rows"][0]) == 10
        assert eval(text, names).startswith("x")
    for given in (model, attached):
        with pytest.raises(TypeError, match='cache_implementation="static"'):
            generate(given, "x", max_new_tokens=9, compiled=True)
    # Texts are not tokens for the model's own method.
    names |= {"models": models, "texts": ["x", "def "]}
    for texts in ("x", ["x", "def "]):
        with pytest.raises(TypeError, match="needs a tensor of tokens") as caught:
            model.generate(texts)
        for line in re.search(r"write (.*), or (.*) after", str(caught.value)).groups():
            assert len(eval(line, names)) in (1, 2)


def attached_gpt2():
    """Return a GPT-2 with a tokenizer, and the result of `attach`."""
    from models import attach, load

    model = tiny.model("GPT2LMHeadModel", vocab_size=103, bos_token_id=0, pad_token_id=0)
    torch.manual_seed(4)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight)
    return model, attach(model, tokenizer=load("pydoc-4l").tokenizer)


def test_an_attached_model_writes_a_text():
    from models import generate_text

    model, attached = attached_gpt2()
    encode, decode = attached.tokenizer.encode, attached.tokenizer.decode
    prompts = ["x", "def "]
    # Choose the likeliest token again and again, from a run of the whole text without padding.
    expected = []
    for prompt in prompts:
        tokens = encode(prompt)
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected.append(decode(tokens))
    assert len({*expected[0][1:], *expected[1][4:]}) > 2
    for given in (model, attached):
        assert generate_text(given, prompts, max_new_tokens=5) == expected
        assert generate_text(given, "x", max_new_tokens=5) == expected[0]
        tokens, mask = attached.to_tokens(prompts)
        options = dict(max_new_tokens=5, attention_mask=mask)
        assert generate_text(given, tokens, **options) == expected
    drawn = [generate_text(model, "x", max_new_tokens=9, temperature=2.0, seed=n) for n in (1, 2)]
    assert drawn[0] != drawn[1]
    assert generate_text(model, "x", max_new_tokens=9, temperature=2.0, seed=2) == drawn[1]
    # A row ends before the token that ends texts.
    end = encode(expected[0])[3]
    model.generation_config.eos_token_id = end
    before = expected[0][: expected[0].index(decode([end]), 1)]
    assert generate_text(model, "x", max_new_tokens=5) == before


@pytest.mark.usefixtures("unchecked")
def test_an_attached_model_checks_its_prompts():
    from models import attach, generate_text

    model, _ = attached_gpt2()
    with pytest.raises(ValueError, match="empty in rows .1"):
        generate_text(model, ["x", ""], max_new_tokens=2)
    with pytest.raises(TypeError, match="max_new_tokens"):
        generate_text(model, "x", max_new_tokens="2")
    with pytest.raises(ValueError, match="evaluation mode"):
        generate_text(model.train(), "x", max_new_tokens=2)
    t5 = tiny.model("T5ForConditionalGeneration", vocab_size=103, d_ff=8, decoder_start_token_id=0)
    attach(t5, tokenizer=attached_gpt2()[1].tokenizer)
    with pytest.raises(ValueError, match="got an encoder and a decoder"):
        generate_text(t5, "x", max_new_tokens=2)
    unattached = tiny.model("GPT2LMHeadModel")
    with pytest.raises(TypeError, match="after attach"):
        generate_text(unattached, "x", max_new_tokens=2)


# Greedy.


@pytest.mark.parametrize("form", FORMS)
def test_greedy_takes_the_most_probable_token_of_full_reruns(form):
    model = build(form)
    expected = [continued(model, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=NEW) == expected
    assert len({tuple(row[-NEW:]) for row in expected}) > 1
    assert len(Counter(token for row in expected for token in row[-NEW:])) > 3


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize("form", ["learned", "windows"])
def test_chunks_of_the_prompts_change_nothing(form, chunk):
    """With short prompts, some chunks contain only padding."""
    model = build(form)
    expected = [continued(model, prompt) for prompt in PROMPTS]
    lengths, handle = calls(model)
    with handle:
        assert generate(model, PROMPTS, max_new_tokens=NEW, prefill_chunk=chunk) == expected
    prefill = {1: [1] * 7, 3: [3, 3, 1], 4: [4, 3], 100: [7]}[chunk]
    assert lengths == prefill + [1] * (NEW - 1)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("left", [0, 2, 9])
def test_padding_is_left_out(left, kind):
    """`left` is the number of columns of padding on the left, if there are so many. The other
    columns of padding are on the right.
    """
    model, padded = build("windows"), []
    for prompt in PROMPTS:
        before = min(left, 8 - len(prompt))
        padded.append([None] * before + prompt + [None] * (8 - len(prompt) - before))
    tokens = torch.tensor([[13 if token is None else token for token in row] for row in padded])
    mask = torch.tensor([[token is not None for token in row] for row in padded]).to(kind)
    expected = [continued(model, prompt) for prompt in PROMPTS]
    assert generate(model, tokens, max_new_tokens=NEW, attention_mask=mask) == expected


@pytest.mark.usefixtures("unchecked")
def test_prompts_and_options_may_come_in_many_types():
    model, options = build(), dict(max_new_tokens=3, temperature=0.5, top_k=4, seed=3, stop=[2, 9])
    expected = generate(model, [[3, 1, 4], [9, 2, 6]], **options)
    assert all(type(token) is int for row in expected for token in row)
    tensor = torch.tensor([[3, 1, 4], [9, 2, 6]])
    mixed = [np.array([3, 1, 4]), (9, np.int64(2), 6)]
    for prompts in (tensor, tensor.int(), tensor.numpy(), mixed, model.to_tokens(mixed)):
        rows = generate(model, prompts, **options)
        assert rows == expected
        assert all(type(token) is int for row in rows for token in row)
    assert tensor.tolist() == [[3, 1, 4], [9, 2, 6]]
    for one in ([3, 1, 4], tensor[0]):
        assert generate(model, one, **options) == expected[:1]
    numbers = {name: np.array([options[name]])[0] for name in ("temperature", "top_k", "seed")}
    for stop in ({2, 9}, iter([2, 9]), np.array([2, 9]), torch.tensor([2, 9])):
        rows = generate(model, tensor, **options | numbers | {"stop": stop})
        assert rows == expected


def test_greedy_matches_transformers():
    from models.checkpoints import from_hf

    theirs = mistral()
    ours = generate(from_hf(theirs), PROMPTS, max_new_tokens=NEW, stop=())
    assert len({tuple(row[-NEW:]) for row in ours}) == len(PROMPTS)
    end = ours[0][-3]
    for eos, found in (
        (None, ours),
        (end, generate(from_hf(theirs), PROMPTS, max_new_tokens=NEW, stop=end)),
    ):
        theirs.generation_config.eos_token_id = eos
        for prompt, row in zip(PROMPTS, found, strict=True):
            mask = torch.ones(1, len(prompt), dtype=torch.int64)
            options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            expected = theirs.generate(torch.tensor([prompt]), attention_mask=mask, **options)
            assert row == expected[0].tolist()


SHARED = [[3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 6], [3, 1, 4], [3, 1, 4, 1, 8]]


@pytest.mark.parametrize("form", FORMS)
def test_continuations_read_a_common_beginning_once(form, monkeypatch):
    model = build(form)
    forward = model.forward
    for prompts, shared in ((SHARED, 2), ([SHARED[0]] * 3, 6), (PROMPTS, 0), (SHARED[:1], 0)):
        expected = [continued(model, prompt)[len(prompt) :] for prompt in prompts]
        lengths = []

        def noted(tokens, lengths=lengths, **options):
            lengths.append(tokens.shape[1])
            return forward(tokens, **options)

        # A hook would count as an edit that may differ between rows.
        with monkeypatch.context() as patched:
            patched.setattr(model, "forward", noted)
            assert model.continuations(prompts, max_new_tokens=NEW) == expected
        if shared and "window" not in form:
            longest = max(map(len, prompts))
            assert lengths == [shared, longest - shared] + [1] * (NEW - 1)
        else:
            assert len(lengths) == NEW
        drawn = model.continuations(prompts, max_new_tokens=NEW, temperature=0.9, seed=5)
        rows = generate(model, prompts, max_new_tokens=NEW, temperature=0.9, seed=5)
        assert [[*p, *new] for p, new in zip(prompts, drawn, strict=True)] == rows


def test_continuations_end_before_the_stop_token_and_obey_hooks():
    prompt = SHARED[0]
    whole = continued(build(), prompt)[len(prompt) :]
    config = TransformerConfig(**SIZES, eos_token_ids=(whole[3],))
    model = Transformer(config).eval()
    model.load_state_dict(build().state_dict())
    first = whole.index(whole[3])
    assert model.continuations([prompt, prompt], max_new_tokens=NEW) == [whole[:first]] * 2

    def second_row(value, point):
        value[1] = 0

    runner = HookedRunner(build())
    with runner.hooks({"blocks.1.mlp_out": second_row}):
        ours = build().continuations([prompt, prompt], max_new_tokens=NEW)
        rows = generate(build(), [prompt, prompt], max_new_tokens=NEW)
    assert ours == [row[len(prompt) :] for row in rows]
    assert ours[0] == whole != ours[1]


# Sampled.


@pytest.mark.parametrize("form", ["learned", "windows"])
def test_a_row_draws_the_same_tokens_as_alone(form):
    options = dict(max_new_tokens=NEW, temperature=1.7, top_k=20, top_p=0.97, min_p=0.01)
    together = generate(build(form), PROMPTS, seed=40, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = row_generator(40, row)
        assert generate(build(form), [prompt], seed=alone, **options) == [together[row]]
    assert together != [continued(build(form), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options", [dict(temperature=0.6), dict(temperature=1.4, top_k=9, top_p=0.8, min_p=0.1)]
)
def test_draws_match_full_reruns(options):
    """The tokens of row i are drawn by the generator of this row, from the logits of a full run."""
    model, sampling = build("rotary"), Sampling(**options)
    rows = generate(model, PROMPTS, max_new_tokens=NEW, seed=90, **options)
    for row, prompt in enumerate(PROMPTS):
        own = row_generator(90, row)

        def draw(logits, own=own):
            return torch.multinomial(sampling.cut(logits[None]).softmax(-1)[0], 1, generator=own)

        assert rows[row] == continued(model, prompt, choose=draw)


def test_seeds_share_no_row():
    options = dict(max_new_tokens=NEW, temperature=3.0)
    seeds = (0, 1, 2, -1, 2**32, 2**64)
    drawn = [generate(build(), [[3, 1, 4]] * 5, seed=seed, **options) for seed in seeds]
    assert len({tuple(row) for rows in drawn for row in rows}) == 5 * len(seeds)
    assert generate(build(), [[3, 1, 4]] * 5, seed=-1, **options) == drawn[3]


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    generate(build(), PROMPTS, max_new_tokens=2, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


# Stop tokens.


def test_a_row_ends_with_its_stop_token_and_the_others_go_on(monkeypatch):
    model = build()
    whole = [continued(model, prompt, 9) for prompt in PROMPTS]
    stops = [whole[0][len(PROMPTS[0]) + 2], whole[2][len(PROMPTS[2]) + 5]]
    expected = [continued(model, prompt, 9, stop=stops) for prompt in PROMPTS]
    lengths = [len(row) - len(prompt) for row, prompt in zip(expected, PROMPTS, strict=True)]
    assert min(lengths) <= 3
    assert len(set(lengths)) > 1
    assert generate(model, PROMPTS, max_new_tokens=9, stop=stops) == expected
    # The tokens of the config are used unless other tokens are given.
    ended = model.config.replace(eos_token_ids=tuple(stops))
    monkeypatch.setattr(model, "config", ended)
    assert generate(model, PROMPTS, max_new_tokens=9) == expected
    assert generate(model, PROMPTS, max_new_tokens=9, stop=()) == whole
    one = [continued(model, prompt, 9, stop=stops[:1]) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=9, stop=stops[0]) == one != expected


def test_it_ends_when_every_row_has_stopped():
    model = build()
    whole = [continued(model, prompt, 9) for prompt in PROMPTS]
    stops = sorted({row[len(prompt) + 1] for row, prompt in zip(whole, PROMPTS, strict=True)})
    expected = [continued(model, prompt, 9, stop=stops) for prompt in PROMPTS]
    longest = max(len(row) - len(prompt) for row, prompt in zip(expected, PROMPTS, strict=True))
    assert longest == 2
    lengths, handle = calls(model)
    with handle:
        assert generate(model, PROMPTS, max_new_tokens=9, stop=stops) == expected
    assert lengths == [7, 1]
    assert len(list(generate_steps(model, PROMPTS, max_new_tokens=9, stop=stops))) == 2


# The stream.


@pytest.mark.parametrize("form", ["learned", "windows"])
def test_steps_hold_tokens_logits_and_who_is_running(form):
    model = build(form)
    whole = [continued(model, prompt) for prompt in PROMPTS]
    stop = whole[1][len(PROMPTS[1]) + 1]
    expected = [continued(model, prompt, stop=[stop]) for prompt in PROMPTS]
    options = dict(temperature=3.0, top_k=1)  # they must not change the logits that are returned
    steps = list(generate_steps(model, PROMPTS, max_new_tokens=NEW, stop=[stop], **options))
    assert steps[0].running.all()
    for row, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([text]))[0]
        new = text[len(prompt) :]
        for at, step in enumerate(steps):
            assert step.running[row] == (at < len(new))
            if at < len(new):
                assert step.tokens[row] == new[at]
                close(step.logits[row], logits[len(prompt) - 1 + at])


def test_the_mode_of_the_caller_stays_between_steps():
    model = build()
    for mode, grads in ((torch.enable_grad, True), (torch.no_grad, False)):
        with mode():
            for step in generate_steps(model, PROMPTS, max_new_tokens=3):
                assert torch.is_grad_enabled() == grads
                assert not torch.is_inference_mode_enabled()
                assert not step.logits.requires_grad
                assert (model(torch.tensor([[1]])).requires_grad) == grads
            assert torch.is_grad_enabled() == grads


def test_a_row_that_has_ended_cannot_fail():
    model = build()
    plain = generate(model, PROMPTS, max_new_tokens=NEW)
    stop = plain[0][len(PROMPTS[0])]
    expected = generate(model, PROMPTS, max_new_tokens=NEW, stop=[stop])
    lengths = [len(row) - len(prompt) for row, prompt in zip(expected, PROMPTS, strict=True)]
    assert lengths[0] == 1 < max(lengths)

    def spoil(value, point):
        if value.shape[1] == 1:
            value[0] = torch.nan

    with HookedRunner(model).hooks({"blocks.2.mlp_out": spoil}):
        assert generate(model, PROMPTS, max_new_tokens=NEW, stop=[stop]) == expected
        with pytest.raises(ValueError, match="nan in row 0"):
            generate(model, PROMPTS, max_new_tokens=NEW)


def test_a_step_may_be_written_into():
    model = build()
    expected = [
        [step.tokens.tolist(), step.running.tolist()]
        for step in generate_steps(model, PROMPTS, max_new_tokens=5, stop=[7])
    ]
    found = []
    for step in generate_steps(model, PROMPTS, max_new_tokens=5, stop=[7]):
        found.append([step.tokens.tolist(), step.running.tolist()])
        step.tokens.fill_(0)
        step.running.fill_(False)
        step.logits.fill_(torch.nan)
    assert found == expected


def test_the_stream_works_on_demand():
    model = build()
    lengths, handle = calls(model)
    with handle:
        steps = generate_steps(model, PROMPTS, max_new_tokens=4, prefill_chunk=4)
        assert lengths == []
        next(steps)
        assert lengths == [4, 3]
        assert len(list(steps)) == 3
    assert lengths == [4, 3, 1, 1, 1]


# Hooks.

EDITS = {
    "blocks.0.attn.z": lambda value, point: value * torch.tensor([1.0, -1.5, 0, 1])[:, None],
    "blocks.1.mlp_out": lambda value, point: value * 0.3 - value.roll(1, -1),
    "blocks.*.resid_pre": lambda value, point: value * 1.2,
    "blocks.2.attn.k": lambda value, point: value * 1.6,
    "blocks.1.attn.pattern": lambda value, point: value.roll(1, 1),
    "ln_final.scale": lambda value, point: value * 0.8,
}


def relevant(cache, name, real, windows):
    """Return True for the entries of a value that have a meaning.

    They belong to real tokens, and keys are not after the query and not outside the window.
    """
    axes = cache.axes(name)
    at = torch.arange(real.shape[1])
    if "query" not in axes:
        return real.view(*real.shape, *[1] * (len(axes) - 2))
    distance = at[:, None] - at
    window = windows[int(name.split(".")[1])] or len(at)
    seen = (distance >= 0) & (distance < window)
    return (seen & real[:, :, None] & real[:, None])[:, None]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("form", "edits", "prompts", "chunk"),
    [*((form, EDITS, PROMPTS, 3) for form in FORMS), ("rotary", {}, [[3, 1, 4, 1, 5]], 1024)],
)
def test_a_cache_over_a_generation_matches_a_full_rerun(edits, prompts, chunk, form):
    """The values at every point equal a full run of the generated texts, with the same edits and
    the same padding.
    """
    model = build(form)
    runner, longest = HookedRunner(model), max(map(len, prompts))
    run = functools.partial(generate, model, max_new_tokens=NEW, prefill_chunk=chunk)
    with runner.hooks(edits):
        rows, cache = runner.run_with_cache(prompts, run=run)
        assert rows == generate(model, prompts, max_new_tokens=NEW)
    rerun = functools.partial(runner.run_with_hooks, hooks=edits)
    assert rows == [continued(model, prompt, run=rerun) for prompt in prompts]
    assert (rows == generate(model, prompts, max_new_tokens=NEW)) == (not edits)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    read = [row[:-1] for row in rows]
    pads = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * pad + row for pad, row in zip(pads, read, strict=True)])
    real = torch.arange(tokens.shape[1]) >= torch.tensor(pads)[:, None]
    mask = dict(attention_mask=real) if max(pads) else {}
    with runner.hooks(edits), torch.no_grad():
        _, whole = runner.run_with_cache(tokens, **mask)
    assert list(cache) == list(whole) == list(runner.points)
    assert cache["embed"].shape[1] == longest + NEW - 1
    for name, value in whole.items():
        assert cache[name].shape == value.shape
        assert cache[name].isfinite().all()
        assert cache.axes(name) == whole.axes(name)
        matters = relevant(cache, name, real, model.config.windows)
        close(cache[name] * matters, value * matters, atol=1e-4)
    # In a generation, the scores of queries with later keys are not computed, so they are 0.
    last = cache["scores", 0][:, :, :, -1]
    assert not last[:, :, :-1].any()
    assert last[:, :, -1].all()


@pytest.mark.parametrize("at", ["ln_final", "ln_final.scale", "unembedding", "logit_cap"])
def test_listening_after_the_last_block_sees_all_positions(at):
    """A generation computes only the logits of the last position, but hooks see all positions."""
    model, shapes = build("capped"), []
    runner = HookedRunner(model)

    def note(value, point):
        shapes.append(value.shape[1])

    expected = generate(model, PROMPTS, max_new_tokens=3)
    with runner.hooks({at: note}):
        assert generate(model, PROMPTS, max_new_tokens=3) == expected
    assert shapes == [7, 1, 1]


# Other precisions and devices, and limits.


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    """In half precision, a text that is read in pieces is rounded differently. So compare the
    logits along the generated text, not the text itself.
    """
    model = Transformer(build("windows").config).eval()
    model.load_state_dict(build("windows").state_dict())
    model = model.to(dtype)
    steps = list(generate_steps(model, [PROMPTS[0]], max_new_tokens=NEW))
    text = [*PROMPTS[0], *(int(step.tokens) for step in steps)]
    with torch.no_grad():
        whole = model(torch.tensor([text[:-1]]))[0, len(PROMPTS[0]) - 1 :]
    assert steps[0].logits.dtype == dtype
    atol = 1e-12 if dtype == torch.float64 else 0.03 * whole.abs().max().item()
    close(torch.cat([step.logits for step in steps]), whole, atol=atol)
    sampled = generate(model, PROMPTS, max_new_tokens=3, temperature=1.0, top_p=0.9)
    assert [len(row) for row in sampled] == [10, 5, 7, 4]


def test_the_context_may_be_filled_exactly():
    model, prompt = build("windows"), PROMPTS[0] + PROMPTS[2]
    new = N_CTX - len(prompt)
    assert generate(model, [prompt, [5]], max_new_tokens=new) == [
        continued(model, prompt, new),
        continued(model, [5], new),
    ]
    assert generate(model, [prompt], max_new_tokens=3, max_context=len(prompt) + 3) == [
        continued(model, prompt, 3)
    ]


BAD = [
    (dict(max_new_tokens=0), "max_new_tokens .*0"),
    (dict(max_new_tokens=2.5), "max_new_tokens .*2.5"),
    (dict(prompts=[]), "0 texts"),
    (dict(prompts=[[1], [], [2], []]), r"\[1, 3\]"),
    (dict(prompts=torch.zeros(2, 0, dtype=torch.int64)), r"\[0, 1\]"),
    (dict(prompts=[[1], [5, 29]]), r"prompt 1 .*29\).* 29"),
    (dict(prompts=[[1, -1]]), "prompt 0 .* -1"),
    (dict(stop=[3, 29]), r"stop .*29\).* 29"),
    (dict(stop=[-1]), "stop .* -1"),
    (dict(max_new_tokens=13), "19 positions; got 7 and 13"),
    (dict(max_context=8), "8 positions; got 7 and 2"),
    (dict(max_new_tokens=13, max_context=20), "19 positions; got 7 and 13"),
    (dict(temperature=-1.0), "temperature .*-1.0"),
    (dict(prompts="text"), "tokenizer"),
    # Tokens must be integers.
    *((dict(prompts=prompts), "integers") for prompts in ([[1.5]], torch.ones(2, 3))),
    (dict(stop=29), r"stop .*29\).* 29"),
    (dict(prefill_chunk=0), "prefill_chunk .*0"),
    (dict(attention_mask=torch.ones(4, 7)), "attention_mask"),
    *(
        (dict(prompts=torch.ones(2, 3).long(), attention_mask=mask), f"attention_mask .*{said}")
        for mask, said in (
            (torch.ones(2, 2), "2, 2"),
            (torch.ones(3), r"got \[3\]"),
            (torch.tensor([[0, 1, 1], [1, 7, 1]]), "7"),
        )
    ),
    (dict(prompts=torch.ones(2, 3).long(), attention_mask=torch.eye(3)[:2] * 0), r"\[0, 1\]"),
    *(
        (change, None)
        for change in (dict(stop=5.5), dict(stop=[1.5]), dict(temperature=1, seed=1.5))
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "message"), BAD)
@pytest.mark.parametrize("function", [generate, generate_steps])
def test_bad_arguments_are_errors_at_the_call(function, change, message):
    model = build()
    lengths, handle = calls(model)
    arguments = dict(prompts=PROMPTS, max_new_tokens=2) | change
    with handle, pytest.raises((ValueError, TypeError), match=message):
        function(model, **arguments)
    assert lengths == []


def test_the_error_says_how_to_extend_the_context():
    with pytest.raises(ValueError, match=r"model\.extend_context"):
        generate(build("rotary"), PROMPTS, max_new_tokens=13)


def test_training_mode_is_refused():
    model = Transformer(TransformerConfig(**SIZES, dropout=0.5)).eval()
    # One block in training mode is enough, because its dropout is random.
    model.blocks[1].train()
    for function in (generate, generate_steps):
        with pytest.raises(ValueError, match=r"model.eval\(\)"):
            function(model, [[1]], max_new_tokens=2)
    steps = generate_steps(model.eval(), PROMPTS, max_new_tokens=5)
    next(steps)
    model.train()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        next(steps)


# Positions of hooks. The prompts have 7, 2, 4 and 1 tokens.

VECTOR = torch.randn(20, generator=torch.Generator().manual_seed(2)) * 3


def steered(model, prompts, **options):
    """Return the rows of a generation with an edit that adds a vector at some positions."""
    compiled = options.pop("compiled", False)
    with HookedRunner(model).hooks({"blocks.1.mlp_out": edits.add(VECTOR, **options)}):
        return generate(model, prompts, max_new_tokens=NEW, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "pos", [6, slice(3, 7), slice(4, None), [[2], [5], [3], [6]], edits.all_but(6)]
)
def test_columns_of_prompts_that_generate_pads_are_refused(pos, compiled):
    model = build("learned")
    with set_stance("force_eager"), pytest.raises(SelectionError, match="pads prompts of unequal"):
        steered(model, PROMPTS, pos=pos, compiled=compiled)


@pytest.mark.parametrize("pos", [-1, slice(-1, None), slice(None), slice(0, None), slice(7, None)])
def test_other_positions_are_the_same_tokens_in_a_batch_and_alone(pos):
    model = build("learned")
    rows = steered(model, PROMPTS, pos=pos)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        # Column 7 is the first column after the longest prompt.
        alone = slice(len(prompt), None) if pos == slice(7, None) else pos
        assert steered(model, [prompt], pos=alone) == [row]


def test_columns_count_the_padding_of_the_caller():
    model = build("learned")
    padded = Text.padded([*map(torch.tensor, PROMPTS)], side="left")
    rows = steered(model, padded, pos=slice(5, 7))
    for row, prompt in zip(rows, PROMPTS, strict=True):
        first = max(0, len(prompt) - 2)
        assert steered(model, [prompt], pos=slice(first, len(prompt))) == [row]


def test_columns_of_prompts_of_an_attached_model_are_refused():
    model = tiny.model("GPT2LMHeadModel")
    attached = attach(model)
    hooks = {"blocks.0.mlp_out": edits.scale(3.0, pos=slice(1, 3))}
    with HookedRunner(model).hooks(hooks):
        equal = attached.continuations([[3, 1, 4], [5, 2, 6]], max_new_tokens=2)
        assert equal[1] == attached.continuations([[5, 2, 6]], max_new_tokens=2)[0]
        with pytest.raises(SelectionError, match="generate one prompt at a time"):
            attached.continuations([[3, 1, 4], [5, 2]], max_new_tokens=2)


@torch.no_grad()
def test_a_cache_of_a_generation_ends_where_each_row_ends():
    """A row that ends early has the numbers of a generation of this row alone."""
    model = pydoc()
    stop, prompts = model.to_id(" "), ["Return the", "impor"]
    runner = HookedRunner(model)
    run = functools.partial(generate, model, max_new_tokens=12, stop=stop)
    rows, cache = runner.run_with_cache(prompts, run=run)
    alone = [generate(model, prompt, max_new_tokens=12, stop=stop)[0] for prompt in prompts]
    assert rows == alone
    assert len({len(row) - len(prompt) for row, prompt in zip(rows, prompts, strict=True)}) == 2
    # `generate` alone does not read the last token of a row.
    counts = [len(row) - 1 for row in alone]
    assert cache.real().sum(1).tolist() == counts
    assert cache.inputs["attention_mask"].sum(1).tolist() == counts
    last = cache.at(pos=-1)["resid_post", 3]
    kinds = ("previous_token", "first_token", "entropy", "distance")
    scores = {kind: head_scores(model, cache, kind).values for kind in kinds}
    dla = direct_logit_attribution(model, cache, right="e", pos=-1).values
    mean = edits.mean(cache, pos=-1)
    expected = []
    for n, row in enumerate(alone):
        _, one = runner.run_with_cache(torch.tensor([row[:-1]]))
        close(last[n], one["resid_post", 3][0, -1])
        expected.append(one["resid_post", 2][0, -1])
        for kind in kinds:
            close(scores[kind][..., n], head_scores(model, one, kind).values[..., 0])
        close(dla[:, n], direct_logit_attribution(model, one, right="e", pos=-1).values[:, 0])
    written = []
    at = "blocks.2.resid_post"
    runner.run_with_hooks("part KV8", hooks=[(at, mean), (at, lambda v, _: written.append(v))])
    close(written[0][0, -1], torch.stack(expected).mean(0))


@torch.no_grad()
def test_the_ends_of_rows_belong_to_the_model_that_generates():
    """A generation of another model inside `run=` changes no mask."""
    model, other = pydoc(), copy.deepcopy(pydoc())
    stop, prompts = model.to_id(" "), ["Return the", "impor"]

    def run(texts):
        generate(other, texts, max_new_tokens=12, stop=stop)
        return generate(model, texts, max_new_tokens=3, stop=())

    _, cache = HookedRunner(model).run_with_cache(prompts, run=run)
    assert cache.real().sum(1).tolist() == [len(prompt) + 2 for prompt in prompts]
    # All rows of equal prompts end together, and the cache has no padding.
    once = functools.partial(generate, model, max_new_tokens=12, stop=stop)
    _, cache = HookedRunner(model).run_with_cache(["impor", "impor"], run=once)
    assert "attention_mask" not in cache.inputs


FROM_THE_END = {"-1": -1, "slice": slice(-2, None), "[-4]": [-4], "all_but": all_but(-1)}


@pytest.mark.parametrize("chunk", [3, 5, 11])
@pytest.mark.parametrize("pos", FROM_THE_END)
@torch.no_grad()
def test_positions_from_the_end_of_a_prompt_do_not_depend_on_chunks(pos, chunk):
    """Each prompt alone in one run, with a hook that writes zeros at its positions."""
    model, prompts = pydoc(), ["part ZQXJ", "ask for ZQXJ-KV8"]
    zeros = {"blocks.1.resid_post": edits.zero(pos=FROM_THE_END[pos])}
    for several in (prompts, prompts[:1], prompts[1:]):
        with HookedRunner(model).hooks(zeros, receipts=True) as context:
            steps = generate_steps(model, several, max_new_tokens=1, prefill_chunk=chunk)
            found = next(steps).logits
        if pos == "-1":
            assert context.receipts[0].rows == len(several)
        for text, logits in zip(several, found, strict=True):
            selected = places(FROM_THE_END[pos], len(text))

            def hook(value, point, selected=selected):
                value[:, selected] = 0

            alone = HookedRunner(model).run_with_hooks(text, hooks={"blocks.1.resid_post": hook})
            close(logits, alone[0, -1], atol=1e-4)


def places(pos, n):
    """Return the places that a selection from the end selects in a text of `n` tokens."""
    if not isinstance(pos, int | slice | list):
        return list(range(n - 1))
    return np.arange(n)[pos if not isinstance(pos, int) else [pos]].tolist()


@torch.no_grad()
def test_a_run_inside_a_chunk_is_no_chunk():
    """A hook runs another model, with a cache of keys: its last position is its own."""
    model, inner = pydoc(), copy.deepcopy(pydoc())
    zeros = {"blocks.1.resid_post": edits.zero(pos=-1)}
    tokens = inner.to_tokens("import").tokens
    expected = HookedRunner(inner).run_with_hooks(tokens, hooks=zeros)
    outputs = []

    def hook(value, point):
        runner = HookedRunner(inner)
        outputs.append(runner.run_with_hooks(tokens, kv_cache=KVCache(), hooks=zeros))

    with HookedRunner(model).hooks({"blocks.0.mlp_out": hook}):
        generate(model, "part ZQXJ-KV8", max_new_tokens=1, prefill_chunk=4)
    assert len(outputs) == 4
    for output in outputs:
        close(output, expected, atol=1e-4)
