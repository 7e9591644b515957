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
#
# Any causal language model of `transformers` (5.6 or later), and encoders like BERT, get the same points in place, and lose them
# without a trace (`detach(model)` does that for a copy of an attached model).
#
# Attention goes through the library's own interface, and unhooked by the kernel that the model was using: `scores` and `pattern`
# are there for `eager` and `sdpa`. Attention by code of its own (bloom, codegen, falcon, gpt_neo, gptj, mpt, openai-gpt, xglm and
# others) gets the same points where it is two products with a softmax between them, or PyTorch's fused function; `scores` are
# scale·q·k there too, and ALiBi's slopes come after them. Where points belong is found from a run on fourteen tokens and checked by
# a few more; `attached.left_out` says which are missing, and why.
# Tested on 97 tiny random architectures (5.23): unhooked logits are bitwise the model's own, and with hooks everywhere bitwise
# those of eager mode (falcon's and diffllama's, which keep a kernel of their own, to 3e-6). The 91 that 5.6 has pass there too.
# On seven architectures, precision, kernel, padding, positions, kind of cache, adapters (attach after they are added), copies,
# subclasses and embeddings in place of tokens, drawn until every two values have met: logits, a cached value and an edit are
# bitwise those of PyTorch's hooks on the model without points. diffllama calls attention twice a layer, and has no `attn.*`.
# Encoder-decoders are refused. Analyses take attached models as they are. Circuits, edge attribution, `decompose` and
# `direct_logit_attribution` take any decoder whose parts are found: for families that `from_hf` does not know, a view of the blocks is
# made from one run, with weights got from unit vectors and attention by the model's own module (a run of it takes two forward
# passes). It is refused unless it gives the model's logits: of 97 architectures 69 have it, each with whole and empty circuits
# equal to the two texts' logits to 1e-4; for the others the error names what is missing (latent or gated attention, norms of sums,
# heads that share keys inside a fused map). Readings of weights alone (`ov_circuit` and its like) need a family of `from_hf`.
# A model without a head has no `unembed`. Edits during generation count
# positions of the whole text; a generation is kept as one cache where its pieces follow one another, and refused with beams, an
# assistant or without a cache of keys.
