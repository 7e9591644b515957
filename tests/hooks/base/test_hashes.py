"""Hashes of configs and weights: equal for the same description and the same numbers."""

import pytest
import torch
from torch import nn

from hooks import ActivationCache, CacheError
from hooks.base import config_hash, weights_hash


class Described(nn.Linear):
    """A model with a config like a model of transformers."""

    def __init__(self, size, **described):
        super().__init__(size, 2)
        self.config = type("Config", (), {"to_dict": lambda self: described})()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 3), True),
        (nn.Linear(2, 3), nn.Linear(3, 2), False),
        (nn.Linear(2, 3), nn.Bilinear(1, 2, 3), False),
        (Described(1, a=1), Described(4, a=1), True),
        (Described(1, a=1), Described(1, a=2), False),
        (Described(1, a=1), Described(1, a=1, _name="b", use_cache=False, dtype="x"), True),
        (Described(1, a={3, 4}), Described(1, a={4, 3}), True),
        (Described(1, a=nn.Linear), Described(1, a=nn.GELU), False),
    ],
)
def test_config_hash_follows_config_or_shapes(runner, tokens, tmp_path, one, other, same):
    assert (config_hash(one) == config_hash(other)) == same
    runner.capture(tokens, names="embed").save(tmp_path / "a")
    with pytest.raises(CacheError, match=config_hash(one)[:12]):
        ActivationCache.load(tmp_path / "a", one)


def test_the_hash_of_weights_follows_names_shapes_and_numbers():
    made = nn.ParameterDict({"a": torch.arange(40.0), "b": torch.tensor(2.0), "c": torch.empty(0)})
    hashes = {
        weights_hash(made),
        weights_hash(made.half()),
        weights_hash(nn.Linear(2, 2).to("meta")),
    }
    for name, value in (
        ("a", made["a"].view(5, 8)),
        ("b", torch.tensor(3.0)),
        ("d", made["a"] + 0),
    ):
        hashes.add(weights_hash(nn.ParameterDict({**made, name: value})))
    # Weights in half precision with the same numbers have the same hash.
    assert len(hashes) == 5
