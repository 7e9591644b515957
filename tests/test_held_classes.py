"""The classes of the objects in public attributes are recorded, or named as details.

`tests.returned` finds classes from annotations. An annotation may be `nn.ModuleList`, `Any` or a
function type, so this file makes objects and reads their attributes.

1. `objects` makes objects of the public classes.
2. `held` reads the public attributes of an object, and of the objects in them, and yields each
   object of a class of this project with its place.
3. The class, or a class from which it inherits, must be public, recorded or a detail.
"""

import collections
import inspect
import tempfile
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import interp
import models
from hooks import HookedRunner, HookError, Options
from interp import edits, residual_stream, svd_targets
from interp.directions import Contrast
from interp.features import (
    AffineMap,
    ContextAttention,
    CrossLayerTranscoder,
    MatchingPursuit,
    TemporalDictionary,
    load_transcoders,
)
from interp.graph import Graph
from interp.store import HarvestConfig, harvest
from tests import small_llama
from tests.faces import is_ours
from tests.interp.made import MADE, TEXT, changed, shared, traced
from tests.models.built import built
from tests.returned import DETAILS, HELD, public_values, reached

pytest.importorskip("matplotlib")

FORMS = [
    dict(positions="sinusoidal", mlp_norm=True),
    dict(positions="rotary", mlp="gated", qk_norm="head", attn_cap=3.0, dropout=0.1),
]
# The first objects of a class at a place, such as `Transformer.blocks[i]`, are read.
MOST = 8


def objects():
    """Return objects of the public classes, each with the text that makes it."""
    s = shared()
    runner = HookedRunner(s.model)
    formed = [built(**form) for form in FORMS]
    scaling = models.RotaryScaling(kind="linear", factor=2.0)
    llama = small_llama.llama()
    attached = models.attach(llama)
    tokens = s.model.to_tokens(TEXT).tokens
    kv_cache = models.KVCache()
    s.model(tokens, kv_cache=kv_cache)
    result = MADE["activation_patching"](s)
    handle = runner.add({"blocks.0.mlp_out": lambda value, point: None}, receipts=True)
    runner.run_with_cache(tokens, names="blocks.0.mlp_out")
    handle.remove()
    return {
        "model": s.model,
        **{f"model {n}": model for n, model in enumerate(formed)},
        **{f"block {n}": model.blocks[0] for n, model in enumerate(formed)},
        "runner": runner,
        "handle": handle,
        "edits": runner.edits({"blocks.0.attn.z": edits.zero(head=0)}),
        "runner.plan()": runner.plan(tokens, mode="full"),
        "cache": s.cache,
        "options": Options(pos=[0]),
        "attached": attached,
        "attached.plain()": attached.plain(),
        "points of llama": llama.model.layers[0].hook_points,
        "view": models.attached.view.PlainView(attached),
        "graph": s.graph,
        "graph of llama": Graph(llama),
        "writers": [*s.graph.all_writers(lambda point: s.cache[s.graph.names[point]])],
        "kv_cache": kv_cache,
        "context": s.model.context(tokens),
        "steps": [*models.generate_steps(s.model, tokens, max_new_tokens=2)],
        "text": s.model.to_tokens(TEXT),
        "sampling": models.Sampling(),
        "template": models.ChatTemplate("x"),
        "contrast": Contrast([TEXT], [TEXT]),
        "edit": [edits.zero(head=0), edits.replace(s.cache), edits.zero(pos=edits.all_but(0))],
        "store": harvest(s.model, [TEXT], "blocks.1.mlp_out", tempfile.mkdtemp()),
        "config": HarvestConfig(),
        "transcoders": load_transcoders("pydoc-4l/transcoders"),
        "pursuit": MatchingPursuit(torch.eye(2), torch.zeros(2), threshold=0.1),
        "result.view()": result.view(),
        "interval": result.interval(),
        "entries": result.top(2),
        "tables": result.tables(),
        "circuit.drawn()": s.circuit.drawn(),
        "svd_targets": svd_targets(s.model, s.cache),
        "full_circuits": interp.full_circuits(s.model, 0, 1),
        "matrix.top()": interp.ov_circuit(s.model)[0, 0].top(2),
        "residual_stream": residual_stream(s.cache, torch.ones(1, tokens.shape[1], dtype=bool)),
        "pruned": traced().pruned(),
        "weights": changed().weights,
        "cross-layer": cross_layer(),
        "temporal": temporal(),
        "rotary base": models.RotaryBase(theta=1e4, scaling=scaling),
        **{f"made {name}": make(s) for name, make in MADE.items()},
    }


