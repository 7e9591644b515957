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
    """A recurrent network. Its cell runs once a token, so each step has a point of its own."""

    def __init__(self, vocab: int, hidden: int, steps: int) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(vocab, hidden), nn.GRUCell(hidden, hidden)
        self.hidden = nn.ModuleList(HookPoint("batch hidden") for _ in range(steps))
        self.unembedding = nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, from tokens [batch, pos]."""
        state = torch.zeros(len(tokens), self.cell.hidden_size)
        for token, point in zip(self.embedding(tokens).unbind(1), self.hidden, strict=False):
            state = point(self.cell(token, state))
        return self.unembedding(state)


torch.manual_seed(0)
torch.set_grad_enabled(False)
reader = HookedRunner(Reader(vocab=11, hidden=6, steps=5).eval())
clean, corrupted = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 2, 9, 4, 5]])
logits, cache = reader.run_with_cache(clean, names="hidden.*")
print({name: list(value.shape) for name, value in cache.items()})

# %% [markdown]
# The states of the clean text, put into the run of the corrupted one step by step: after the step in which the texts differ, the state
# carries everything, so the logits become those of the clean text.

# %%
for step in range(5):
    name = f"hidden.{step}"
    patched = reader.run_with_hooks(corrupted, hooks={name: edits.replace(cache)})
    print(name, f"{float((patched - logits).abs().max()):.4f}")

# %% [markdown]
# One point has one value in a run. The cell itself runs five times, so its name is refused in place of a guess which call is meant:

# %%
try:
    reader.run_with_cache(clean, names="cell")
except HookError as error:
    print(error)

# %% [markdown]
# ## A model of images
#
# A vision transformer has no tokens, but it has positions: one for the class, then the patches from left to right and from top to bottom.
# Which patch of the image carries a class? Take the embedding of another image at one position after another. Points of somebody else's
# modules name no axes, so the edit is a function of the value and the point.

# %%
from transformers import ViTConfig, ViTForImageClassification

sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32)
vit = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5))
runner, images = HookedRunner(vit.eval()), torch.rand(2, 3, 32, 32)
images[1] = images[0]
images[1, :, 8:16, 16:24] = 0  # the patch in row 1, column 2
_, seen = runner.run_with_cache(images[:1], names="vit.embeddings")
before = runner.run_with_cache(images[1:], names="classifier")[0].logits[0, 3]
gains = []
for place in range(1, 17):

    def one_patch(value, point, place=place):
        """Takes the other image's embedding at one patch."""
        value[:, place] = seen["vit.embeddings"][:, place]

    edited = runner.run_with_hooks(images[1:], hooks={"vit.embeddings": one_patch})
    gains.append(edited.logits[0, 3] - before)
print(torch.stack(gains).view(4, 4).round(decimals=4))

# %% [markdown]
# ## What an adapter does
#
# A model with an adapter and the same model without it are two runs of one text. Values of the run with the adapter, put into the run without
# it, show from which layer on its effect is in the stream.

# %%
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from interp import log_prob, sweep
from models import attach

llama = LlamaConfig(vocab_size=50, hidden_size=12, num_hidden_layers=3, num_attention_heads=3)
lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
model, tokens = get_peft_model(LlamaForCausalLM(llama), lora).eval(), torch.tensor([[3, 1, 4, 1]])
attach(model)
_, adapted = HookedRunner(model).run_with_cache(tokens, names="*.resid_post")
with model.disable_adapter():
    layers = [{name: edits.replace(adapted)} for name in adapted]
    effects = sweep(model, tokens, layers, log_prob(5))
print(effects)
