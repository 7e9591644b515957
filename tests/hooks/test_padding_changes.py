"""Warnings of hook functions that change only padding in a text."""

import warnings

import pytest
import torch

import interp
import models
from hooks import HookedRunner
from tests import tiny
from tests.reference import BATCH, POS, some_tokens, variant


def of_last_column(value, point):
    value[:, -1] = 0


@pytest.fixture(scope="module")
def wide():
    return HookedRunner(variant("pre"))


@pytest.fixture(scope="module")
def texts():
    return some_tokens()


def padding_warnings(call):
    """Return the warnings of a call about changes of padding, and the files that they name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught], {each.filename for each in caught}


def test_one_warning_for_each_call_names_points_and_texts(wide, texts):
    right = torch.ones(BATCH, POS).bool()
    right[:, 4:] = False
    points = [f"blocks.{layer}.mlp_out" for layer in range(2)]
    each = dict.fromkeys(points, of_last_column)

    def in_with():
        with wide.hooks(each):
            for _ in range(2):
                wide.model(texts, attention_mask=right)

    def in_a_sweep():
        metric = interp.log_prob(torch.zeros(BATCH, dtype=torch.long))
        jobs = [{point: of_last_column} for point in points]
        interp.sweep(wide.model, texts, jobs, metric, attention_mask=right)

    def in_a_run():
        wide.run_with_hooks(texts, attention_mask=right, hooks=each)

    for call in (in_with, in_a_sweep, in_a_run):
        [message], files = padding_warnings(call)
        assert "blocks.0.mlp_out and 1 other point changed only" in message
        assert f"in {BATCH} texts, first: 0, 1, 2: column {POS - 1} is padding" in message
        assert files == {__file__}


def test_a_handle_warns_after_each_run(wide, texts):
    right = torch.ones(BATCH, POS).bool()
    right[1, 2:] = False
    handle = wide.add({"blocks.1.mlp_out": of_last_columns})
    try:
        for _ in range(2):
            [message], files = padding_warnings(lambda: wide.model(texts, attention_mask=right))
            assert "only padding in text 1: the changed columns are padding" in message
            assert files == {__file__}
    finally:
        handle.remove()


def of_last_columns(value, point):
    value[:, -2:] = 0


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("name", ["transformer.h.1", "transformer.h.1.mlp", "transformer.wte"])
def test_padding_at_modules_without_a_point(name, is_attached):
    model = tiny.model("GPT2LMHeadModel")
    tokens = torch.arange(15).view(3, 5)
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[1, 3:] = 0
    if is_attached:
        models.attach(model)
    runner = HookedRunner(model)

    def run(hook, mask):
        return padding_warnings(
            lambda: runner.run_with_hooks(tokens, attention_mask=mask, hooks={name: hook})
        )[0]

    [message] = run(of_last_column, mask)
    assert f"at {name} changed only padding in text 1: column 4 is padding" in message
    assert not run(of_last_column, mask.flip(1))
    assert not run(of_last_column, torch.ones_like(mask))
    assert not run(lambda value, point: value * 2, mask)
    assert not run(lambda value, point: value, mask)
    # A run without a mask reads whole texts, also after a run with a mask.
    assert not run(of_last_column, None)

    def second(value, point):
        calls.append(point.name)
        return value * 1 if len(calls) == 1 else of_last_column(value, point)

    def two_runs():
        with runner.hooks({name: second}):
            model(tokens, attention_mask=mask)
            model(tokens)

    calls = []
    assert not padding_warnings(two_runs)[0]
    assert len(calls) == 2


def test_a_generation_warns_once():
    model = variant("pre")

    def of_first_column(value, point):
        value[:, 0] = 0

    def in_a_generation():
        with HookedRunner(model).hooks({"blocks.1.resid_pre": of_first_column}):
            models.generate(model, [[3, 1], [4, 1, 5, 2]], max_new_tokens=2)

    [message], files = padding_warnings(in_a_generation)
    assert "in text 0: column 0 is padding" in message
    assert files == {__file__}
