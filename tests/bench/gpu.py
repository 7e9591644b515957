"""The rows for a GPU: models in half precision, beside plain PyTorch and `transformers`.

The rows `analyses` and `graph` use float32, as most analyses do.
"""

import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    attribution_graph,
    attribution_patching,
    edge_attribution,
    head_scores,
    log_prob,
)
from interp.features import Dictionary, TopK
from models import Transformer, TransformerConfig, generate
from tests.bench import peers, timing
from tests.bench.shared import differentiated

Calls = dict[str, timing.Call]

TRAINED = peers.Shape(layers=12, heads=12, d_model=768, vocab=50257, batch=8, pos=1024)
PROMPTS = dataclasses.replace(TRAINED, batch=1, pos=32, new=128)
PAIRS = dataclasses.replace(TRAINED, pos=64)
LONG = (32768, 4096)


@dataclasses.dataclass(frozen=True)
class Bench:
    """The rows on one device. Each method returns the calls of a row.

    Attributes:
        device, dtype: the device and the dtype of the weights.
        trained: the model and the batch of the rows `forward` and `cached`.
        prompts: the model and the batch of generations.
        pairs: the model and the batch of analyses, in float32.
        long: the number of tokens of the long text, and the width of the block that reads it.
    """

    device: str
    dtype: torch.dtype = torch.bfloat16
    trained: peers.Shape = TRAINED
    prompts: peers.Shape = PROMPTS
    pairs: peers.Shape = PAIRS
    long: tuple[int, int] = LONG

    @property
    def rows(self) -> dict[str, Callable[[], Calls]]:
        """The rows by name."""
        return {
            "forward": self.forward,
            "cached": self.cached,
            "decode": self.decode,
            "lengths": self.lengths,
            "analyses": self.analyses,
            "graph": self.graph,
        }

    def _placed(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self.device, self.dtype)

    def forward(self) -> Calls:
        """Plain forward passes."""
        ours, tokens = self._placed(peers.ours(self.trained)), self.trained.tokens()
        there = tokens.to(self.device)
        calls: Calls = {
            "plain PyTorch": lambda: bare(ours, there),
            "hookscope": lambda: ours(tokens),
            "hookscope, tokens already there": lambda: ours(there),
        }
        if has_transformers():
            theirs = self._placed(peers.of_transformers(self.trained, "sdpa"))
            calls["transformers, sdpa"] = lambda: theirs(there).logits
        return calls

    def cached(self) -> Calls:
        """Cached runs."""
        ours, tokens = self._placed(peers.ours(self.trained)), self.trained.tokens()
        runner, there = HookedRunner(ours), tokens.to(self.device)
        stream, one = "blocks.*.resid_post", f"blocks.{self.trained.layers // 2}.resid_post"
        return {
            "plain PyTorch, keeping nothing": lambda: bare(ours, there),
            "hookscope, keeping nothing": lambda: ours(tokens),
            "cache blocks.*.resid_post": lambda: runner.run_with_cache(tokens, names=stream),
            "the same, to the CPU": lambda: runner.run_with_cache(
                tokens, names=stream, device="cpu"
            ),
            "the same, last position": lambda: runner.run_with_cache(
                tokens, names=stream, pos=[-1]
            ),
            "full, lazy": lambda: runner.run_with_cache(tokens, lazy=True),
            "capture at the middle layer": lambda: runner.capture(tokens, names=one),
        }

    def decode(self) -> Calls:
        """Greedy generation from a cache, from one prompt."""
        ours, prompt = self._placed(peers.ours(self.prompts)), self.prompts.tokens()
        there, new = prompt.to(self.device), self.prompts.new
        write = functools.partial(generate, ours, prompt, max_new_tokens=new, stop=())
        calls: Calls = {"hookscope": write}
        # The model keeps one compiled step, and each way of compiling needs another one.
        copies = [copy.deepcopy(ours) for _ in range(2)]
        ways = {"": True, ", reduce-overhead": dict(mode="reduce-overhead")}
        for (way, compiled), model in zip(ways.items(), copies, strict=True):
            calls[f"hookscope, static cache{way}"] = functools.partial(
                generate, model, prompt, max_new_tokens=new, stop=(), compiled=compiled
            )
        if has_transformers():
            theirs = self._placed(peers.of_transformers(self.prompts, "sdpa"))
            options = dict(max_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0)
            options |= dict(eos_token_id=None, attention_mask=torch.ones_like(there))
            for kind in ("dynamic", "static"):
                calls[f"transformers, {kind} cache"] = functools.partial(
                    theirs.generate, there, cache_implementation=kind, **options
                )
        return calls

    def analyses(self) -> Calls:
        """Attribution of nodes and edges, and patches, beside two forwards and one backward."""
        ours = peers.ours(self.pairs).to(self.device).requires_grad_(False)
        runner = HookedRunner(ours)

        def texts(shape: peers.Shape) -> tuple[Tensor, Tensor]:
            clean = shape.tokens().to(self.device)
            return clean, (clean + 1) % shape.vocab

        def edges(n_examples: int) -> timing.Call:
            shape = dataclasses.replace(self.pairs, batch=n_examples)
            of_edges = Pairs(*texts(shape), metric=log_prob(0))
            return lambda: edge_attribution(ours, of_edges)

        def scores() -> object:
            _, cache = runner.run_with_cache(clean, lazy=True)
            return head_scores(ours, cache)

        clean, corrupted = texts(self.pairs)
        pairs = Pairs(clean, corrupted, metric=log_prob(0))
        return {
            "two forwards and one backward": differentiated(ours, clean, corrupted),
            "attribution patching of z, by pos and head": lambda: attribution_patching(
                ours, pairs, "z", ("layer", "pos", "head")
            ),
            "attribution patching of z, by head": lambda: attribution_patching(
                ours, pairs, "z", ("layer", "head")
            ),
            "edge attribution of 1 example": edges(1),
            "edge attribution of 8 examples": edges(8),
            "edge attribution of 32 examples": edges(32),
            "edge attribution, 4 steps": lambda: edge_attribution(
                ours, pairs, "eap_ig_inputs", steps=4
            ),
            "activation patching of z, by head": lambda: activation_patching(
                ours, pairs, "z", ("layer", "head")
            ),
            "activation patching of resid_pre, by pos": lambda: activation_patching(
                ours, pairs, "resid_pre", ("layer", "pos")
            ),
            "a run with a lazy cache, and head scores from it": scores,
        }

    def graph(self) -> Calls:
        """An attribution graph with a transcoder in each layer, beside a forward pass."""
        shape = self.pairs
        ours = peers.ours(shape).to(self.device).requires_grad_(False)
        text = shape.tokens()[:1]
        width = (shape.d_model, 5 * shape.d_model)

        def transcoder() -> Dictionary:
            encoder, decoder = torch.randn(2, *width) / shape.d_model**0.5
            biases = torch.zeros(width[1]), torch.zeros(width[0])
            activation = TopK(min(48, width[1]), relu=False)
            made = Dictionary(encoder, decoder.T, *biases, activation, reads="ln2.normalized")
            return made.to(self.device)

        transcoders = {f"blocks.{n}.mlp_out": transcoder() for n in range(shape.layers)}
        options = dict(targets=10, max_features=500, first=1, progress=False)
        return {
            "one forward": lambda: ours(text),
            "attribution graph": lambda: attribution_graph(ours, text, transcoders, **options),
        }

    def lengths(self) -> Calls:
        """One block of Llama 3.1 8B's shape on a text of 32,768 tokens."""
        pos, width = self.long
        sizes = dict(vocab_size=128, n_ctx=pos, n_layers=1, n_heads=32, n_kv_heads=8, d_model=width)
        sizes |= dict(d_mlp=width * 7 // 2, mlp="gated", norm="rmsnorm", positions="rotary")
        tokens = torch.randint(128, (1, pos))
        padding = torch.arange(pos)[None] >= pos // 8

        def call(run: Callable[[Transformer], object], **changes: object) -> timing.Call:
            with torch.device(self.device):
                model = Transformer(TransformerConfig(**sizes | changes)).to(self.dtype).eval()
            return lambda: run(model)

        plain = functools.partial(Transformer.__call__, tokens=tokens, last=1)
        return {
            "no mask": call(plain),
            "padding": call(functools.partial(plain, attention_mask=padding)),
            f"a window of {pos // 8}": call(plain, window=pos // 8),
            "a soft cap": call(plain, attn_cap=50.0),
        }


def bare(model: Transformer, tokens: Tensor) -> Tensor:
    """Return the logits of a GPT-2, computed from its weights with the fewest calls of PyTorch."""
    heads = model.config.n_heads
    positions = model.position_embedding.weight[: tokens.shape[1]]
    resid = F.embedding(tokens, model.token_embedding.weight) + positions
    for block in model.blocks:
        qkv = F.linear(normed(block.ln1, resid), block.attn.qkv.weight, block.attn.qkv.bias)
        q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in qkv.chunk(3, 2))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        resid = resid + F.linear(z, block.attn.output.weight, block.attn.output.bias)
        hidden = F.linear(normed(block.ln2, resid), block.mlp.input.weight, block.mlp.input.bias)
        hidden = F.gelu(hidden, approximate="tanh")
        resid = resid + F.linear(hidden, block.mlp.output.weight, block.mlp.output.bias)
    return F.linear(normed(model.ln_final, resid), model.unembedding.weight)


def normed(norm: torch.nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def half() -> torch.dtype:
    """Return the dtype of the weights: bfloat16, or float16 on an older GPU.

    On a GPU without bfloat16, PyTorch has no fused kernel for it, and forms all scores.
    """
    missing = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if missing else torch.bfloat16


def runnable(calls: Calls) -> Calls:
    """Return the calls, except calls of other libraries, and compiled calls, that fail: for example
    without a C compiler.
    """
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = call
        except Exception as error:
            if not any(word in name for word in ("transformers", "static cache")):
                raise
            print(f"{name} is left out: {str(error).partition(chr(10))[0]}")
    return found


def has_transformers() -> bool:
    """Return True if `transformers` is installed."""
    return importlib.util.find_spec("transformers") is not None
