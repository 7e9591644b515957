"""Errors for arguments of the wrong class, and for names that a package does not have."""

import functools

import pytest
from torch import nn

import interp
import models
from hooks.base import HintsAtNames, require_callable


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("from models import split", "now models.train_test_split"),
        ("from interp import why_attends", "now interp.attention_attribution"),
        ("from interp import logits_lens", "close matches: logit_lens"),
        ("from models import HookedTransformer", "models.load"),
        ("from hooks import HookPoint, Runner", "HookedRunner"),
    ],
)
def test_an_import_of_an_unknown_name_gives_the_known_name(statement, match):
    with pytest.raises(ImportError, match=match):
        exec(statement)


def test_an_attribute_that_is_missing_can_be_asked_for():
    assert not hasattr(interp, "logits_lens")
    assert getattr(models, "split", None) is None
    exec("from interp.store import files")  # a module that the package has not imported yet


def test_an_error_inside_a_property_is_not_an_unknown_name():
    class Shelf(HintsAtNames):
        @property
        def books(self):
            return (3).pages

    with pytest.raises(
        AttributeError, match="'books' of Shelf cannot be read: 'int' object has no"
    ):
        _ = Shelf().books
    with pytest.raises(AttributeError, match="Shelf has no attribute 'book'; close matches: books"):
        _ = Shelf().book


def test_a_function_must_take_the_arguments_that_it_receives():
    parameters = ("model", "cache")
    require_callable("reading", lambda *values: 0, parameters)
    require_callable("reading", functools.partial(max, 3), parameters)
    require_callable("reading", nn.Bilinear(2, 3, 5), parameters)
    with pytest.raises(TypeError, match=r"\(model, cache\); its arguments are \(a, b, c\)"):
        require_callable("reading", lambda a, b, c: 0, parameters)
    with pytest.raises(TypeError, match=r"function of \(model, cache\); got 3; such as max"):
        require_callable("reading", 3, parameters, "such as max")
