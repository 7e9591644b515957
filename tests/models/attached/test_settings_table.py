"""The table of settings in the guides.

`python -m tests.models.attached.test_settings_table` writes it.

Each setting is tested on two copies of a small Llama: one is attached, the other has raw PyTorch
hooks.
"""

import functools
import importlib.util
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.small_llama import TOKENS, llama, offloaded, transformers

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "examples" / "guides" / "settings.md"
HEAD = """# Settings that were tested

Each setting was tested on a small random Llama with `attach`, against raw PyTorch hooks on a copy without points. A test writes this table.

| column | meaning |
| --- | --- |
| bits | without hooks, the logits are bitwise the logits of the model without points |
| values | cached residual streams are bitwise equal |
| edits | logits after an edit of a residual stream are bitwise equal |
| generate | greedy texts are equal |
| patching | effects of `activation_patching` agree to 1e-4 of the largest effect; in half precision, to a few bits |
| gradients | attribution patching works, and its gradients equal autograd |
| sums | the stream is a sum of components, for `decompose`, direct logit attribution, circuits and edges |

| setting | bits | values | edits | generate | patching | gradients | sums |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
LAYER = "model.layers.0"


def adapted(kind, **options):
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(llama(), getattr(peft, kind)(**options)).eval()


def quantised(package, **options):
    """Return a model that `transformers` quantises while it loads."""
    with tempfile.TemporaryDirectory() as folder:
        llama().save_pretrained(folder)
        return transformers.LlamaForCausalLM.from_pretrained(folder, **options).eval()


def by_torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return quantised(
        "torchao", quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig())
    )


def by_bitsandbytes(bits):
    kind = {8: dict(load_in_8bit=True), 4: dict(load_in_4bit=True)}[bits]
    config = transformers.BitsAndBytesConfig(**kind)
    return quantised("bitsandbytes", quantization_config=config, device_map="cpu")


def by_quanto():
    config = transformers.QuantoConfig(weights="int8")
    return quantised("optimum.quanto", quantization_config=config)


def by_torch():
    kind = torch.ao.quantization.quantize_dynamic
    return kind(llama(), {nn.Linear}, dtype=torch.qint8).eval()


def checkpointed():
    model = llama()
    model.gradient_checkpointing_enable()
    return model


SETTINGS = {
    "float32, sdpa": llama,
    "float32, eager": functools.partial(llama, attention="eager"),
    "float64": functools.partial(llama, torch.float64),
    "bfloat16": functools.partial(llama, torch.bfloat16),
    "float16": functools.partial(llama, torch.float16),
    "LoRA (peft)": functools.partial(
        adapted, "LoraConfig", target_modules="all-linear", init_lora_weights=False, r=2
    ),
    "IA3 (peft)": functools.partial(
        adapted,
        "IA3Config",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    ),
    "gradient checkpointing": checkpointed,
    "offloaded to the CPU (accelerate)": functools.partial(offloaded, "cpu"),
    "offloaded to a disk (accelerate)": functools.partial(offloaded, "disk"),
    "int8 weights (torchao)": by_torchao,
    "int8 weights (quanto)": by_quanto,
    "8 bits (bitsandbytes)": functools.partial(by_bitsandbytes, 8),
    "4 bits (bitsandbytes)": functools.partial(by_bitsandbytes, 4),
    "int8, dynamic (torch.ao)": by_torch,
}


def inner(model):
    """Return the model inside the wrapper of an adapter, or the model itself."""
    return getattr(model, "get_base_model", lambda: model)()


def raw(model, change=None):
    """Run a model with a raw hook that changes the output of the first block by `change`.

    Return the logits and this output.
    """
    seen = {}

    def hook(module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        new = value if change is None else change(value)
        seen["stream"] = new.clone()
        return (new, *output[1:]) if isinstance(output, tuple) else new

    handle = inner(model).get_submodule(LAYER).register_forward_hook(hook)
    try:
        return model(input_ids=TOKENS).logits, seen["stream"]
    finally:
        handle.remove()


@torch.no_grad()
def zeroed(value):
    value = value.clone()
    value[:, 2] = 0
    return value


def metric(logits):
    return logits[:, -1, 5].float() - logits[:, -1, 9].float()


metric.last = 0


def bits(model, twin):
    assert torch.equal(model(input_ids=TOKENS).logits, twin(input_ids=TOKENS).logits)


def values(model, twin):
    from hooks import HookedRunner

    cache = HookedRunner(model).run_with_cache(TOKENS, names="*.resid_post")[1]
    assert torch.equal(cache["resid_post", 0], raw(twin)[1])


def edits(model, twin):
    from hooks import HookedRunner
    from interp.edits import zero

    hooks = {"*blocks.0.resid_post": zero(pos=2)}
    ours = HookedRunner(model).run_with_hooks(TOKENS, hooks=hooks).logits
    assert torch.equal(ours, raw(twin, zeroed)[0])


def generate(model, twin):
    options = dict(max_new_tokens=5, do_sample=False)
    assert torch.equal(
        model.generate(input_ids=TOKENS, **options), twin.generate(input_ids=TOKENS, **options)
    )


def patching(model, twin):
    from interp import Pairs, activation_patching

    other = TOKENS.roll(1, 1)
    effects = activation_patching(
        model, Pairs(TOKENS, other, metric=metric), "resid_post", layers=0
    )
    clean = raw(twin)[1]
    handle = inner(twin).get_submodule(LAYER)
    base = metric(twin(input_ids=other).logits)
    for pos in range(other.shape[1]):

        def put(module, args, output, pos=pos):
            value = (output[0] if isinstance(output, tuple) else output).clone()
            value[:, pos] = clean[:, pos]
            return (value, *output[1:]) if isinstance(output, tuple) else value

        hook = handle.register_forward_hook(put)
        wanted = metric(twin(input_ids=other).logits) - base
        hook.remove()
        size = effects.values.abs().max()
        share = max(1e-4, 64 * torch.finfo(clean.dtype).eps)
        assert (effects.values[0, pos] - wanted).abs().max() <= share * max(1, size)


@torch.enable_grad()
def gradients(model, twin):
    from interp import Pairs, attribution_patching

    other = TOKENS.roll(1, 1)
    pairs = Pairs(TOKENS, other, metric=metric)
    estimates = attribution_patching(model, pairs, "resid_post", layers=0)
    with torch.no_grad():
        clean = raw(twin)[1]
    leaf = {}

    def put(module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        leaf["x"] = value.detach().clone().requires_grad_()
        return (leaf["x"], *output[1:]) if isinstance(output, tuple) else leaf["x"]

    hook = inner(twin).get_submodule(LAYER).register_forward_hook(put)
    total = metric(twin(input_ids=other).logits).sum()
    hook.remove()
    (slope,) = torch.autograd.grad(total, leaf["x"])
    wanted = ((clean - leaf["x"]).float() * slope.float()).sum(-1).T
    size, share = wanted.abs().max(), max(1e-4, 64 * torch.finfo(clean.dtype).eps)
    assert (estimates.values[0] - wanted).abs().max() <= share * max(1, size)


def sums(model, twin):
    from hooks import HookedRunner
    from interp import decompose

    cache = HookedRunner(model).run_with_cache(TOKENS)[1]
    parts = decompose(model, cache)
    assert parts.values.isfinite().all()


JOBS = (bits, values, edits, generate, patching, gradients, sums)


def cell(job, model, twin):
    try:
        job(model, twin)
    except AssertionError:
        return "other numbers"
    except Exception as error:
        said = " ".join(str(error).split())
        said = said.partition(" (")[0].partition(";")[0]
        return f"{type(error).__name__}: {said}".replace("|", "/")
    return "yes"


@torch.no_grad()
def row(name):
    from models import attach

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, twin = SETTINGS[name](), SETTINGS[name]()
        try:
            attached = attach(model)
        except Exception as error:
            return f"| {name} | {type(error).__name__}: {error} |{' |' * (len(JOBS) - 1)}\n"
        with attached:
            cells = [cell(job, model, twin) for job in JOBS]
    return f"| {name} | {' | '.join(cells)} |\n"


def page():
    return HEAD + "".join(map(row, SETTINGS))


NEEDED = ("peft", "accelerate", "torchao", "bitsandbytes", "optimum.quanto")


def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


@pytest.mark.full
def test_the_table_matches_the_guide():
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the table is that of transformers 5.24")
    if missing := [name for name in NEEDED if is_missing(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    assert page() == PAGE.read_text(encoding="utf-8")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_matches_the_guide(name):
    """The table is checked for settings whose libraries are installed."""
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the table is that of transformers 5.24")
    package = next((one for one in NEEDED if f"({one.rpartition('.')[2]})" in name), "torch")
    if is_missing(package):
        pytest.skip(f"needs {package}")
    assert row(name) in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
