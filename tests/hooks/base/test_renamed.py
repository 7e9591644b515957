"""Former names and keywords that still work, with a warning."""

import importlib
import inspect
import sys
import warnings

import pytest

import interp
from hooks.base import explains_calls
from hooks.base.renamed import Renamed, renamed_keywords, warn_of_change, warn_of_old_name

PACKAGE = """
from hooks.base.kinds import missing_name
from hooks.base.renamed import Renamed

def half(x):
    return x / 2

__getattr__ = missing_name(
    __name__,
    ["half"],
    moved={"halved": Renamed("renaming.half", "0.3"), "quarter": "renaming.half, twice"},
)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in which `halved` is the old name of `half`."""
    (tmp_path / "renaming").mkdir()
    (tmp_path / "renaming/__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("renaming")
    del sys.modules["renaming"]


def warnings_of(action):
    """Return the result of an action, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, caught


def imported():
    """Import the old name as users do."""
    from renaming import halved

    return halved


@pytest.mark.parametrize("form", ["attribute", "import"])
def test_an_old_name_of_a_package_works_and_warns_once(package, form):
    action = imported if form == "import" else lambda: package.halved
    function, caught = warnings_of(action)
    assert function is package.half
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    assert str(warning.message) == (
        "renaming.halved is now renaming.half; the old name stops working in version 0.3"
    )


def test_an_old_name_of_interp_works_and_warns_once(monkeypatch):
    # `interp` imports its names when they are first used, so it has a lookup of its own.
    monkeypatch.setitem(interp._MOVED, "lens_readout", Renamed("interp.logit_lens", "0.3"))
    names = {}
    _, caught = warnings_of(lambda: exec("from interp import lens_readout", names))
    assert names["lens_readout"] is interp.logit_lens
    assert [warning.category for warning in caught] == [DeprecationWarning]


def test_a_form_that_changes_later_warns_once_with_both_meanings():
    _, caught = warnings_of(lambda: warn_of_change("batches() has size=8", "size=16", "0.3"))
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert str(warning.message) == "batches() has size=8; from version 0.3 on: size=16"


def test_an_old_name_that_stopped_working_is_an_error(package):
    with pytest.raises(AttributeError, match="it is now renaming.half, twice"):
        _ = package.quarter
    with pytest.raises(AttributeError, match="close matches: half"):
        _ = package.hal


@renamed_keywords("0.3", positions="pos", rows="keep")
@explains_calls
def chosen(values, *, pos=-1, keep=True):
    """Return a value."""
    return values[pos] if keep else None


def test_an_old_keyword_works_and_warns_once():
    value, caught = warnings_of(lambda: chosen([3, 5, 7], positions=1))
    assert value == 5
    (warning,) = caught
    assert warning.category is DeprecationWarning
    assert warning.filename == __file__
    assert str(warning.message) == (
        "positions= of chosen is now pos=; the old name stops working in version 0.3"
    )
    assert warnings_of(lambda: chosen([3], rows=False))[0] is None


def test_the_warning_names_a_function_inside_another_function_and_a_method():
    inner = renamed_keywords("0.3", first="x")(lambda x: x)
    _, (warning,) = warnings_of(lambda: inner(first=3))
    assert str(warning.message).startswith("first= of <lambda> is now x=; ")
    method = renamed_keywords("0.3", length="size")(Circle.grown)
    _, (warning,) = warnings_of(lambda: method(Circle(), length=2))
    assert str(warning.message).startswith("length= of Circle.grown is now size=; ")


def test_a_new_keyword_gives_no_warning():
    assert warnings_of(lambda: chosen([3, 5, 7], pos=0)) == (3, [])
    assert [*inspect.signature(chosen).parameters] == ["values", "pos", "keep"]


def test_wrong_keywords_of_a_function_with_old_ones_are_errors():
    with pytest.raises(TypeError, match="takes pos= or its old name positions=; got both"):
        chosen([3], pos=0, positions=0)
    with pytest.raises(TypeError, match="takes no argument poss=; close matches: pos"):
        chosen([3], poss=0)


class Circle:
    """A class whose attribute `size` is now `radius`."""

    radius = 3

    def grown(self, size):
        """Return a larger radius."""
        return self.radius + size

    @property
    def size(self):
        """The old name of the radius."""
        warn_of_old_name("Circle.size", "Circle.radius", "0.3")
        return self.radius


def test_an_old_attribute_works_and_warns():
    value, (warning,) = warnings_of(lambda: Circle().size)
    assert value == 3
    assert str(warning.message).startswith("Circle.size is now Circle.radius; ")


def test_a_class_is_not_decorated():
    with pytest.raises(TypeError, match=r"decorate Circle\.__init__"):
        renamed_keywords("0.3", size="radius")(Circle)
