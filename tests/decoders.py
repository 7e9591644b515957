"""Decoders of `transformers` that have a graph of heads and MLPs when they are attached."""

from models.checkpoints.huggingface.families import FAMILIES

# The models have different structures: experts, fused projections, attention that is found by
# tracing, parallel blocks, an MLP without a module, factors, norms after sublayers, and norms of
# queries. Each structure occurs at least once.
KINDS = [
    *("olmoe", "gptj", "bloom", "codegen", "cohere", "phi3", "granite", "glm4", "persimmon"),
    *("nemotron", "xglm", "mpt", "llama4_text", "gpt_oss", "starcoder2"),
]
KNOWN = sorted(FAMILIES)
# The sizes in the table of `attachable` that the configs of these models do not have.
FOREIGN = dict.fromkeys(("gpt2", "opt"), ("head_dim", "intermediate_size", "num_key_value_heads"))
FOREIGN["gpt_neox"] = ("head_dim", "num_key_value_heads")
