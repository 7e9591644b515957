# %% [markdown]
# # Any model of transformers
#
# `attach` gives a model of `transformers` the names of this package, in place.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hooks import HookedRunner
from interp import edits
from models import attach

sizes = dict(vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3)
llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=20)).eval()  # or from_pretrained
tokens = torch.tensor([[30, 31, 32]])
with attach(llama):  # or attached = attach(llama), and later attached.remove()
    _, cache = HookedRunner(llama).run_with_cache(tokens, names="*.pattern")
    print(cache["pattern", 1].shape)
    with HookedRunner(llama).hooks({"blocks.0.attn.z": edits.zero(head=2, pos=1)}):
        continued = llama.generate(tokens, max_new_tokens=4, do_sample=False)

# %% [markdown]
# With `attach(model, tokenizer=tokenizer) as attached` the model reads strings too, and `attached.to_tokens` and its like are there.
# `detach(model)` takes the points out again, also of a copy of an attached model, without a trace.
#
# ## What gets points
#
# - Any causal language model of `transformers` 5.6 or later, and encoders like BERT. [Encoders with decoders, and models that read images or
#   sounds](seeing.py), have points under a prefix for each stack.
# - [Mixtures of experts](experts.py) have their router, the chosen experts, their weights, and what each gives.
# - State spaces, convolutions and linear attention have `mixer_out`, what they add to the stream, in place of `attn_out`, or beside it
#   where both read the same (Falcon H1).
# - Attention goes through the library's own interface. Unhooked it uses the kernel that the model was using. `scores` and `pattern`
#   are there for `eager` and `sdpa`.
# - Some models have attention by code of their own (bloom, codegen, falcon, gpt_neo, gptj, mpt, openai-gpt, xglm and others). They get
#   the same points where that code is two products with a softmax between them, or PyTorch's fused function. `scores` are scale·q·k
#   there too, and ALiBi's slopes come after them.
# - Texts may be padded on either side, as strings or as tensors with a mask: where a model takes positions and the caller gives none,
#   it gets those without padding. bart, blenderbot, marian, mbart and plbart take none as decoders, so there padding must be on the right.
# - Where points belong is found from a run on fourteen tokens, and checked by a few more, in half precision on copies in float32 of one
#   module at a time. `attached.left_out` says which of the usual points are
#   missing in some block, and why: [the table of architectures](architectures.md). A model without a head has no `unembed`; diffllama, which calls attention twice a layer, has no `attn.*`.
#
# ## What analyses take
#
# - Analyses of runs take attached models as they are. In which settings (half precision, adapters, quantised and offloaded weights) was tried
#   one by one: [settings](settings.md).
# - Circuits, edge attribution, attribution graphs, `decompose` and `direct_logit_attribution` need the parts of each block. For families
#   that `from_hf` knows these are its plain model's. For others a view of the blocks is made from one run: weights are got from unit
#   vectors, and attention is the model's own module, so a run of the view takes two forward passes. The view must give the model's
#   logits, else it is refused. Of [118 architectures](architectures.md) 80 have one. For the others the error names what is missing: latent or gated
#   attention, another mixer of positions, norms of sums, or heads that share keys inside a fused map.
# - A model that a tensor-parallel plan splits (`tp_plan="auto"` under torchrun) is attached, run and edited by all processes alike. Each
#   point has the heads and neurons of all of them, and edits count them so; weights are joined. Without `attach`, a module that holds a
#   part is refused by name. All processes call `harvest` too, with one directory. 38 tiny
#   architectures that have a plan were tried, once, in two processes with gloo: each point equals that of one process to 1e-5.
# - Readings of weights alone (`ov_circuit` and its like) need a family of `from_hf`.
# - A keyword that the model's forward does not know is refused, where `transformers` would drop it in its `**kwargs`.
# - In `model.generate(use_cache=False)`, and where a model has no cache, each step reads the whole text again. Edits act as with a cache
#   there: `pos=-1` on every token that was the newest, from the last one of the prompt on.
# - Edits during generation count positions of the whole text, also where a state takes the place of keys (mamba, rwkv). The virtual
#   tokens of prefix tuning are no positions. A generation is kept as one cache where its pieces follow one another;
#   it is refused with beams, with an assistant, or without a cache of keys.
#
# ## How it was tested
#
# - 118 tiny random architectures of transformers 5.24, and 91 of them in 5.6 once: unhooked logits are bitwise the model's own.
#   With hooks everywhere they are bitwise those of eager mode; falcon's and diffllama's, which keep a kernel of their own, to 3e-6.
# - Seven architectures in drawn settings, until every two values had met: precision, kernel, padding, positions, kind of cache, adapters
#   (attach after they are added), copies, subclasses, and embeddings in place of tokens. Logits, a cached value and an edit are
#   bitwise those of PyTorch's hooks on the model without points.
# - Views: whole and empty circuits have the logits of the two texts to 1e-4.