def cross_layer():
    """Return a transcoder of two layers with one feature each."""
    one = torch.ones(1, 1)
    return CrossLayerTranscoder(
        W_enc=[one, one],
        W_dec=[torch.ones(1, 2, 1), torch.ones(1, 1, 1)],
        b_enc=[torch.zeros(1), torch.zeros(1)],
        b_dec=torch.zeros(2, 1),
        activations=[nn.ReLU(), nn.ReLU()],
    )


def temporal():
    """Return a temporal dictionary with one layer of attention."""
    same = AffineMap(torch.eye(2), torch.zeros(2))
    return TemporalDictionary(
        W_enc=torch.eye(2),
        W_dec=torch.eye(2),
        b_dec=torch.zeros(2),
        activation=nn.ReLU(),
        attention=[ContextAttention(same, same, same, output=same, n_heads=1)],
    )


def names_of(value):
    """Yield the names of the public attributes of an object of this project, without methods."""
    modules = value._modules if isinstance(value, nn.Module) else ()
    for name in sorted({*dir(type(value)), *getattr(value, "__dict__", ()), *modules}):
        member = inspect.getattr_static(type(value), name, None)
        is_method = inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod))
        of_torch = isinstance(value, nn.Module) and hasattr(nn.Module, name)
        if not (name.startswith("_") or is_method or of_torch):
            yield name


def parts_of(value, place):
    """Yield the items of a collection, and the attributes of an object, each with its place."""
    if isinstance(value, Mapping):
        with_keys = ((f"{place}.keys", [*value]), (f"{place}[key]", [*value.values()]))
        yield from ((item, where) for where, items in with_keys for item in items)
    elif isinstance(value, (list, tuple, set, frozenset, nn.ModuleList)):
        yield from ((item, f"{place}[i]") for item in value)
    if is_ours(type(value)) and type(value).__name__ not in DETAILS:
        for name in names_of(value):
            try:
                attribute = getattr(value, name)
            except (AttributeError, KeyError, ValueError, TypeError, ImportError, HookError):
                # Some attributes do not exist in every object, or need an extra.
                continue
            yield attribute, f"{type(value).__name__}.{name}"


def held(made):
    """Yield each object of a class of this project that users reach, with its place.

    Args:
        made: the first objects, each with its place.
    """
    waiting = collections.deque((value, place) for place, value in made.items())
    seen = {}
    counts = collections.Counter()
    while waiting:
        value, place = waiting.popleft()
        counts[place, type(value)] += 1
        if id(value) in seen or counts[place, type(value)] > MOST:
            continue
        # The object is kept, so that no other object gets its number.
        seen[id(value)] = value
        if is_ours(type(value)):
            yield value, place
        waiting.extend(parts_of(value, place))


@pytest.mark.filterwarnings("ignore:the circuit was found on")
def test_the_class_of_each_object_that_users_reach_is_recorded_or_a_detail():
    public = {value for value, _ in public_values() if inspect.isclass(value)}
    unknown, seen = {}, set()
    for value, place in held(objects()):
        kinds = public.union(reached()).intersection(type(value).__mro__)
        names = {type(value).__name__} & HELD | {kind.__name__ for kind in kinds}
        seen |= names
        if not names:
            unknown[type(value).__name__] = place
    assert not unknown
    assert seen >= HELD
    assert len(seen) > 120
