"""A model on several devices: what moves between them, counted on devices that are pretended."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hooks import HookedRunner
from models import KVCache, StaticKVCache, TransformerConfig
from tests.devices import placed, pretended
from tests.reference import BATCH, POS, SIZES, VARIANTS, VOCAB


class Moves(TorchDispatchMode):
    """Notes the shape and the target of each copy between devices."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in ("_to_copy", "copy_"):
            source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
            if source.device != made.device and source.is_cuda:
                self.found.append((tuple(source.shape), str(made.device)))
        return made


def moves(name, layers, cache, *devices):
    """What moves in a pass over a padded text, then, with a cache, in a step after it."""
    config = TransformerConfig(**SIZES | VARIANTS[name] | dict(n_layers=layers))
    with pretended():
        model, found = placed(config, torch.float32, *devices), []
        tokens = torch.zeros(BATCH, POS, dtype=torch.long, device="cuda:0")
        mask, cache = torch.ones(BATCH, POS, dtype=torch.bool, device="cuda:0"), cache and cache()
        for piece, given in ((tokens, mask), (tokens[:, :1], None))[: 1 + (cache is not None)]:
            with Moves() as made:
                logits, values = HookedRunner(model).run_with_cache(
                    piece, given, cache, names="*.resid_post"
                )
            found.append(made.found)
            assert (logits.shape, str(logits.device)) == ((*piece.shape, VOCAB), "cuda:0")
            for layer in range(layers):
                place = devices[layer * len(devices) // layers]
                assert str(values["resid_post", layer].device) == place
    return found


@pytest.mark.parametrize("name", ["pre", "like llama", "like gemma 2", "window of one layer", "sinusoidal"])  # fmt: skip
@pytest.mark.parametrize("cache", [None, KVCache, lambda: StaticKVCache(2 * POS)])
def test_stream_and_context_move_once_per_change_of_device(name, cache):
    assert not any(moves(name, 4, cache, "cuda:0"))
    split = moves(name, 4, cache, "cuda:0", "cuda:1")
    assert split == moves(name, 10, cache, "cuda:0", "cuda:1")
    for found, width in zip(split, (POS, 1), strict=False):
        streams = [place for shape, place in found if shape == (BATCH, width, SIZES["d_model"])]
        assert streams == ["cuda:1", "cuda:0"]
        assert all(place == "cuda:1" for _, place in found[:-1])


@torch.no_grad()
def test_what_is_read_of_all_layers_is_gathered():
    from interp import logit_lens

    config = TransformerConfig(**SIZES | dict(n_layers=3))
    with pretended():
        # The last block is where the first and the unembedding are.
        model = placed(config, torch.float32, "cuda:1", "cuda:0", "cuda:1")
        assert str(model.W_Q.device) == str(model.b_out.device) == "cuda:1"
        cache = HookedRunner(model).run_with_cache(torch.zeros(BATCH, POS).long())[1]
        assert str(cache.stack("z").device) == "cuda:1"
        lens = logit_lens(model, cache, targets=torch.zeros(BATCH, POS).long())
        assert str(lens.probabilities.device) == "cuda:1"
