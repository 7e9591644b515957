"""Types of results that type checkers and editors show. `mypy` checks this file in `.ci/lint`."""

from typing import Any, assert_type

from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner
from interp import Pairs, Result, activation_patching, run_with_cache
from interp.features import Dictionary, load_sae
from interp.protocol import LanguageModel
from models import Attached, Transformer, attach, generate_text, load


def plain() -> None:
    """A plain transformer returns logits, also inside a runner."""
    model = assert_type(load("pydoc-4l"), Transformer)
    assert_type(model("import"), Tensor)
    runner = assert_type(HookedRunner(model), HookedRunner[Tensor])
    assert_type(runner.run_with_cache("import"), tuple[Tensor, ActivationCache])
    assert_type(runner.run_with_hooks("import"), Tensor)
    assert_type(runner("import"), Tensor)
    assert_type(run_with_cache(model, "import"), tuple[Tensor, ActivationCache])
    assert_type(runner.capture("import", names="*")["pattern", 3], Tensor)
    pairs = Pairs("a", "b", (" c", " d"))
    assert_type(activation_patching(model, pairs), Result)
    assert_type(load_sae("pydoc-4l/resid_post"), Dictionary)


def protocol() -> LanguageModel:
    """A plain transformer has all parts of a language model."""
    return load("pydoc-4l")


def with_run() -> None:
    """`run=` decides the type of the output."""
    model = load("pydoc-4l")
    runner = HookedRunner(model)
    assert_type(runner.run_with_cache(run=lambda: 3), tuple[int, ActivationCache])
    assert_type(run_with_cache(model, run=lambda: 3), tuple[int, ActivationCache])


def other(model: nn.Module) -> None:
    """The output of a module may be anything."""
    runner = assert_type(HookedRunner(model), HookedRunner[Any])
    assert_type(runner.run_with_cache(3), tuple[Any, ActivationCache])
    assert_type(run_with_cache(model, 3), tuple[Any, ActivationCache])
    assert_type(attach(model), Attached)


def texts() -> None:
    """A text gives a text, and several texts give a list."""
    model = load("pydoc-4l")
    assert_type(generate_text(model, "a", max_new_tokens=3), str)
    assert_type(generate_text(model, ["a", "b"], max_new_tokens=3), list[str])
    assert_type(model.to_text(3), str)
    assert_type(model.to_text([3, 5]), str)
