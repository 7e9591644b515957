"""Look inside a published model: cache it, patch it and edit it. The README shows this code."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from hooks import HookedRunner
from interp import Pairs, activation_patching, edits
from models import attach

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
attached = attach(model, tokenizer=AutoTokenizer.from_pretrained(name))
text = "When Mary and John went to the store, John gave a drink to"

runner = HookedRunner(model)
output, cache = runner.run_with_cache(text)
print(cache["pattern", 23].shape)  # [batch, head, query, key]
print(attached.to_pieces(output.logits[0, -1].topk(3).indices))  # the most likely next tokens

# In the other text, Mary gives the drink. Which heads bring the answer " Mary" back, if their
# output is copied from the first text?
other = "When Mary and John went to the store, Mary gave a drink to"
pairs = Pairs(text, other, (" Mary", " John"))
restored = activation_patching(model, pairs, site="z").normalized()
print(restored.top(3))

# Remove one head.
edited = runner.run_with_hooks(text, hooks={"blocks.23.attn.z": edits.zero(head=3)})
print(attached.to_pieces(edited.logits[0, -1].topk(3).indices))
