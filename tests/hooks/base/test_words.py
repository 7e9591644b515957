"""Tests that a keyword that nothing reads is an error, which names similar keywords.

Any model gives this error, even if a library has put a wrapper around its forward.
"""

import functools
import typing

import pytest
import torch
from torch import nn

from hooks import HookedRunner, HookPoint
from hooks.base import Words
from models import hints  # noqa: F401  # errors read hints only from imported packages
from tests import tiny


class Kwargs(typing.TypedDict, total=False):
    scale: float
    shift: float


def with_word(forward):
    """Return a forward with one more keyword, `mirrored`, which the decorator reads itself."""

    @functools.wraps(forward)
    def run(self, *args, **kwargs):
        value = forward(self, *args, **{k: v for k, v in kwargs.items() if k != "mirrored"})
        return value.flip(0) if kwargs.get("mirrored") else value

    return run


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = HookPoint("batch pos")


class Closed(Scaled):
    def forward(self, x, *, weight=1.0):
        return self.point(x) * weight


class Typed(Scaled):
    @with_word
    def forward(self, x, *, weight=1.0, **kwargs: typing.Unpack[Kwargs]):
        return self.point(x) * weight * kwargs.get("scale", 1.0)


class Open(Scaled):
    def forward(self, x, *, weight=1.0, **kwargs):
        return self.point(x) * weight * kwargs.get("factor", 1.0)


X = torch.arange(6.0).view(3, 2)
MISSPELT = {
    "run_with_cache": "name mod lasy position dtypes devise grad detatch runs",
    "run_with_hooks": "hook backwards names positions mode",
    "capture": "name detatch position lazy",
    "plan": "name modes hooks",
}


@pytest.mark.parametrize("kind", [Closed, Typed, Open])
@pytest.mark.parametrize("call", MISSPELT)
def test_misspelt_words_are_refused(kind, call):
    runner = HookedRunner(kind().eval())
    right = {"names": "point"} if call == "capture" else {}
    for word in MISSPELT[call].split():
        with pytest.raises(TypeError, match=f"{call} of a {kind.__name__} .* {word}="):
            getattr(runner, call)(X, **right, **{word: 1})
    with pytest.raises(TypeError, match="close matches: weight"):
        Words(Typed().forward).require(["weigth"], (), "the model")
    with pytest.raises(TypeError, match=r"a keyword of another library; use names="):
        getattr(runner, call)(X, **right, names_filter="point")


def test_close_matches_are_words_of_the_call():
    runner = HookedRunner(Closed().eval())
    for word, match in (("name", "names"), ("detatch", "detach"), ("wieght", "weight")):
        with pytest.raises(TypeError, match=f"close matches: {match}$"):
            runner.run_with_cache(X, **{word: 1})
    with pytest.raises(TypeError, match="takes no argument positions=; use pos=$"):
        runner.run_with_cache(X, positions=[1])


class Placed(nn.Module):
    """A model with an argument that is also an option of a cached run."""

    def __init__(self):
        super().__init__()
        self.point = HookPoint("batch pos")

    def forward(self, x, pos=0.0):
        return self.point(x + pos)


def test_a_keyword_of_the_model_is_not_lost_in_an_option():
    runner = HookedRunner(Placed().eval())
    with pytest.raises(TypeError, match="pos= is an option of run_with_cache and an argument of"):
        runner.run_with_cache(X, pos=[1])
    assert torch.equal(runner.run_with_cache(X, 5.0)[0], X + 5)
    output, cache = runner.run_with_cache(X, run=lambda x: runner.model(x, pos=7.0))
    assert torch.equal(output, X + 7)
    assert torch.equal(cache["point"], X + 7)


def test_words_that_something_reads_are_passed_on():
    typed, free = Typed().eval(), Open().eval()
    assert torch.equal(HookedRunner(typed).run_with_hooks(X, weight=2.0, scale=3.0), X * 6)
    output, _ = HookedRunner(typed).run_with_cache(X, mirrored=True)
    assert torch.equal(output, X.flip(0))
    with pytest.raises(TypeError, match="factor="):
        HookedRunner(typed).run_with_hooks(X, factor=5.0)
    assert torch.equal(HookedRunner(free).run_with_hooks(X, factor=5.0), X * 5)
    # `position_ids` looks like the option `positions`, but many models accept it. So no error.
    assert torch.equal(HookedRunner(free).run_with_hooks(X, position_ids=5.0), X)
    output, _ = HookedRunner(free).run_with_cache(X, run=lambda x, gain: free(x) * gain, gain=7.0)
    assert torch.equal(output, X * 7)
    with pytest.raises(TypeError, match="gian=; close matches: gain"):
        HookedRunner(free).run_with_cache(X, run=lambda x, gain: free(x), gian=7.0)


# peft causes these warnings.
@pytest.mark.filterwarnings("ignore:.is_gradient", "ignore:.past_key_values")
@pytest.mark.parametrize("adapter", [None, "lora", "prefix"])
def test_misspelt_words_through_the_wrappers_of_adapters(adapter):
    peft = pytest.importorskip("peft", reason="needs peft")
    from models import attach

    model = tiny.model("LlamaForCausalLM", pad_token_id=0)
    if adapter == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM")).eval()
    elif adapter == "prefix":
        chosen = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        model = peft.get_peft_model(model, chosen).eval()
    tokens = torch.tensor([[3, 5, 7]])
    with attach(model):
        runner = HookedRunner(model)
        for word in ("hook", "prepend_bos", "positon_ids"):
            for run in (model, runner.run_with_hooks, runner.run_with_cache):
                with pytest.raises(TypeError, match=f"{word}="):
                    run(tokens, **{word: 1})
        runner.run_with_hooks(tokens, attention_mask=torch.ones_like(tokens), return_dict=True)
