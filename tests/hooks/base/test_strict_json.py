"""JSON without NaN and infinity: any strict reader can read the output."""

import json
import math

import numpy as np
import pytest

from hooks.base import strict_json

NUMBERS = [math.nan, math.inf, -math.inf, np.float64("nan")]
PLACES = [
    (lambda number: number, "the top"),
    (lambda number: [0.5, None, number], r"\[2\]"),
    (lambda number: {"nodes": [{}, {"influence": number}]}, r"nodes\[1\]\.influence"),
    (lambda number: {"a": ({"b": (1, [number])},)}, r"a\[0\]\.b\[1\]\[0\]"),
]


def strictly(text):
    """Read JSON, and fail at words that are not in the standard, such as NaN."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("made", "place"), PLACES)
def test_a_number_that_is_not_finite_is_refused_by_its_place(number, made, place):
    match = rf"got -?(nan|inf) at {place}$"
    with pytest.raises(ValueError, match=match):
        strict_json.dumps(made(number))
    with pytest.raises(ValueError, match=match):
        strict_json.loads(json.dumps(made(number)))


def test_a_number_that_is_too_large_for_a_float_is_refused_too():
    with pytest.raises(ValueError, match="inf at weight"):
        strict_json.loads('{"weight": 1e999}')
    assert strict_json.loads('{"weight": 1e308, "count": 7}') == {"weight": 1e308, "count": 7}


@pytest.mark.parametrize("number", NUMBERS)
def test_null_stands_for_a_number_that_is_not_finite(number):
    value = {"means": (1.5, [number]), "low": number, "n": 3, "is": True, number: "key"}
    found = strictly(strict_json.dumps(strict_json.finite(value)))
    assert [*found.values()] == [[1.5, [None]], None, 3, True, "key"]


def test_what_is_encoded_is_read_again():
    value = {"bounds": [0.0, math.inf], "low": -math.inf, "text": "NaN", "none": None, "n": {}}
    value["object"] = {"$float": "NaN", "of": "the user"}
    text = strict_json.dumps(strict_json.encoded(value | {"gap": math.nan}))
    strictly(text)
    found = strict_json.decoded(text)
    assert math.isnan(found.pop("gap"))
    assert found == value
    # Older versions wrote NaN and Infinity into files. Such files can still be read.
    assert strict_json.decoded('{"bounds": [NaN, Infinity]}')["bounds"][1] == math.inf


def test_options_match_python():
    value = {"b": ["é", 1.5], "a": {3}}
    options = dict(indent=1, ensure_ascii=False, sort_keys=True, default=sorted)
    assert strict_json.dumps(value, **options) == json.dumps(value, **options)
    with pytest.raises(TypeError):
        strict_json.dumps(value)
