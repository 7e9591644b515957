"""TransformerConfig: the sizes and choices that define a transformer, checked when it is built."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

from hooks.base import HintsAtNames, names_fields
from models.checks import check_types, require
from models.rotary_scaling import RotaryBase, RotaryScaling

# The smallest allowed sizes. Where 0 is allowed, it has a special meaning, such as "no limit".
LEAST: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size", "n_ctx", "n_layers", "n_heads", "d_model"), 1),
    **dict.fromkeys(("n_kv_heads", "d_head", "d_mlp", "vocab_size_out", "window", "norm_eps"), 0),
    **dict.fromkeys(("attn_scale", "attn_cap", "logit_cap"), 0),
}
# The largest allowed size. PyTorch would report a larger one as an overflow, without its name.
MOST = 2**31
SHORTFORMER = (
    "shortformer positions (Press et al. 2021) are not supported; use TransformerLens for such a "
    "model"
)


@names_fields
@dataclass(frozen=True, kw_only=True)
class TransformerConfig(HintsAtNames):
    """Sizes and choices of a decoder-only transformer.

    The defaults are GPT-2's (Radford et al. 2019). Names such as qk-norm.md below are the
    specifications from which this package was written.

    Attributes:
        vocab_size: number of tokens.
        vocab_size_out: number of logits; 0 means `vocab_size`. A model with another number needs an
            untied unembedding and cannot generate texts.
        n_ctx: the longest context, in tokens: the rows of the learned position table, or the
            longest context in training, which `Transformer.extend_context` can change.
        n_layers: number of blocks.
        n_heads: query heads per block.
        d_model: width of the residual stream.
        n_kv_heads: key and value heads per block, each shared by `n_heads / n_kv_heads` query heads
            (grouped queries, Ainslie et al. 2023; 1 is multi-query, Shazeer 2019); 0 means
            `n_heads`.
        d_head: width of a head; 0 means `d_model / n_heads`.
        d_mlp: width of the hidden layer of the MLP; 0 means `4 * d_model`.
        norm: `layernorm` (Ba et al. 2016), `rmsnorm` (Zhang & Sennrich 2019) or `none`.
        norm_place: `pre`: before each sublayer (GPT-2). `post`: after the sum of stream and
            sublayer (Vaswani et al. 2017). `output`: after each sublayer, before the sum (OLMo 2).
            `sandwich`: before and after each sublayer (Gemma 2, qk-norm.md).
        norm_eps: the number that a norm adds to the variance or the mean square.
        norm_learned: whether norms have weights: a gain and, for LayerNorm, a bias.
        norm_bias: whether LayerNorm's weights include the bias.
        final_norm: whether the unembedding reads a norm of the stream.
        embed_norm: whether the first block reads a norm of the embeddings (model-architecture.md).
        embed_scale: the factor of token embeddings (Gemma: `sqrt(d_model)`).
        positions: `learned`, `sinusoidal` (Vaswani et al. 2017), `rotary` (Su et al. 2021;
            dimension i pairs with i + d_rotary/2, as in GPT-NeoX and Llama) or `none`.
        rotary_theta: base of the rotary wavelengths.
        rotary_fraction: share of each head's dimensions that is rotated, from the first on.
        rotary_pairs: `halves`, or `adjacent`: dimension 2i pairs with 2i + 1, as in GPT-J.
        rotary_scaling: the scaling of frequencies for longer contexts; None for no scaling.
        causal: whether a query sees no later key. Without it, a query sees all keys, and the model
            has no `KVCache`, no generation and no windows.
        qk_norm: RMSNorm of queries and keys, before rotation: `none`, `head` (each head separately,
            Qwen 3, qk-norm.md) or `all` (all heads as one vector, OLMo 2).
        qk_norm_learned: whether that norm has a gain.
        attn_scale: the factor of dot products; 0 means `1 / sqrt(d_head)`.
        attn_scale_by_layer: whether dot products in block L are also divided by `L + 1`, as Hugging
            Face's `scale_attn_by_inverse_layer_idx` does.
        attn_cap: scores become `attn_cap * tanh(scores / attn_cap)` before the mask (Gemma 2); 0
            means no cap.
        logit_cap: the same for the logits.
        window: the number of positions that a query sees, its own included (Mistral); 0 means all.
        window_layers: the blocks that have the window; empty means all.
        window_rotary: the rotary base and scaling of the blocks that have the window, where the
            other blocks have none (Gemma 3); None means `rotary_theta` and `rotary_scaling`.
        parallel: whether attention and the MLP read the same stream and are added together
            (GPT-NeoX, Wang & Komatsuzaki 2021).
        mlp: `plain` (input, activation, output), `gated` (Shazeer 2020) or `none`: attention only.
        activation: `gelu`, `gelu_tanh` (its approximation by tanh, GPT-2's), `relu`, `silu`, or
            `solu`, which is `x * softmax(x)` over the hidden layer (Elhage et al. 2022).
        mlp_norm: whether the output map of the MLP reads a LayerNorm of the hidden layer (Elhage et
            al. 2022).
        qkv_bias, out_bias, mlp_bias, unembed_bias: whether these linear maps have a bias.
        tied_unembed: whether the unembedding is the weight of the token embedding.
        dropout: the dropout probability in training, for embeddings, patterns and sublayers.
        dropout_place: the place of dropout in sublayers. `output`: on the outputs of both (GPT-2).
            `hidden`: only in the MLP, after the activation (model-architecture.md).
        init: the initialisation of weights. `normal`: N(0, 0.02²) (model-architecture.md). `gpt2`:
            the same, but 0.02 is divided by sqrt(2 n_layers) for maps that write to the stream.
            `xavier` (Glorot & Bengio 2010) and `kaiming` (He et al. 2015): uniform, with a range
            from the sizes of each matrix, also for embeddings.
        eos_token_ids: the tokens that end a text. Generation stops there.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.

    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=3, d_model=12)
    >>> config.d_head, config.d_mlp
    (4, 48)
    >>> config.replace(n_heads=2).d_head
    6
    """

    vocab_size: int
    n_ctx: int
    n_layers: int
    n_heads: int
    d_model: int
    n_kv_heads: int = 0
    d_head: int = 0
    d_mlp: int = 0
    vocab_size_out: int = 0
    norm: Literal["layernorm", "rmsnorm", "none"] = "layernorm"
    norm_place: Literal["pre", "post", "output", "sandwich"] = "pre"
    norm_eps: float = 1e-5
    norm_learned: bool = True
    norm_bias: bool = True
    final_norm: bool = True
    embed_norm: bool = False
    embed_scale: float = 1.0
    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    rotary_theta: float = 10_000.0
    rotary_fraction: float = 1.0
    rotary_pairs: Literal["halves", "adjacent"] = "halves"
    rotary_scaling: RotaryScaling | None = None
    qk_norm: Literal["none", "head", "all"] = "none"
    qk_norm_learned: bool = True
    attn_scale: float = 0.0
    attn_scale_by_layer: bool = False
    attn_cap: float = 0.0
    logit_cap: float = 0.0
    causal: bool = True
    window: int = 0
    window_layers: tuple[int, ...] = ()
    window_rotary: RotaryBase | None = None
    parallel: bool = False
    mlp: Literal["plain", "gated", "none"] = "plain"
    activation: Literal["gelu", "gelu_tanh", "relu", "silu", "solu"] = "gelu_tanh"
    mlp_norm: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    unembed_bias: bool = False
    tied_unembed: bool = True
    dropout: float = 0.0
    dropout_place: Literal["output", "hidden"] = "output"
    init: Literal["gpt2", "normal", "xavier", "kaiming"] = "gpt2"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if str(self.positions) == "shortformer":
            raise ValueError(f"positions must not be 'shortformer': {SHORTFORMER}")
        check_types(self)
        for name, least in LEAST.items():
            possible = least <= getattr(self, name) < MOST
            require(self, name, possible, rule=f"at least {least} and below {MOST}")
        divides = self.d_head or self.d_model % self.n_heads == 0
        require(self, "d_model", divides, rule=f"a multiple of n_heads ({self.n_heads})")
        for name, value in self._derived().items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        self._check()

    def replace(self, **changes: Any) -> "TransformerConfig":
        """Return a config with some fields changed. Derived sizes are derived again.

        A field that no longer has an effect, such as the activation without an MLP, returns to its
        default.

        Raises:
            TypeError: if a field is unknown.
            ValueError: as for a new config.
        """
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self)}
        derived = {name for name, value in self._derived().items() if getattr(self, name) == value}
        values = {
            name: default if name in derived else getattr(self, name)
            for name, default in defaults.items()
        }
        values |= changes
        for names, used, _ in _effects(SimpleNamespace(**values)):
            for name in names.split():
                if not used and name not in changes:
                    values[name] = defaults[name]
        return TransformerConfig(**values)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The number of positions that a query sees in each block; 0 means all."""
        layers = self.window_layers or range(self.n_layers)
        return tuple(self.window if layer in layers else 0 for layer in range(self.n_layers))

    def rotary_base(self, window: int) -> RotaryBase:
        """Return the rotary base and scaling of the blocks with a window; 0 means no window."""
        if window and self.window_rotary is not None:
            return self.window_rotary
        return RotaryBase(theta=self.rotary_theta, scaling=self.rotary_scaling)

    @property
    def d_rotary(self) -> int:
        """The number of a head's dimensions that are rotated."""
        return int(self.d_head * self.rotary_fraction)

    def _derived(self) -> dict[str, int | float]:
        """Return the values of the fields for which 0 means a derived value."""
        d_head = self.d_model // self.n_heads
        divides = self.d_model % self.n_heads == 0
        return ({"d_head": d_head} if divides else {}) | {
            "n_kv_heads": self.n_heads,
            "vocab_size_out": self.vocab_size,
            "attn_scale": (self.d_head or d_head) ** -0.5,
            "d_mlp": 0 if self.mlp == "none" else 4 * self.d_model,
        }

    def _check(self) -> None:
        """Check that every field has an effect and that no two fields contradict each other."""
        for names, used, condition in _effects(self):
            for name in () if used else names.split():
                default = self.__dataclass_fields__[name].default
                rule = f"{default!r} unless {condition}"
                require(self, name, getattr(self, name) == default, rule=rule)
        divides = self.n_heads % self.n_kv_heads == 0
        require(self, "n_kv_heads", divides, rule=f"a divisor of n_heads ({self.n_heads})")
        require(self, "dropout", 0 <= self.dropout < 1, rule="at least 0 and below 1")
        inside = all(0 <= layer < self.n_layers for layer in self.window_layers)
        require(self, "window_layers", inside, rule=f"among the {self.n_layers} layers")
        known = all(0 <= token < self.vocab_size for token in self.eos_token_ids)
        require(self, "eos_token_ids", known, rule=f"from 0 to {self.vocab_size - 1}")
        if self.positions == "rotary":
            self._check_rotary()
        if self.vocab_size_out != self.vocab_size:
            rule = f"False with another vocab_size_out ({self.vocab_size_out}) than vocab_size"
            require(self, "tied_unembed", not self.tied_unembed, rule=rule)
        if self.positions == "sinusoidal":
            require(self, "d_model", self.d_model % 2 == 0, rule="even with sinusoidal positions")
        if self.norm_place == "post":
            require(
                self,
                "norm_place",
                self.mlp != "none",
                rule="'pre', 'output' or 'sandwich' without an MLP",
            )
            require(self, "parallel", not self.parallel, rule="False with norm_place='post'")

    def _check_rotary(self) -> None:
        """Check the fields of rotary positions."""
        # YaRN divides by the logarithm of the base.
        is_yarn = self.rotary_scaling is not None and self.rotary_scaling.kind == "yarn"
        least = 1 if is_yarn else 0
        require(self, "rotary_theta", self.rotary_theta > least, rule=f"above {least}")
        even = 0 < self.d_rotary <= self.d_head and self.d_rotary % 2 == 0
        rule = f"a share that is an even number of a head's {self.d_head} dimensions"
        require(self, "rotary_fraction", even, rule=rule)
        scalings = {"rotary_scaling": self.rotary_scaling}
        if self.window_rotary is not None:
            scalings["window_rotary.scaling"] = self.window_rotary.scaling
        for name, scaling in scalings.items():
            factors = scaling.factors if scaling else ()
            if factors and len(factors) != self.d_rotary // 2:
                raise ValueError(
                    f"{name}.factors must be {self.d_rotary // 2} numbers, one for each "
                    f"frequency; got {len(factors)}"
                )


def _effects(config: Any) -> Iterator[tuple[str, object, str]]:
    """Yield names of fields, whether they have an effect, and the condition for this in words."""
    normed = config.norm != "none"
    qk_normed = config.qk_norm != "none"
    rotary = config.positions == "rotary"
    yield "rotary_theta rotary_fraction rotary_pairs rotary_scaling", rotary, "positions are rotary"
    yield "norm_place embed_norm", normed, "there is a norm"
    yield "norm_eps", normed or qk_normed or config.mlp_norm, "there is a norm"
    yield "qk_norm_learned", qk_normed, "there is a qk_norm"
    yield "window_layers", config.window, "there is a window"
    others = config.window and 0 < len(set(config.window_layers)) < config.n_layers
    condition = "positions are rotary, and only some blocks have a window"
    yield "window_rotary", rotary and others, condition
    yield "window", config.causal, "attention is causal"
    yield "dropout_place", config.dropout, "there is dropout"
    yield "mlp_norm", config.mlp == "plain", "the MLP is plain"
    yield "d_mlp activation parallel", config.mlp != "none", "there is an MLP"
