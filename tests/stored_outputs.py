"""The build script of the guides as a module, and a comparison of printed and stored outputs."""

import importlib.util
import math
import re
from pathlib import Path

GUIDES = Path(__file__).parent.parent / "examples" / "guides"
_spec = importlib.util.spec_from_file_location("build", GUIDES / "build.py")
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)


NUMBER = re.compile(r"[-+]?\d[\d,_]*\.?\d*(?:e[-+]?\d+)?")


def numbers(text):
    return [float(number.replace(",", "").replace("_", "")) for number in NUMBER.findall(text)]


def assert_same(printed, stored):
    """Check that two texts have the same words, and the same numbers to about two digits.

    The numbers may differ a little, because machines round differently.
    """
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", stored).split()
    for ours, theirs in zip(numbers(printed), numbers(stored), strict=True):
        assert math.isclose(ours, theirs, rel_tol=0.02, abs_tol=0.011), (printed, stored)
