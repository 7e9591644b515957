"""Decoders of `transformers` that have a graph of heads and MLPs when they are attached."""

from models.checkpoints.huggingface.families import FAMILIES

# One or more of each: experts, fused projections, traced attention, parallel blocks, no module for
# the MLP, factors, norms after sublayers, norms of queries.
KINDS = [
    *("olmoe", "gptj", "bloom", "codegen", "cohere", "phi3", "granite", "glm4", "gemma3_text"),
    *("persimmon", "nemotron", "xglm", "mpt", "llama4_text", "gpt_oss", "starcoder2", "olmo3"),
]
KNOWN = sorted(FAMILIES)
# Sizes of the table that these configs do not have.
FOREIGN = dict.fromkeys(("gpt2", "opt"), ("head_dim", "intermediate_size", "num_key_value_heads"))
FOREIGN["gpt_neox"] = ("head_dim", "num_key_value_heads")
