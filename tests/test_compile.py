"""torch.compile with hooks. The scripts run in a process without shape checks, as for users."""

import shutil
import subprocess
import sys
import textwrap

import pytest

SETUP = """
    import torch
    from hooks import HookedRunner
    from models import Transformer, TransformerConfig
    torch.manual_seed(0)
    sizes = dict(vocab_size=23, n_ctx=17, n_layers=2, n_heads=2, d_model=10, d_mlp=13)
    model = Transformer(TransformerConfig(**sizes)).eval()
    tokens = torch.randint(23, (3, 7))
    runner = HookedRunner(model)
"""

PLAIN = """
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

    model = Transformer(TransformerConfig(**sizes | dict(n_layers=1))).eval()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    with torch.no_grad():
        for length in (7, 4, 9, 2):
            text = torch.randint(23, (3, length))
            torch.testing.assert_close(compiled(text), model(text), atol=1e-5, rtol=0)
    assert len(graphs) == 2, "one graph is for the first length, and one for all other lengths"
"""

BAKED = """
    def write(value, point):
        value[:, 2] = 0
    hooks = {"blocks.1.attn.pattern": lambda v, p: v * 0.5, "blocks.*.mlp_out": write}
    with torch.no_grad():
        plain, other = model(tokens), torch.flip(tokens, (0, 1))
        with runner.hooks(hooks):
            eager = model(tokens)
            compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
            torch.testing.assert_close(compiled(tokens), eager, atol=1e-5, rtol=0)
            torch.testing.assert_close(compiled(other), model(other), atol=1e-5, rtol=0)
        assert torch.equal(model(tokens), plain)
        assert not torch.allclose(eager, plain, atol=1e-5)
"""

ELSEWHERE = """
    import threading
    compiled, plain = torch.compile(model, fullgraph=True, backend=BACKEND), []
    with runner.hooks({"blocks.1.mlp_out": lambda v, p: v * 0}):
        thread = threading.Thread(target=lambda: plain.append(compiled(tokens)))
        thread.start()
        thread.join()
        model(tokens)
    torch.testing.assert_close(plain[0], model(tokens), atol=1e-5, rtol=0)
"""

CACHED = """
    with torch.no_grad():
        _, expected = runner.run_with_cache(tokens, names="blocks.*.attn.pattern")
        compiled = HookedRunner(torch.compile(model, fullgraph=True, backend=BACKEND))
        _, cache = compiled.run_with_cache(tokens, names="*.attn.pattern")
        for name, value in expected.items():
            torch.testing.assert_close(cache[name], value, atol=1e-5, rtol=0)
        for some in (slice(2, 5), [5, -3], [True, False] * 3 + [True]):
            _, cache = compiled.run_with_cache(tokens, names="*.1.attn.pattern", pos=some)
            found = cache["blocks.1.attn.pattern"]
            torch.testing.assert_close(found, value[:, :, some], atol=1e-5, rtol=0)
"""

LATE = """
    import pytest
    from hooks import NeverFiredError
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    compiled(tokens)
    with pytest.raises(NeverFiredError, match="blocks.1.mlp_out.*compiled"):
        with runner.hooks({"blocks.1.mlp_out": lambda v, p: v * 0}):
            compiled(tokens)
"""

ADDED = """
    import warnings
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
    hooks = {"blocks.1.mlp_out": lambda v, p: v * 0}
    with torch.no_grad():
        plain = compiled(tokens)
        expected = runner.run_with_hooks(tokens, hooks=hooks)
        handle = runner.add(hooks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # The hook has no effect, and the run gives a warning.
            assert torch.equal(compiled(tokens), plain)
            compiled(tokens)
        assert len([w for w in caught if "blocks.1.mlp_out" in str(w.message)]) == 1
        torch.compiler.reset()
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(tokens), expected, atol=1e-5, rtol=0)
        handle.remove()
        late = HookedRunner(compiled)
        torch.compiler.reset()
        with late.hooks(hooks):
            torch.testing.assert_close(compiled(tokens), expected, atol=1e-5, rtol=0)
"""

STEPS = """
    from interp import edits
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    # This is not the forward of the model, where runs begin.
    def step(stream):
        for block in model.blocks:
            stream = block(stream)
        return model.unembed(stream)

    stream, compiled = torch.randn(3, 7, 10), torch.compile(step, fullgraph=True, backend=backend)
    with torch.no_grad(), runner.hooks({"blocks.1.mlp_out": edits.zero(pos=2)}):
        expected = step(stream)
        for _ in range(12):
            torch.testing.assert_close(compiled(stream), expected, atol=1e-5, rtol=0)
    assert len(graphs) == 1, "each run was compiled anew"
"""

