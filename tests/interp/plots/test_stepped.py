"""The picture of the steps of a text, as a browser shows it."""

import json
import re
from pathlib import Path

import pytest
import torch

from interp import Result, Steps, plots, suppressed
from tests.browser import seen_in_browser
from tests.shipped import pydoc

WORDS = ["One is <b>.", " Two.\n", "Three", " four."]
VALUES = torch.tensor(
    [[0, 0.5, 0.25, 2.0], [0, 0, 1.0, 0.125], [0, 0, 0, 4.0], [0, 0, 0, 0]], dtype=torch.double
)
MATRIX = Result(VALUES[..., None], ("step", "later", "example"), unit="nats", words={"step": WORDS})

PROBE = Path(__file__).with_name("steps_probe.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    page = plots.steps(WORDS, MATRIX).html()
    return seen_in_browser(page, tmp_path_factory.mktemp("steps"), PROBE)


def strength(colour):
    """The distance of a colour from white paper."""
    return 3 * 255 - sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_steps_are_coloured_by_their_effect_on_the_last_step(seen):
    assert seen["text"] == WORDS
    shades = [strength(colour) for colour in seen["first"]]
    # 2, 0.125 and 4 nats; the last step has no effect on itself.
    assert shades[2] > shades[0] > shades[1] > shades[3] == 0
    assert seen["told"].startswith("4 nats")
    assert "4" in seen["legend"]


def test_a_click_shows_the_effects_of_a_step_and_a_second_click_the_first_colours(seen):
    shades = [strength(colour) for colour in seen["chosen"]]
    assert shades[0] == 0
    assert shades[3] > shades[1] > shades[2] > 0
    assert ["changed" in name for name in seen["marked"]] == [True, False, False, False]
    assert seen["of"].startswith("2 nats of step 0")
    assert seen["itself"].startswith("step 0")
    assert seen["again"] == seen["first"]


def test_keys_choose_a_step_and_the_matrix_is_below(seen):
    assert sum("changed" in name for name in seen["keys"]) == 1
    assert seen["grids"] == 1


def test_one_axis_colours_only_its_steps():
    one = Result(torch.tensor([[1.5], [-3.0]]), ("step", "example"), labels={"step": [1, 3]})
    view = plots.steps(WORDS, one)
    page = view.html()
    part = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["parts"]
    assert len(part) == 1
    assert part[0]["values"] is None
    assert part[0]["limit"] == 3
    assert part[0]["signed"]
    # The page needs no other file.
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_long_texts_show_their_last_steps():
    values = torch.rand(450, 450, 1).triu(1)
    words = [f"{n}. " for n in range(450)]
    view = plots.steps(words, Result(values, ("step", "later", "example")))
    assert view.parts[0]["words"] == words[50:]
    assert view.parts[0]["first"] == 50
    assert view.parts[0]["values"].shape == (400, 400)
    assert "400 of 450" in view.parts[0]["note"]


def test_steps_have_a_picture_and_a_figure(tmp_path):
    pytest.importorskip("matplotlib")
    model = pydoc()
    steps = Steps(model, "Open the file. Read it.", " Return it.")
    view = steps.view(suppressed(model, steps))
    view.save(tmp_path / "steps.html")
    view.save(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    cases = [
        (Result(torch.zeros(3, 1), ("layer", "example")), "axes step"),
        (Result(torch.zeros(2, 2, 1), ("step", "later", "example")), "3 steps of the text"),
        (Result(torch.zeros(1, 1), ("step", "example"), labels={"step": [3]}), "3 steps"),
    ]
    for result, message in cases:
        with pytest.raises(ValueError, match=message):
            steps.view(result)
