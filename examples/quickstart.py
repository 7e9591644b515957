"""The README's first lines: run a model, look inside, change something, run it again."""

from hooks import HookedRunner
from interp import edits
from models import load

text, model = "part ZQXJ-KV81 is sold out; ask for ZQXJ-KV8", load("pydoc-4l")
runner = HookedRunner(model)
logits, cache = runner.run_with_cache(text)
print(cache["pattern", 2].shape)  # [batch, head, query, key]
print(model.to_pieces(logits[0, -1].topk(3).indices))  # the likeliest next tokens

without_head_3 = runner.run_with_hooks(text, hooks={"blocks.*.attn.z": edits.zero(head=3)})
print((logits - without_head_3)[0, -1].abs().max().item())