REFUSED = """
    import pytest
    from interp import Pairs, activation_patching, logit_lens, log_prob, sweep
    from interp import edits
    from models import generate
    compiled = torch.compile(model, backend=BACKEND)
    pairs = Pairs(tokens, tokens.flip(1), torch.tensor([1, 2, 3]))
    _, cache = runner.run_with_cache(tokens)
    for call in (
        lambda: activation_patching(compiled, pairs, "z"),
        lambda: sweep(compiled, tokens, [{"embed": edits.zero()}], log_prob(3)),
        lambda: logit_lens(compiled, cache),
        lambda: generate(compiled, tokens, max_new_tokens=2),
    ):
        with pytest.raises(TypeError, match="_orig_mod"):
            call()
    model.compile(backend=BACKEND)
    with pytest.raises(TypeError, match="compiled Transformer"):
        activation_patching(model, pairs, "z")
"""

STEPPED = """
    from models import KVCache
    sizes |= dict(n_layers=3, d_head=6, positions="rotary", n_kv_heads=1)
    sizes |= dict(window=3, window_layers=(1,))
    model = Transformer(TransformerConfig(**sizes)).eval()
    with torch.no_grad():
        expected = model(tokens)
        cache, compiled = KVCache(), torch.compile(model, fullgraph=True, backend=BACKEND)
        logits = [model(tokens[:, :2], kv_cache=cache)]
        logits += [compiled(token, kv_cache=cache) for token in tokens[:, 2:].split(1, 1)]
        torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-5, rtol=0)
"""


GENERATED = """
    from interp import edits
    from models import generate
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

    sizes |= dict(n_layers=1, d_head=6, positions="rotary", n_kv_heads=1, window=3)
    model = Transformer(TransformerConfig(**sizes)).eval()
    for weights in model.parameters():
        weights.data += torch.randn_like(weights) / 2
    runner, vector = HookedRunner(model), torch.randn(10) * 3
    prompts, options = [[3, 1, 4, 1, 5], [9, 2]], dict(max_new_tokens=6, stop=())

    def compare(*numbers):
        for compiled_graphs in numbers:
            expected = generate(model, prompts, **options)
            found = generate(model, prompts, compiled=dict(backend=counting), **options)
            assert found == expected
            assert len(graphs) == compiled_graphs, f"{len(graphs)} graphs"

    # One graph serves every step, and the next generation.
    compare(1, 1)
    # The edit acts in some steps only, so there is one graph with the edit and one without it.
    with runner.hooks({"blocks.0.mlp_out": edits.add(vector, pos=slice(8, None))}):
        compare(3)
    # The keys of a pattern grow, so these steps run without a graph.
    with runner.hooks({"blocks.0.attn.pattern": edits.zero(key=5)}):
        compare(3)
    compare(3)
"""

BAKED_IN_STEPS = """
    from interp import edits
    from models import generate
    sizes |= dict(attn_cap=2.0, positions="learned")
    model = Transformer(TransformerConfig(**sizes)).eval()
    for weights in model.parameters():
        weights.data += torch.randn_like(weights) / 2
    prompts, options = [[3, 1, 4, 1, 5], [9, 2]], dict(max_new_tokens=5, temperature=0.9, seed=3)
    hooks = {
        "blocks.*.mlp_out": edits.add(torch.randn(10) * 3, pos=-1),
        "blocks.0.attn.z": edits.scale(-1.0, head=1),
        "blocks.1.resid_pre": lambda value, point: value * 1.3,
        "blocks.0.resid_pre": edits.project_out(torch.randn(10)),
    }
    plain = generate(model, prompts, **options)
    with HookedRunner(model).hooks(hooks):
        expected = generate(model, prompts, **options)
        assert expected != plain
        for _ in range(2):
            found = generate(model, prompts, compiled=dict(backend=BACKEND), **options)
            assert found == expected, (found, expected)

    def read(value, point):
        return value if value.sum() > 0 else value * 2

    import pytest
    with HookedRunner(model).hooks({"blocks.1.mlp_out": read}):
        with pytest.raises(RuntimeError, match="torch.compile failed"):
            generate(model, prompts, compiled=dict(backend=BACKEND), **options)
"""


