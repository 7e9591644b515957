"""Rewritten steps, with generators whose distributions are known."""

import math
import re
from collections import Counter

import numpy as np
import pytest
import torch

from hooks import ModeError
from interp import Steps, resampled, run_with_cache
from models import CharTokenizer, Transformer, TransformerConfig, attach, load
from tests import tiny

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .?\n"


@pytest.fixture(scope="module")
def model():
    sizes = dict(vocab_size=len(LETTERS), n_ctx=120, n_layers=4, n_heads=2, d_model=8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(TransformerConfig(**sizes)).eval().requires_grad_(False)
    model.tokenizer = CharTokenizer(LETTERS)
    return model


class Writer:
    """A generator that continues the story by hand-made rules.

    The second sentence decides: after "Take two." the answer is 2, after any other second sentence
    it is 7 with a probability of 3/4 and 2 with 1/4. Only a rewritten second sentence differs.
    """

    def __init__(self, model):
        self.model, self.calls = model, []

    def __call__(self, prompts, *, max_new_tokens, temperature, seed):
        self.calls.append((prompts, max_new_tokens, temperature, seed))
        draws = np.random.default_rng(seed)
        return [self.model.encoded(self.continued(self.model.to_text(p), draws)) for p in prompts]

    @staticmethod
    def continued(text, draws):
        new = ""
        if "First" not in text:
            new += " First we count."
        if "Take" not in text:
            new += " Take seven." if draws.random() < 0.75 else " Take two."
        if "Then" not in text:
            new += " Then add."
        if "is" not in text + new:
            new += f" It is {2 if 'two' in text + new else 7}."
        return new


TEXT = " First we count. Take two. Then add. It is 2."


def kl(first, second, smoothing):
    answers = sorted({*first, *second})
    return divergence(*(smoothed(of_set, answers, smoothing) for of_set in (first, second)))


def smoothed(of_set, answers, smoothing):
    counts = Counter(of_set)
    total = len(of_set) + smoothing * len(answers)
    return [(counts[answer] + smoothing) / total for answer in answers]


def divergence(first, second):
    return sum(p * math.log(p / q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("even", "odd"),
    [
        ((0.25, 0.25, 0.25, 0.25), (0.25, 0.25, 0.25, 0.25)),
        ((0.7, 0.2, 0.1), (0.1, 0.2, 0.7)),
        ((0.4, 0.3, 0.3, 0, 0, 0), (0, 0, 0, 0.4, 0.3, 0.3)),
    ],
)
def test_intervals_contain_the_divergence_of_known_distributions(model, even, odd):
    """Of 38 intervals, at least 35: with equal, overlapping or disjoint distributions."""
    steps = Steps(model, "Q.", " Ab" * 38, by="word")

    def write(prompts, *, seed, **options):
        probs = even if len(prompts[0]) % 2 else odd
        drawn = np.random.default_rng(seed).choice(len(probs), len(prompts), p=probs)
        return [model.encoded(f" {number}") for number in drawn]

    result = resampled(model, steps, n=8, write=write, similar=lambda a, b: False, seed=2)
    known = [[(8 * p + 1) / (8 + len(probs)) for p in probs] for probs in (even, odd)]
    assert {*steps.words[1:]} == {" Ab"}
    n_hits = 0
    for step, (low, high) in enumerate(zip(result.low[0], result.high[0], strict=True)):
        wanted = divergence(*(known[::-1] if step % 2 else known))
        n_hits += int(low - 1e-6 <= wanted <= high + 1e-6)
        assert 0 <= low <= result.effects.values[0, step, 0] <= high
        assert low < high
    assert n_hits >= 35


def test_the_deciding_step_has_the_divergence_of_the_known_distributions(model):
    steps = Steps(model, "Q.", TEXT)
    assert steps.words[2:] == [" Take two.", " Then add.", " It is 2."]
    writer = Writer(model)
    result = resampled(
        model, steps, n=120, write=writer, seed=1, smoothing=1e-3, similar=lambda a, b: a == b
    )
    assert result.effects.axes == ("importance", "step", "example")
    assert result.effects.labels["step"] == (1, 2, 3, 4)
    assert result.effects.unit == "nats"
    values = result.effects.values[..., 0]
    # Without step 2: 7 with 3/4. With step 2: always 2. The rare answer has only the smoothing.
    p, q = 0.75, 1e-3 / (120 + 2e-3)
    wanted = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert math.isclose(values[0, 1], wanted, rel_tol=0.1)
    # Only rewritten steps that differ: 7 always.
    assert math.isclose(values[1, 1], math.log(1 / q), rel_tol=0.01)
    assert math.isclose(result.same[1], 0.25, abs_tol=0.08)
    assert result.low[0, 1] < values[0, 1] < result.high[0, 1]
    # The first step is written again before the second: both sets have 7 with 3/4.
    assert values[0, 0] < 0.02
    assert math.isnan(values[1, 0])
    assert result.same[0] == 1
    assert values[0, 2] == values[0, 3] == 0
    # All 240 answers are the same. The next one may differ, so the interval is no point.
    assert result.low[0, 3] == 0 < result.high[0, 3] < 0.2
    assert {*result.rewritten[1]} == {" Take two.", " Take seven."}
    assert {*result.without[1]} == {"2", "7"}
    assert {*result.after[1]} == {"2"}


def test_importances_and_intervals_are_those_of_the_answers(model):
    steps = Steps(model, "Q.", TEXT)
    options = dict(n=43, write=Writer(model), seed=3, smoothing=0.5)
    result = resampled(model, steps, **options, similar=lambda a, b: a == b)
    draws = np.random.default_rng(0)
    for place in range(4):
        wanted = kl(result.without[place], result.after[place], 0.5)
        assert math.isclose(result.effects.values[0, place, 0], wanted, abs_tol=1e-6)
        original = steps.words[place + 1]
        different = [
            answer
            for answer, text in zip(result.without[place], result.rewritten[place], strict=True)
            if text != original
        ]
        if different:
            wanted = kl(different, result.after[place], 0.5)
            assert math.isclose(result.effects.values[1, place, 0], wanted, abs_tol=1e-6)
    # A bootstrap of the same two sets by hand, up to its noise: draws from the probabilities of
    # counts plus 1, and both ends moved down by twice the bias.
    sets = (result.without[1], result.after[1])
    answers = [*dict.fromkeys([*sets[0], *sets[1]])]
    smooth = [smoothed(of_set, answers, 1) for of_set in sets]
    drawn = []
    for _ in range(4000):
        counts = [draws.multinomial(43, probs) for probs in smooth]
        drawn.append(divergence(*((count + 0.5) / 44 for count in counts)))
    source = divergence(*([(43 * p + 0.5) / 44 for p in probs] for probs in smooth))
    low, high = np.quantile(drawn, [0.025, 0.975])
    low -= 2 * (np.mean(drawn) - source)
    high -= 2 * max(0, np.mean(drawn) - kl(*sets, 0.5))
    assert len(answers) == 2
    assert low > 0
    assert math.isclose(result.low[0, 1], low, abs_tol=0.1)
    assert math.isclose(result.high[0, 1], high, abs_tol=0.1)
    again = resampled(model, steps, **options, similar=lambda a, b: a == b)
    assert torch.equal(again.effects.values[0], result.effects.values[0])
    assert torch.equal(again.low[0], result.low[0])
    other = resampled(model, steps, **options | {"seed": 4}, similar=lambda a, b: a == b)
    assert other.without != result.without


def test_prompts_seeds_and_the_temperature_reach_the_generator(model):
    steps = Steps(model, "Q.", TEXT)
    writer = Writer(model)
    resampled(model, steps, n=3, write=writer, temperature=0.6, max_new_tokens=50)
    texts = ["Q." + "".join(steps.words[1:k]) for k in range(1, 6)]
    assert [[model.to_text(p) for p in call[0]] for call in writer.calls] == [
        [t] * 3 for t in texts
    ]
    assert {call[1:3] for call in writer.calls} == {(50, 0.6)}
    assert len({call[3] for call in writer.calls}) == 5


def test_a_question_is_added_after_whole_steps(model):
    steps = Steps(model, "Q.", TEXT)

    def write(prompts, *, max_new_tokens, temperature, seed):
        asked.extend(model.to_text(p) for p in prompts)
        news = {40: " One. Two. Thr", 8: " 3 and 4"}[max_new_tokens]
        return [model.encoded(news)[:cut] for cut in [*range(14, 14 + len(prompts))]]

    asked = []
    result = resampled(
        model, steps, n=2, write=write, question=" So?", max_new_tokens=40, similar=lambda a, b: 0
    )
    # The continuation is shorter than 40 tokens, so its last step is complete.
    assert asked[2:4] == ["Q. One. Two. Thr So?"] * 2
    assert result.without[0] == ("3", "3")

    def cut(prompts, *, max_new_tokens, temperature, seed):
        asked.extend(model.to_text(p) for p in prompts)
        return [model.encoded(" One. Two. Thr")[:max_new_tokens] for _ in prompts]

    for limit, kept in ((14, " One. Two."), (4, " One")):
        asked = []
        options = dict(max_new_tokens=limit, similar=lambda a, b: 0, answer=lambda text: text)
        resampled(model, steps, n=1, write=cut, question=" So?", **options)
        assert asked[1] == f"Q.{kept} So?"


def test_answers_are_last_matches_groups_or_results_of_a_function(model):
    steps = Steps(model, "Q 5.", " It is 2. It is 31.")

    def write(prompts, **options):
        return [model.encoded(" It is 47. x") for _ in prompts]

    options = dict(n=1, write=write, similar=lambda a, b: 1)
    assert resampled(model, steps, **options).without == (("47",), ("47",))
    assert resampled(model, steps, answer=r"is (\d)\d", **options).without[0] == ("4",)
    # The answer is searched in the text of the answer, not in the prompt.
    assert resampled(model, steps, answer=r"\b\d\b", **options).without == ((None,), ("2",))
    found = resampled(model, steps, answer=lambda text: text, **options).without
    assert found == ((" It is 47. x",), (" It is 2. It is 47. x",))


def test_the_largest_importances_have_their_intervals(model):
    result = resampled(model, Steps(model, "Q.", TEXT), n=5, write=Writer(model), seed=3)
    values = result.effects.values[..., 0]
    first = result.top(2)[0]
    assert first.where == {"importance": "resampling", "step": 2}
    assert (first.effect, first.low, first.high) == (
        float(values[0, 1]),
        float(result.low[0, 1]),
        float(result.high[0, 1]),
    )
    assert "no answer" not in repr(result)


def test_texts_without_an_answer_are_counted_or_are_an_error(model):
    steps = Steps(model, "Q 5.", " It is 2. It is 31.")

    def write(prompts, **options):
        return [model.encoded(" It is 47. x") for _ in prompts]

    options = dict(n=3, write=write, similar=lambda a, b: True)
    # 2 is in the text of the answer from the second step on.
    assert "no answer in 3 of 9 continuations" in repr(
        resampled(model, steps, **options, answer=r"\b2\b")
    )
    with pytest.raises(ValueError, match="None for all 9.*answer="):
        resampled(model, steps, **options, answer="red")


def test_cosines_are_those_of_the_mean_stream(model):
    steps = Steps(model, "Q.", " Abc de. Fgh.")
    texts = [" Abc de. x", " Xy? x", " Ad. x", ""]

    def write(prompts, **options):
        return [model.encoded(text) if text else [] for text in texts]

    def vector(text):
        _, cache = run_with_cache(model, "Q" + text, names="blocks.2.resid_post")
        return cache["resid_post", 2][0, 1:].mean(0)

    wanted = torch.stack(
        [
            torch.cosine_similarity(vector(original), vector(text), dim=0)
            for original in (" Abc de.", " Fgh.")
            for text in (" Abc de.", " Xy?", " Ad.")
        ]
    )
    limit = float(wanted.sort().values[3:5].mean())
    options = dict(n=4, write=write, answer=lambda text: text)
    result = resampled(model, steps, **options, threshold=limit)
    assert (result.same * 4).tolist() == [
        int((wanted[:3] > limit).sum()),
        int((wanted[3:] > limit).sum()),
    ]
    assert math.isclose(wanted[0], 1, abs_tol=1e-5)
    # Without a threshold, it is the median of the six cosines (the lower one).
    result = resampled(model, steps, **options)
    assert (result.same * 4).sum() == 3
    assert f"{wanted.sort().values[2]:.4g}" in result.effects.about["same"]


def test_models_continue_by_themselves():
    model = load("pydoc-4l").requires_grad_(False)
    steps = Steps(model, "Return the", " sum of 2 numbers. It is 3.")
    result = resampled(model, steps, n=4, max_new_tokens=12, seed=2)
    assert all(len(answers) == 4 for answers in result.without)
    assert len({*result.rewritten[0]}) > 1
    again = resampled(model, steps, n=4, max_new_tokens=12, seed=2)
    assert again.rewritten == result.rewritten
    written = Steps(model, "import o", max_new_tokens=6)
    assert written.first_answer == 1
    new = model.continuations([model.encoded("import o")], max_new_tokens=6)[0]
    assert written.tokens == model.encoded("import o") + new


def test_attached_models_continue_with_their_generate():
    sizes = dict(vocab_size=len(LETTERS), max_position_embeddings=64)
    theirs = tiny.model("GPT2LMHeadModel", **sizes, bos_token_id=0, eos_token_id=1)
    with attach(theirs, tokenizer=CharTokenizer(LETTERS)) as attached:
        steps = Steps(theirs, "Ab.", " Cd. Ef 3.")
        state = torch.get_rng_state()
        result = resampled(theirs, steps, n=3, max_new_tokens=7, seed=5)
        assert torch.equal(torch.get_rng_state(), state)
        assert resampled(theirs, steps, n=3, max_new_tokens=7, seed=5).rewritten == result.rewritten
        prompts = [[5, 6, 7], [8, 9]]
        new = attached.continuations(prompts, max_new_tokens=4)
        for prompt, added in zip(prompts, new, strict=True):
            tokens = [*prompt]
            for _ in range(4):
                tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
            assert [*prompt, *added] == tokens or 1 in tokens


def test_errors(model):
    steps = Steps(model, "Q.", TEXT)
    write = Writer(model)
    cases = [
        (dict(n=0), ValueError, "n must be"),
        (dict(temperature=0), ValueError, "temperature must be above 0"),
        (dict(smoothing=0), ValueError, "smoothing must be above 0"),
        (dict(answer="("), ValueError, "regular expression"),
        (dict(answer=""), ValueError, "does not match an empty text"),
        (dict(answer=3), TypeError, "answer must be a function"),
        (dict(similar=3), TypeError, "similar must be a function"),
        (dict(write=3), TypeError, "write must be a function"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=re.escape(message)):
            resampled(model, steps, **{"write": write} | options)
    with pytest.raises(ValueError, match="with an answer"):
        resampled(model, Steps(model, "Q. One.", ""), write=write)
    with pytest.raises(ValueError, match="sentences or words"):
        resampled(model, Steps(model, "Q.", " A b.", by=["Q.", " A"]), write=write)
    with pytest.raises(TypeError, match="Steps"):
        resampled(model, "Q.", write=write)
    with pytest.raises(TypeError, match="continuations"):
        Steps(WithoutGeneration(model), [1, 2])
    with pytest.raises(ModeError):
        resampled(model.train(), steps, write=write)
    model.eval()


class WithoutGeneration(torch.nn.Module):
    """A model that reads text and cannot continue it."""

    def __init__(self, model):
        super().__init__()
        self.to_tokens, self.to_text = model.to_tokens, model.to_text
