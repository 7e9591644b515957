"""A training step against that of a minimal GPT without hook points: `python tests/bench/training.py`.

Both are nanoGPT's setting for a CPU (4 layers, 4 heads, width 128, context 64, 12 rows), with the same
weights, batches and fused AdamW. One call is `train` itself over some steps, the other the shortest loop
that does the same. Prints the losses' difference too, to show that they are the same training. Run it on
an otherwise idle machine.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Run as a script, Python puts this folder on the path, and not the project.
sys.path.insert(0, str(Path(__file__).parents[2]))

from models import TrainingConfig, Transformer, TransformerConfig, sample_batch, train
from tests.bench import timing

VOCAB, CTX, LAYERS, HEADS, WIDTH, BATCH = 65, 64, 4, 4, 128, 12


class MinimalBlock(nn.Module):
    """Attention and MLP, as short as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ln2 = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block: [batch, pos, width]."""
        batch, pos, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, pos, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).reshape(batch, pos, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class MinimalGPT(nn.Module):
    """The same model without hook points, configs or checks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(CTX, WIDTH)
        self.blocks = nn.ModuleList(MinimalBlock() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits: [batch, pos, vocab]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.ln(x) @ self.tokens.weight.T


def ours() -> Transformer:
    """This project's."""
    torch.manual_seed(0)
    return Transformer(
        TransformerConfig(
            vocab_size=VOCAB,
            n_ctx=CTX,
            n_layers=LAYERS,
            n_heads=HEADS,
            d_model=WIDTH,
            norm_bias=False,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            activation="gelu",
        )
    )


def minimal(like: Transformer) -> MinimalGPT:
    """The minimal model with another's weights: both have them in the same order."""
    model = MinimalGPT()
    pairs = list(zip(model.parameters(), like.parameters(), strict=True))
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs)
    return model


def train_minimal(model: MinimalGPT, text: Tensor, config: TrainingConfig) -> list[float]:
    """The shortest loop with schedule, clipping and the losses."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )
    generator = torch.Generator().manual_seed(config.seed)
    losses = []
    for step in range(config.steps):
        tokens = sample_batch(text, BATCH, CTX + 1, generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Prints the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="steps a call (%(default)s)")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds (%(default)s)")
    options = parser.parse_args()
    text = torch.randint(VOCAB, (100_000,), generator=torch.Generator().manual_seed(0))
    config = TrainingConfig(steps=options.steps, batch_size=BATCH)

    def batches(step: int, generator: torch.Generator) -> Tensor:
        return sample_batch(text, BATCH, CTX + 1, generator)

    first = train(model := ours(), batches, config).losses
    second = train_minimal(minimal(ours()), text, config)
    apart = max(abs(one - other) for one, other in zip(first, second, strict=True))
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, a step of {BATCH} x {CTX}"
    )
    print(f"  largest difference of a loss over {options.steps} steps: {apart:.1e} nats")
    bare = minimal(model)
    measured = timing.ratios(
        {
            "minimal GPT": lambda: train_minimal(bare, text, config),
            "hookscope": lambda: train(model, batches, config),
        },
        "minimal GPT",
        options.budget,
    )
    for name, (time, ratio) in measured.items():
        print(f"  {name:<48} {time / options.steps * 1e3:9.2f} ms  x {ratio:5.3f}")


if __name__ == "__main__":
    main()
