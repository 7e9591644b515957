"""Generation with `compiled=`, compared with generation without it, and with `transformers`.

Most tests let PyTorch run the step without compiling it, so that they take little time.
`tests/test_compile.py` compiles it.
"""

import copy
import io

import pytest
import torch
from torch.compiler import set_stance

from hooks import HookedRunner
from hooks.base import Text
from interp import edits
from models import Transformer, TransformerConfig, attach, generate, generate_steps, generate_text
from tests import tiny
from tests.counting import counted
from tests.models.running.written import FORMS, NEW, PROMPTS, SIZES, build, continued, mistral

POINT = "blocks.1.mlp_out"
VECTOR = torch.randn(20, generator=torch.Generator().manual_seed(2)) * 3


@pytest.fixture(autouse=True)
def uncompiled():
    """Run the functions that torch.compile returns as plain Python."""
    with set_stance("force_eager"):
        yield


def both(model, prompts=PROMPTS, **options):
    """Return the rows of a generation with `compiled=True`, which are equal to the rows without
    it.
    """
    options = dict(max_new_tokens=NEW) | options
    expected = generate(model, prompts, **options)
    assert generate(model, prompts, compiled=True, **options) == expected
    return expected


# Tokens.


@pytest.mark.parametrize("form", FORMS)
def test_greedy_takes_the_most_probable_token_of_full_reruns(form):
    model = build(form)
    expected = [continued(model, prompt) for prompt in PROMPTS]
    assert generate(model, PROMPTS, max_new_tokens=NEW, compiled=True) == expected
    alone = generate(model, PROMPTS[2:3], max_new_tokens=NEW, compiled=True)
    assert alone == expected[2:3]


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=1.7, top_k=20, top_p=0.97, min_p=0.01, seed=40),
        dict(stop=[4, 16, 23]),
        dict(prefill_chunk=3),
        dict(max_new_tokens=1),
        dict(max_new_tokens=12),
    ],
)
@pytest.mark.parametrize("form", ["rotary", "windows"])
def test_options(form, options):
    rows = both(build(form), **options)
    if "stop" in options:
        lengths = {len(row) - len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)}
        assert len(lengths) > 1


def test_padding_on_the_right():
    model = build("windows")
    tokens = torch.tensor([prompt + [13] * (8 - len(prompt)) for prompt in PROMPTS])
    mask = torch.arange(8) < torch.tensor([[len(prompt)] for prompt in PROMPTS])
    expected = [continued(model, prompt) for prompt in PROMPTS]
    options = dict(max_new_tokens=NEW, attention_mask=mask, compiled=True)
    assert generate(model, tokens, **options) == expected


def test_greedy_matches_transformers():
    from models.checkpoints import from_hf

    theirs = mistral()
    theirs.generation_config.eos_token_id = None
    ours = generate(from_hf(theirs), PROMPTS, max_new_tokens=NEW, stop=(), compiled=True)
    for prompt, row in zip(PROMPTS, ours, strict=True):
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, attention_mask=mask)
        assert row == theirs.generate(torch.tensor([prompt]), **options)[0].tolist()


def test_logits_equal_the_logits_without_it():
    model = build("rotary")
    found = generate_steps(model, PROMPTS, max_new_tokens=NEW, compiled=True)
    for step, other in zip(found, generate_steps(model, PROMPTS, max_new_tokens=NEW), strict=True):
        torch.testing.assert_close(step.logits, other.logits, atol=2e-5, rtol=0)
        # The next step does not read these tensors.
        for tensor in (step.tokens, step.running, step.logits):
            tensor.zero_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    model = copy.deepcopy(build("windows")).to(dtype)
    options = dict(max_new_tokens=NEW)
    found = [*generate_steps(model, PROMPTS[:1], compiled=True, **options)]
    assert found[-1].logits.dtype == dtype
    if dtype == torch.float64:
        both(model)


# Hooks.

EDITS = {
    "everywhere": {POINT: edits.zero()},
    "function": {POINT: lambda value, point: value * 0.3 - value.roll(1, -1)},
    "heads": {"blocks.0.attn.z": edits.scale(-2.0, head=[0, 3])},
    "several": {"blocks.*.resid_pre": edits.scale(1.3), POINT: edits.project_out(VECTOR)},
    "last": {"blocks.*.mlp_out": edits.add(VECTOR, pos=-1)},
    "prompt": {"blocks.*.resid_pre": edits.add(VECTOR, pos=6)},
    "later": {"blocks.1.resid_pre": edits.add(VECTOR, pos=slice(9, None))},
    "one step": {"blocks.1.resid_pre": edits.add(VECTOR, pos=9)},
    "before the last": {"blocks.1.resid_pre": edits.add(VECTOR, pos=-2)},
    "rows": {POINT: edits.add(VECTOR, batch=[0, 2])},
    "columns by row": {POINT: edits.add(VECTOR, pos=[[6], [8, 9], [6], [10]])},
    "vector at a head": {"blocks.1.attn.z": edits.replace(VECTOR[:5], head=2, pos=slice(8, None))},
    "noise": {POINT: edits.noise(3.0)},
    "pattern": {"blocks.1.attn.pattern": edits.zero(key=-1)},
    "scores": {"blocks.*.attn.scores": edits.knockout(key=6)},
    "scale": {"blocks.*.ln2.scale": lambda value, point: value * 0.4},
}


# Edits may count columns of these prompts, because the caller has padded them on the left.
PADDED = Text.padded([*map(torch.tensor, PROMPTS)], side="left")


@pytest.mark.parametrize("kind", EDITS)
def test_edits(kind):
    model = build("learned")
    plain = generate(model, PROMPTS, max_new_tokens=NEW)
    with HookedRunner(model).hooks(EDITS[kind]):
        assert both(model, PADDED) != plain
    # The graph that the model keeps has no edits.
    assert generate(model, PROMPTS, max_new_tokens=NEW, compiled=True) == plain
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_edits_from_a_cache_take_the_column_of_the_step():
    model = build("learned")
    runner = HookedRunner(model)
    texts = [continued(model, prompt, 9)[:13] for prompt in ([5, 9, 2, 6], [3, 3, 8, 1])]
    _, source = runner.run_with_cache(torch.tensor(texts).flip(0))
    prompts = [text[:4] for text in texts]
    plain = generate(model, prompts, max_new_tokens=NEW)
    with runner.hooks({POINT: edits.replace(source)}):
        assert both(model, prompts) != plain


def test_hooks_that_do_more_than_edit():
    """Receipts, caches and PyTorch's own hooks see every step."""
    model = build("learned")
    runner = HookedRunner(model)
    with runner.hooks(EDITS["everywhere"], receipts=True) as context:
        generate(model, PROMPTS, max_new_tokens=NEW, compiled=True)
    assert context.receipts[0].calls == NEW

    def run(prompts):
        return generate(model, prompts, max_new_tokens=NEW, compiled=True)

    rows, cache = runner.run_with_cache(PROMPTS, names=POINT, run=run)
    assert rows == generate(model, PROMPTS, max_new_tokens=NEW)
    assert cache[POINT].shape[1] == len(PROMPTS[0]) + NEW - 1
    lengths = []
    handle = model.blocks[0].register_forward_hook(
        lambda module, args, output: lengths.append(output.shape[1])
    )
    with handle:
        generate(model, PROMPTS, max_new_tokens=NEW, compiled=True)
    assert lengths == [7] + [1] * (NEW - 1)


def test_hooks_may_change_between_steps():
    model = build("learned")

    def tokens(**options):
        rows, runner = [], HookedRunner(model)
        steps = generate_steps(model, PROMPTS, max_new_tokens=NEW, **options)
        for n in range(NEW):
            with runner.hooks({POINT: edits.add(VECTOR * n)}) if n % 2 else runner.hooks({}):
                rows.append(next(steps).tokens.tolist())
        return rows

    assert tokens(compiled=True) == tokens()


# The buffers that a model keeps.


def test_buffers_are_used_again():
    model = build("window")
    model_kept = generate(model, PROMPTS, max_new_tokens=NEW, compiled=True)
    first = vars(model)["compiled_step"].cache
    shorter = [prompt[:2] for prompt in reversed(PROMPTS)]
    both(model, shorter, max_new_tokens=9)
    assert vars(model)["compiled_step"].cache is first
    assert generate(model, PROMPTS, max_new_tokens=NEW, compiled=True) == model_kept
    both(model, PROMPTS[:3])
    assert vars(model)["compiled_step"].cache is not first


def test_numbers_of_an_earlier_generation_have_no_effect():
    """A key is masked by a weight of 0, but 0 times NaN is NaN."""
    model = build("learned")

    def spoil(value, point):
        return value * torch.nan

    with (
        HookedRunner(model).hooks({"blocks.0.attn.v": spoil}),
        pytest.raises(ValueError, match="nan in row 0"),
    ):
        list(generate_steps(model, PROMPTS, max_new_tokens=NEW, compiled=True))
    steps = generate_steps(model, PROMPTS, max_new_tokens=NEW, compiled=True)
    next(steps), next(steps)
    cache = vars(model).get("compiled_step")
    assert cache is None  # the open generation uses the buffers
    steps.close()
    for layer in vars(model)["compiled_step"].cache.layers:
        layer.values.fill_(torch.nan)
    both(model)


def test_two_generations_at_once():
    model = build("rotary")
    other = [[2, 7, 1], [8, 2], [8], [1, 8, 2]]
    expected = [generate(model, prompts, max_new_tokens=NEW) for prompts in (PROMPTS, other)]
    steps = [
        generate_steps(model, prompts, max_new_tokens=NEW, compiled=True)
        for prompts in (PROMPTS, other)
    ]
    found = [[], []]
    for pair in zip(*steps, strict=True):
        for tokens, step in zip(found, pair, strict=True):
            tokens.append(step.tokens)
    for prompts, tokens, rows in zip((PROMPTS, other), found, expected, strict=True):
        columns = torch.stack(tokens, 1).tolist()
        assert [[*p, *new] for p, new in zip(prompts, columns, strict=True)] == rows


def test_copies_and_files_do_not_contain_the_buffers():
    model = copy.deepcopy(build("learned"))
    both(model)
    both(copy.deepcopy(model))
    file = io.BytesIO()
    torch.save(model, file)
    assert file.tell() < sum(p.nbytes for p in model.parameters()) + 200_000
    file.seek(0)
    both(torch.load(file, weights_only=False))


def test_inference_mode_and_back():
    model = copy.deepcopy(build("windows"))
    with torch.inference_mode():
        both(model)
    both(model)


# Counts and errors.


@pytest.mark.parametrize(
    ("compiled", "stop", "starts"), [(False, (), 61), (True, (), 60), (True, (3, 4), 68)]
)
def test_a_step_starts_few_kernels_and_waits_once(compiled, stop, starts):
    """A compiled step runs here without a compiler, so each operation counts as one kernel."""
    config = TransformerConfig(**SIZES | dict(n_ctx=40))
    model = Transformer(config).eval().requires_grad_(False)

    def counts(new):
        options = dict(max_new_tokens=new, stop=stop, compiled=compiled)
        return counted(lambda model: generate(model, PROMPTS, **options), model)

    nine, four = counts(9), counts(4)
    assert nine.waits - four.waits == 5
    assert nine.starts - four.starts <= 5 * starts


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("compiled", "message"), [("yes", "mode='reduce-overhead'"), (dict(modes="x"), "mode")]
)
def test_wrong_options(compiled, message):
    with pytest.raises(TypeError, match=message):
        generate(build(), PROMPTS, max_new_tokens=2, compiled=compiled)


@pytest.mark.usefixtures("unchecked")
def test_other_models_have_their_own_option():
    theirs = tiny.model("GPT2LMHeadModel", vocab_size=29, hidden_size=10)
    for function in (generate, generate_steps, generate_text):
        with pytest.raises(TypeError, match='cache_implementation="static"'):
            function(theirs, PROMPTS, max_new_tokens=2, compiled=True)
    model = attach(theirs).model
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    tokens = torch.tensor(PROMPTS[:1])
    options |= dict(attention_mask=torch.ones_like(tokens))
    vector = torch.randn(10)
    for edit in (edits.add(vector * 3, pos=9), edits.add(vector * 3), edits.zero(pos=-1)):
        with HookedRunner(model).hooks({"blocks.0.mlp_out": edit}):
            expected = model.generate(tokens, **options)
            static = dict(cache_implementation="static", disable_compile=True)
            assert torch.equal(model.generate(tokens, **static, **options), expected)
