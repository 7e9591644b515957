"""Checkpoints in this package's own format, Hugging Face's, GGUF and TransformerLens' weights.

Read `loading` first: it finds the format of a name or a path, with `packaged` for models in
installed packages. Then read one format, which builds its model with `assemble` from the tensors of
`readers`: `own`, `huggingface`, `transformer_lens` with `transformer_lens_config`, or `gguf` with
`gguf_file`, `gguf_config` and `gguf_tokenizer`.
"""

from models.checkpoints.huggingface import from_hf
from models.checkpoints.loading import load, load_tokenizer
from models.checkpoints.own import BUNDLED, list_models, save
from models.checkpoints.transformer_lens import from_transformer_lens

__all__ = [
    "BUNDLED",
    "from_hf",
    "from_transformer_lens",
    "list_models",
    "load",
    "load_tokenizer",
    "save",
]
