"""Tiny random causal language models of `transformers` for tests of `attach`.

attachable.json has one line for each model. The points of its first models are listed in a test.
"""

import inspect
import json
from pathlib import Path

import pytest
import torch

from hooks import HookedRunner
from tests import tiny

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

IS_5_24 = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
# The name of the argument and of the output that hold keys and values, in this version.
CACHE = "cache" if IS_5_24 else "past_key_values"

BATCH, POS = 3, 7
_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
SIZES, GROUPS = _DATA["sizes"], _DATA["groups"]
"""What configs of all models have, and what some of them have besides."""
LAYERS, HEADS = SIZES["num_hidden_layers"], SIZES["num_attention_heads"]
KV_HEADS, VOCAB = SIZES["num_key_value_heads"], SIZES["vocab_size"]


def _of(parts):
    """Return the settings of a model: its own, and the settings of the groups that it names."""
    given = [GROUPS[part] if isinstance(part, str) else part for part in parts]
    return {name: value for part in given for name, value in part.items()}


# The model types that the installed version of the library supports. `MORE` has models whose points
# are not listed one by one.
MODELS, MORE = (
    {name: _of(p) for name, p in _DATA[part].items() if name in transformers.CONFIG_MAPPING}
    for part in ("models", "more")
)


def config_of(name):
    kind = transformers.CONFIG_MAPPING[name]
    sizes = tiny.known(kind, SIZES) | (MORE | MODELS)[name]
    # The sizes of the text model inside a model that also reads images or sounds.
    if isinstance(parts := sizes.get("text_config"), list):
        sizes["text_config"] = SIZES | _of(parts)
    return kind(**sizes)


def made(name, attention=None, config=None):
    """Return a model with large random weights, the same at each call."""
    config = config_of(name) if config is None else config
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    # With sdpa, older versions of the library leave out the soft cap, and the causal mask of Doge.
    if getattr(config, "attn_logit_softcapping", None) or (name == "doge" and version < (5, 18)):
        attention = "eager"
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(0)
    maker = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Some models of texts read only the text part of a config, as `AutoModelForCausalLM` does.
    if maker.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    model = maker(config).eval()
    # Training changes these buffers. The other buffers are frequencies, encodings and masks, which
    # must keep their values.
    trained = ("layer_scalar", "e_score_correction_bias")
    buffers = [value for name, value in model.named_buffers() if name.endswith(trained)]
    with torch.no_grad():
        for value in [*model.parameters(), *buffers]:
            value.copy_(value.mean() + 0.3 * torch.randn(value.shape))
        # The experts of each token are a table. Give each token different experts.
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):
                table.copy_(torch.arange(table.numel()).view_as(table) % N)
    return model


def agree(ours, theirs, what="", tolerance=1e-5):
    """Check that two tensors are equal, up to a share of the largest expected value.

    The largest expected value must not be rounding itself.
    """
    assert ours.shape == theirs.shape, what
    assert theirs.abs().max() > 1e-4, what
    gap = (ours - theirs).abs().max() / theirs.abs().max()
    assert gap <= tolerance, f"{what} differs by {gap:.1g}"


# Mixtures of experts, with references from raw hooks and from calls of one expert at a time.
N = 5
# These models do not call their experts with numbers of experts and weights, so the helpers below
# cannot read the call.
OTHERWISE = ("jetmoe", "llama4_text")
# In older versions of the library, the same holds for these models.
OLD = () if IS_5_24 else ("aria_text", "glm_moe_dsa", "granitemoe", "granitemoeshared")
KINDS = [name for name in MODELS if "moe_topk" in MODELS[name] and name not in (*OTHERWISE, *OLD)]
# In these models, a norm comes after the experts.
NORMED = ("afmoe", "axk1", "flex_olmo", "kolibri1")
MLP = f"blocks.{LAYERS - 1}.mlp"
TOKENS = torch.randint(3, VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(4))


def logits(model):
    """Return the logits of a model for `TOKENS`."""
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def experts_of(model):
    """Return the module of the experts in the last block."""
    return [m for n, m in model.named_modules() if n.endswith(".experts")][-1]


def alone_of(experts, x):
    """Return the output of each expert, each from its own call, [row, expert, d_model]."""
    weight = torch.ones(len(x), 1, dtype=x.dtype)
    with torch.no_grad():
        given = [experts(x, torch.full((len(x), 1), n), weight) for n in range(N)]
    return torch.stack(given, 1)


def call_of(twin, change=None):
    """Run a model, and record the call of the experts in its last block.

    Args:
        twin: the model.
        change: a function that changes the arguments of the experts. Default: no change.

    Returns:
        The arguments and the output of the experts, and the logits of the model.
    """
    seen, experts = [], experts_of(twin)
    handles = [experts.register_forward_hook(lambda module, *call: seen.append(call))]
    if change is not None:
        handles.append(experts.register_forward_pre_hook(lambda module, args: change(*args)))
    found = logits(twin)
    for handle in handles:
        handle.remove()
    return *seen[0], found


def edited(model, hooks):
    """Return the output of a run with hooks."""
    with torch.no_grad():
        return HookedRunner(model).run_with_hooks(TOKENS, hooks=hooks, use_cache=False).logits
