# %% [markdown]
# # A model of your own
#
# A `HookedRunner` listens to any `nn.Module`. The output of each submodule is a point under the submodule's name; a `HookPoint` gives a
# value that no submodule returns a name of its own. Analyses that change values (patching, sweeps of edits by hand) need no more. Those
# that read a stream (lenses, direct attribution, circuits) need the parts that `interp.LanguageModel` lists.

# %%
import torch
from torch import Tensor, nn

from hooks import HookedRunner, HookError, HookPoint
from interp import edits


class Reader(nn.Module):
    """A recurrent network. Its cell runs once a token, and so does the point at its state."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(vocab, hidden), nn.GRUCell(hidden, hidden)
        self.state = HookPoint("batch hidden", "the state after a step")
        self.unembedding = nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, from tokens [batch, pos]."""
        state = torch.zeros(len(tokens), self.cell.hidden_size)
        for token in self.embedding(tokens).unbind(1):
            state = self.state(self.cell(token, state))
        return self.unembedding(state)


torch.manual_seed(0)
torch.set_grad_enabled(False)
reader = HookedRunner(Reader(vocab=11, hidden=6).eval())
clean, corrupted = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 2, 9, 4, 5]])

# %% [markdown]
# One point has one value in a run. The state's fires five times, so it is refused in place of a guess which call is meant. With
# `calls="all"` each call is kept, on an axis of its own:

# %%
try:
    reader.run_with_cache(clean, names="state")
except HookError as error:
    print(error)
logits, cache = reader.run_with_cache(clean, names="state", calls="all")
print(cache)

# %% [markdown]
# The states of the clean text, put into the run of the corrupted one step by step: after the step in which the texts differ, the state
# carries everything, so the logits become those of the clean text. `call=` says at which call an edit acts.

# %%
for step in range(5):
    edit = edits.replace(cache["state"][step], call=step)
    patched = reader.run_with_hooks(corrupted, hooks={"state": edit})
    print(step, f"{float((patched - logits).abs().max()):.4f}")

# %% [markdown]
# ## A transformer of your own
#
# `attach` finds the parts of a transformer that was written elsewhere, as it finds those of `transformers`: by a run, and by sums that must
# hold. Then its values have our names, and lenses, patching, attribution and circuits work. Where it does not find the blocks, or what attention
# and the MLP add, say which modules they are; the same sums are checked.

# %%
import torch.nn.functional as F

from interp import Pairs, activation_patching, edge_attribution
from models import attach


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """What it adds to the stream."""
        batch, pos, size = x.shape
        q, k, v = self.qkv(x).view(batch, pos, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).reshape(batch, pos, size))


class Layer(nn.Module):
    """A block: attention, then an MLP."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2 = (
            nn.LayerNorm(size),
            Attention(size, 2),
            nn.LayerNorm(size),
        )
        self.feed = nn.Sequential(nn.Linear(size, 3 * size), nn.GELU(), nn.Linear(3 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        x = x + self.mix(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Mine(nn.Module):
    """A small language model."""

    def __init__(self, vocab: int, size: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, size), nn.Embedding(9, size)
        self.body = nn.Sequential(Layer(size), Layer(size))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, pos, vocab]."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.body(x)))


mine = Mine(vocab=11, size=8).eval()
print(attach(mine, blocks="body.*", attn="mix", mlp="feed"))
pairs = Pairs(clean, corrupted, torch.tensor([[7, 8]]))
print(activation_patching(mine, pairs, "z").top(2))
print(edge_attribution(mine, pairs).top(2))

# %% [markdown]
# ## What an adapter does
#
# A model with an adapter and the same model without it are two runs of one text. Values of the run with the adapter, put into the run without
# it, show from which layer on its effect is in the stream.

# %%
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from interp import log_prob, sweep

llama = LlamaConfig(vocab_size=50, hidden_size=12, num_hidden_layers=3, num_attention_heads=3)
lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
model, tokens = get_peft_model(LlamaForCausalLM(llama), lora).eval(), torch.tensor([[3, 1, 4, 1]])
attach(model)
_, adapted = HookedRunner(model).run_with_cache(tokens, names="*.resid_post")
with model.disable_adapter():
    layers = [{name: edits.replace(adapted)} for name in adapted]
    effects = sweep(model, tokens, layers, log_prob(5))
print(effects)
