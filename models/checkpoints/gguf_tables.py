"""What llama.cpp computes for each architecture of a GGUF file, from gguf_tables.json.

Of the file's other tables, `keys` are the keys of fields that only some architectures have, `top` and `block` the file's
names of our modules, `only` keys without a counterpart in the model, each with the one value that changes nothing,
`without_effect` keys about how a file was made, `beyond` what other architectures have and our config has not, and
`read_by_transformers` those of them whose files transformers 5.24 reads right where rotation is not scaled, and whose models
`attach` takes. It reads Gemma 3 too, but presumes its scale of dot products and no cap.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """What a file does not say about a model of its architecture.

    Attributes:
        fields: fields of our config. Where `KEYS` has a key for one, it is the default.
        root_scale: whether embeddings are multiplied with the root of their size, as Gemma's are.
        largest: of so many layers is the one model of Gemma whose dot products have a scale of another head size; 0 if
            `attn_scale` is as in other architectures.
        tensors: the tensors of modules that have others than in `BLOCK`. Of several the first that the file has; all
            but the first are for parallel blocks, where attention and the MLP may read one norm.
        permuted: whether rows of queries and keys are in llama.cpp's order for rotation.
        period: of so many layers the last has no window, if the file does not say which; 0 means that all have it.
        window_theta: the base of rotation in layers with a window; 0 means that of the others.
        windows_scaled: whether rotation is scaled there as in the others.
        folded: keys of factors without a field in our config, with the modules whose weights are multiplied by the
            factor to a power, and the power.
        only: keys with the only value that our config can express.
        note: for readers of the table.
    """

    fields: Fields = field(default_factory=dict)
    root_scale: bool = False
    largest: int = 0
    tensors: Mapping[str, list[str]] = field(default_factory=dict)
    permuted: bool = False
    period: int = 0
    window_theta: float = 0.0
    windows_scaled: bool = True
    folded: Mapping[str, list[Any]] = field(default_factory=dict)
    only: Fields = field(default_factory=dict)
    note: str = ""

    def from_sizes(self, sizes: Fields) -> dict[str, float]:
        """Fields of our config that follow from sizes."""
        fields = {"embed_scale": sizes["d_model"] ** 0.5} if self.root_scale else {}
        if self.largest:
            is_largest = sizes["n_layers"] == self.largest
            scaled = sizes["d_model"] // sizes["n_heads"] if is_largest else sizes["d_head"]
            fields["attn_scale"] = scaled**-0.5
        return fields


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ARCHITECTURES = {name: Architecture(**row) for name, row in _DATA["architectures"].items()}
KEYS: Mapping[str, str] = _DATA["keys"]
TOP: Mapping[str, str] = _DATA["top"]
BLOCK: Mapping[str, list[str]] = _DATA["block"]
QKV_APART = ("attn_q", "attn_k", "attn_v")
ONLY: Fields = _DATA["only"]
WITHOUT_EFFECT = frozenset(_DATA["without_effect"])
BEYOND: Mapping[str, list[str]] = _DATA["beyond"]
READ_BY_TRANSFORMERS: list[str] = _DATA["read_by_transformers"]
