"""Models that a tensor-parallel plan splits over two processes.

The numbers equal the numbers of one process, or an error names the value that is split.
`python -m tests.models.attached.test_tensor_parallel FOLDER RANK MODELS` runs one of the two
processes and saves its results. The tests compare the results of both.
"""

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.attachable import IS_5_24, config_of, made, transformers

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (IS_5_24 and torch.distributed.is_available()),
        reason="needs transformers 5.24, and a PyTorch that runs in several processes",
    ),
]

# The part of an expert in each process must have a multiple of 16 bytes.
WIDE = {"intermediate_size": 16, "moe_intermediate_size": 16}
# Models whose heads and neurons are split evenly, unevenly or not at all, models of which only the
# experts are split, and models with other norms.
MODELS = {
    "llama": {"intermediate_size": 21, "_attn_implementation": "eager"},
    "gemma3_text": {},
    "gpt_neox": {},
    "mixtral": WIDE,
    "phi3": {},
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
EDITS = {
    "blocks.0.attn.q": dict(head=1),
    "blocks.0.attn.k": dict(kv_head=-1),
    "blocks.1.attn.pattern": dict(head=[0, 3]),
    "blocks.1.attn.z": dict(head=3, pos=[2, 4]),
    "blocks.1.mlp.post": dict(d_mlp=slice(7, 12)),
    "blocks.1.resid_pre": dict(pos=2),
}
UNATTACHED = {"captured", "lazy", "edited", "gradient", "planned"}
# The results that raise an error in two processes, for each model.
REFUSED = {name: set[str]() for name in MODELS} | {
    "llama": UNATTACHED | {"only zeros"},
    "mixtral": {"edges"},
}
INSIDE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.act_fn"]
INSIDE += ["mlp.gate_proj", "mlp.up_proj"]
PARTS = {"llama": {f"value model.layers.{layer}.{part}" for layer in (0, 1) for part in INSIDE}}
INNER = "model.layers.0.mlp.act_fn"


def path_of(folder, name):
    return Path(folder) / name


def result(call):
    """Return the result of a call, or its error as text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def bare(model):
    """Return results of a model that is not attached, by name."""
    from hooks import HookedRunner

    runner, found = HookedRunner(model), {}
    _, cache = runner.run_with_cache(input_ids=TOKENS, use_cache=False)
    found |= {f"value {name}": cache[name] for name in cache}
    found["skipped"] = dict(cache.skipped)
    zero = {INNER: lambda value, point: value * 0}
    double = {"model.layers.0": lambda value, point: value * 2}
    run = partial(runner.run_with_hooks, input_ids=TOKENS)
    lazy = partial(runner.run_with_cache, input_ids=TOKENS, use_cache=False, lazy=True)
    calls = {
        "captured": lambda: runner.capture(input_ids=TOKENS, names=INNER)[INNER],
        "lazy": lambda: lazy(names=INNER)[1][INNER],
        "edited": lambda: run(hooks=zero).logits,
        "gradient": lambda: run(backward=zero).logits,
        "planned": lambda: runner.plan(input_ids=TOKENS, names=INNER).nbytes,
        "block edited": lambda: run(hooks=double).logits,
    }
    return found | {name: result(call) for name, call in calls.items()}


def attached(model):
    """Return values, gradients, edited runs and analyses of an attached model, by name."""
    import interp
    from hooks import HookedRunner
    from interp import edits

    runner, found = HookedRunner(model), {}
    output, cache = runner.run_with_cache(input_ids=TOKENS, use_cache=False, grads=True)
    output.logits[:, -1, 3].sum().backward()
    found["value logits"] = output.logits
    found |= {f"value {name}": cache[name] for name in cache}
    found |= {f"gradient {name}": cache.grads[name] for name in cache.grads}
    lazy = runner.run_with_cache(input_ids=TOKENS, use_cache=False, lazy=True)[1]
    found |= {f"lazy {name}": lazy[name] for name in lazy}
    for name, where in EDITS.items():
        if name in runner.points:
            hooks = {name: edits.scale(0.3, **where)}
            found[f"edit {name}"] = runner.run_with_hooks(input_ids=TOKENS, hooks=hooks).logits
    pairs = interp.Pairs(TOKENS, TOKENS.flip(0), torch.tensor([[3, 1], [2, 5]]))
    found["edges"] = result(lambda: interp.edge_attribution(model, pairs).values)
    weights = interp.protocol.of(model)
    found |= {
        f"weight {name}": getattr(weights, name)
        for name in ("W_Q", "W_O", "W_in")
        if weights.has(name)
    }
    return found


def longer(model):
    """Return results of an attached model that take longer, by name."""
    import interp
    from hooks import HookedRunner

    runner = HookedRunner(model)
    pairs = interp.Pairs(TOKENS, TOKENS.flip(0), torch.tensor([[3, 1], [2, 5]]))
    steps = partial(model.generate, TOKENS, max_new_tokens=2, do_sample=False)
    return {
        "bytes": torch.tensor(runner.plan(input_ids=TOKENS).nbytes),
        "steps": runner.run_with_cache(run=steps, names="*.attn.k")[1]["k", 1],
        "patching": interp.activation_patching(model, pairs, site="z").values,
        "attribution": interp.attribution_patching(model, pairs, site="z").values,
    }


def observed(folder, name, **options):
    """Load a model, and return all its results by name."""
    import models
    from hooks import HookedRunner
    from hooks.base import weights_hash

    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path_of(folder, name), dtype=torch.float32, **options).eval()
    found = bare(model) if name == "llama" else {}
    hashed = weights_hash(model, whole=True)
    found["hash"] = torch.tensor(float(int(hashed[:12], 16)))
    with models.attach(model) as points:
        found["left out"] = points.left_out
        found |= attached(model)
        if name == "llama":
            found |= longer(model)
    if name == "llama":
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.zero_()
        with models.attach(model):
            found["zeros"] = HookedRunner(model).capture(input_ids=TOKENS, names="*.1.*.v")["v", 1]
        with torch.no_grad():
            for part in ("q_proj", "k_proj"):
                getattr(model.model.layers[1].self_attn, part).weight.zero_()
        found["only zeros"] = result(lambda: models.attach(model).left_out)
    return found


def wholes(rank):
    """Return True for values that both processes have, and False for values that are split."""
    from hooks.base import is_whole

    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    part = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    values = {
        "pattern": part.softmax(-1),
        "normalized": torch.nn.functional.normalize(part),
        "mask": part > 0,
        "phases": torch.polar(torch.ones(3), part[:, 0]),
        "nan": torch.full((3,), torch.nan),
        "count": torch.arange(3),
    }
    return {name: is_whole(value, mesh) for name, value in values.items()}


def work(folder, rank, *names):
    """Run one of the two processes, and save its results."""
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    store = f"file://{path_of(folder, 'store')}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=2)
    torch.save(wholes(int(rank)), path_of(folder, f"wholes.{rank}"))
    for name in names:
        split = DistributedConfig(tp_plan="auto", tp_size=2)
        found = observed(folder, name, distributed_config=split)
        torch.save(found, path_of(folder, f"{name}.{rank}"))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def observations(tmp_path_factory, request):
    """For each model, the results of a single process, and of each of the two processes.

    Without --full, there are only two models.
    """
    folder = tmp_path_factory.mktemp("split")
    names = [*MODELS] if request.config.getoption("full") else ["llama", "mixtral"]
    for name in names:
        config = config_of(name)
        for key, value in MODELS[name].items():
            setattr(config, key, value)
        made(name, config=config).save_pretrained(path_of(folder, name))
    command = [sys.executable, "-m", __name__, str(folder)]
    started = [
        subprocess.Popen([*command, rank, *names], stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        alone = {name: observed(folder, name) for name in names}
    finally:
        errors = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    both = [torch.load(path_of(folder, f"wholes.{rank}")) for rank in "01"]
    assert (
        both
        == [dict(pattern=False, normalized=False, mask=False, phases=False, nan=True, count=True)]
        * 2
    )
    return {
        name: (alone[name], *(torch.load(path_of(folder, f"{name}.{rank}")) for rank in "01"))
        for name in names
    }


def agree(alone, split, what):
    alone, split = alone.detach(), split.detach()
    tolerance = 1e-5 * float(alone.abs().nan_to_num(0.0, 0.0).max())
    torch.testing.assert_close(
        split, alone, rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


# All models are in one test. If they were several tests, each process of pytest would run some of
# them, and would start two more processes.
def test_two_processes_give_the_numbers_of_one_or_refuse_by_name(observations):
    for name, (alone, *both) in observations.items():
        for found in both:
            assert found.keys() == alone.keys() - PARTS.get(name, set())
            assert found["left out"] == alone["left out"]
            for what, value in found.items():
                if isinstance(alone[what], torch.Tensor) and what not in REFUSED[name]:
                    agree(alone[what], value, f"{name}: {what}")
            assert {what for what in found if isinstance(found[what], str)} == REFUSED[name]
    for found in observations["llama"][1:]:
        for what in UNATTACHED:
            assert found[what].startswith(f"HookError: {INNER} must be the same in all 2 processes")
        parts = {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in INSIDE}
        assert parts <= found["skipped"].keys()
        assert found["only zeros"].startswith(
            "AttachError: blocks.1.attn must have different numbers"
        )
    assert "not split over 2 processes" in observations["mixtral"][1]["edges"]


if __name__ == "__main__":
    warnings.simplefilter("error")
    work(*sys.argv[1:])