LONG = """
    from models import kernels
    from models.running import masks
    kernels.BLOCK = masks.BLOCK = 5
    for changes in (dict(window=3), dict(attn_cap=2.0), dict(n_heads=2, n_kv_heads=1)):
        torch._dynamo.reset()
        model = Transformer(TransformerConfig(**sizes | changes)).eval()
        compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
        with torch.no_grad():
            for length in range(2, 18):
                text, real = torch.randint(23, (3, length)), torch.ones(3, length)
                real[1, 0] = 0
                for mask in (None, real):
                    expected = model(text, attention_mask=mask)[real.bool()]
                    found = compiled(text, attention_mask=mask)[real.bool()]
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
"""


SPLICED = """
    from interp import edits
    from interp.features import Dictionary, TopK, splice
    place = "blocks.0.resid_post"
    weights = [torch.randn(*size) for size in ((10, 19), (19, 10), (19,), (10,))]
    dictionary = Dictionary(*weights, TopK(4))
    one = slice(1, None), [1, 2, 3, 4, 5, 6]
    for pos, places in (one, (-1, [6]), ([0, 3], [0, 3]), (edits.all_but(0, -2), [1, 2, 3, 4, 6])):
        def change(module, args, value):
            new = value.clone()
            new[:, places] = dictionary(value)[:, places]
            return new

        with torch.no_grad():
            handle = model.get_submodule(place).register_forward_hook(change)
            expected = model(tokens)
            handle.remove()
            torch._dynamo.reset()
            with splice(model, {place: dictionary}, error=None, pos=pos):
                compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
                torch.testing.assert_close(compiled(tokens), expected, atol=1e-5, rtol=0)
"""

TRANSCODED = """
    from interp.features import Dictionary, TopK, splice
    reads, place = "blocks.0.resid_mid", "blocks.0.mlp_out"
    weights = [torch.randn(*size) for size in ((10, 19), (19, 10), (19,), (10,))]
    transcoder = Dictionary(*weights, TopK(4))
    read = []
    with torch.no_grad():
        handles = [
            model.get_submodule(reads).register_forward_hook(lambda m, a, out: read.append(out)),
            model.get_submodule(place).register_forward_hook(lambda m, a, out: transcoder(read[0])),
        ]
        expected = model(tokens)
        for handle in handles:
            handle.remove()
        assert not torch.allclose(expected, model(tokens), atol=1e-3)
        with splice(model, {place: transcoder}, error=None, reads=reads):
            compiled = torch.compile(model, fullgraph=True, backend=BACKEND)
            torch.testing.assert_close(compiled(tokens), expected, atol=1e-5, rtol=0)
"""

SCRIPTS = {
    "long": LONG,
    "spliced": SPLICED,
    "transcoded": TRANSCODED,
    "generated": GENERATED,
    "baked in steps": BAKED_IN_STEPS,
    "stepped": STEPPED,
    "plain": PLAIN,
    "baked": BAKED,
    "elsewhere": ELSEWHERE,
    "cached": CACHED,
    "late": LATE,
    "added": ADDED,
    "steps": STEPS,
    "refused": REFUSED,
}
# These scripts run in every test run, with the backend "eager", which runs the traced graph without
# changing it. With --full, all scripts run.
QUICK = ("plain", "baked", "added", "steps", "generated", "spliced", "transcoded")
RUNS = [
    (QUICK, "eager"),
    *(
        pytest.param([name], "eager", marks=pytest.mark.full)
        for name in SCRIPTS
        if name not in QUICK
    ),
    *(
        pytest.param(["generated", "baked in steps"], backend, marks=pytest.mark.full)
        for backend in ("aot_eager", "inductor")
    ),
    pytest.param(["baked"], "inductor", marks=pytest.mark.full),
]
# One process runs all scripts, because starting a process takes longer than a script.
PROCESS = """
    import sys, warnings
    import torch
    for number, code in enumerate(sys.argv[1:]):
        torch.compiler.reset()
        with warnings.catch_warnings():
            exec(compile(code, f"<script {number}>", "exec"), {})
"""


@pytest.mark.parametrize(("scripts", "backend"), RUNS)
def test_compiled_equals_eager_in_one_graph(scripts, backend):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler, and neither g++ nor clang++ is on the path")
    codes = [textwrap.dedent(SETUP) + textwrap.dedent(SCRIPTS[name]) for name in scripts]
    codes = [code.replace("BACKEND", repr(backend)) for code in codes]
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), *codes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
