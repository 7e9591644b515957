"""The README's first lines: run a model, look inside, change something, run it again."""

import torch

from hooks import HookedRunner
from interp import edits
from models import load, load_tokenizer

model, tokenizer = load("pydoc-4l"), load_tokenizer("pydoc-4l")
tokens = torch.tensor([tokenizer.encode("part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8")])

runner = HookedRunner(model)
logits, cache = runner.run_with_cache(tokens)
print(cache["pattern", 2].shape)  # [batch, head, query, key]
print(repr(tokenizer.decode(logits[0, -1:].argmax(-1).tolist())))

without_head_3 = runner.run_with_hooks(tokens, hooks={"blocks.*.attn.z": edits.zero(head=3)})
print((logits - without_head_3)[0, -1].abs().max().item())
