"""TransformerConfig: what a transformer is, checked when it is built."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a plain pre-norm transformer (GPT-2, Radford et al. 2019).

    Attributes:
        vocab_size: number of tokens.
        n_ctx: the longest context, in tokens: rows of the learned position table.
        n_layers: number of blocks.
        n_heads: attention heads per block.
        d_model: width of the residual stream; a multiple of `n_heads`.
        d_mlp: width of the MLP's hidden layer; 0 stands for `4 * d_model`.
        norm_eps: what LayerNorm adds to the variance.
        tied_unembed: whether the unembedding is the token embedding's own weight.
        dropout: probability of dropping a value in training: embeddings, patterns, both sublayers.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    vocab_size: int
    n_ctx: int
    n_layers: int
    n_heads: int
    d_model: int
    d_mlp: int = 0
    norm_eps: float = 1e-5
    tied_unembed: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.d_mlp == 0:
            object.__setattr__(self, "d_mlp", 4 * self.d_model)
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type and not (field.type is float and type(value) is int):
                kind = getattr(field.type, "__name__", field.type)
                raise ValueError(f"{field.name} is a {kind}, not {value!r}")
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} is at least 1, not {value}")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model is a multiple of n_heads ({self.n_heads}), not {self.d_model}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is at least 0 and below 1, not {self.dropout}")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps is above 0, not {self.norm_eps}")

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads
