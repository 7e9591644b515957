"""Train a BatchTopK crosscoder of two models from two stores of the same texts.

The base model is pydoc-4l. The tuned model is a copy that was trained to write a sentence about
lava after each sentence. The question is which features only the tuned model
has.

1. Train the copy, and write the values of both models on the same texts to two stores.
2. Read both stores in the same order. Centre the values of each model, and scale them to one size.
3. A feature reads both models and writes to both. In a batch, keep the features with the largest
   values times the lengths of their decoder rows (Bussmann et al. 2024). Minimise the squared error
   of both models. Features that have not been active for some time learn the remaining error.
4. A running mean of the smallest kept value is the threshold after the training.
5. Write the files of dictionary_learning, which `load_crosscoder` and the library read.
6. Print the variance that is explained on held-out texts, the features that truly belong to the
   tuned model (`latent_scaling`), and the features whose decoder rows in both models differ most.

It takes some minutes on one core. The second command takes a minute or two. It explains 89% of the
variance of each model. No feature belongs to one model: all relative decoder norms are between 0.40
and 0.58. But the three features whose decoder rows have the smallest cosines, 0.56 to 0.59, are
active inside the trained sentence. After a sentence, the row of the tuned model raises "L" most,
and the row of the base model raises "g".

    python examples/studies/crosscoder.py
    python examples/studies/crosscoder.py --texts 400 --steps 600 --out out/crosscoder-quick
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

# For `commands`, which all examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from commands import Pace, attempt, parser, pydoc_text, require_least
from torch import Tensor

from interp.features import crosscoder_cards, latent_scaling, load_crosscoder, member_values
from interp.store import Activations, HarvestConfig, harvest
from models import TrainingConfig, Transformer, load, sample_batch, train, train_test_split

POINT, LENGTH, ROWS = "blocks.2.resid_post", 128, 1024
SENTENCE = " Lava is hot."


def tuned_model(text: str, steps: int, seed: int) -> Transformer:
    """Return a copy of pydoc-4l that was trained to write the sentence after each sentence."""
    model = load("pydoc-4l")
    tokens = torch.tensor(model.tokenizer.encode(text.replace(". ", "." + SENTENCE + " ")))
    config = TrainingConfig(steps=steps, learning_rate=3e-4, warmup=1, seed=seed)
    train(model, lambda step, draw: sample_batch(tokens, 8, LENGTH + 1, draw), config)
    return model.eval()


def pairs(stores: Sequence[Activations], size: int, seed: int) -> Iterator[list[Tensor]]:
    """Yield the values of both models at the same random rows, without end."""
    names = [POINT, "tokens"]
    read = [store.batches(size, seed, names, epochs=None) for store in stores]
    for batches in zip(*read, strict=True):
        values, tokens = zip(*batches, strict=True)
        if not torch.equal(*tokens):
            raise ValueError("both stores must have the same texts; got different tokens in a row")
        if len(values[0]) == size:
            yield [value.float() for value in values]


def decoded(features: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Return the reconstruction of both models, [row member d_model]."""
    return torch.einsum("rf,mfd->rmd", features, weights["decoder.weight"])


def fit(
    stores: Sequence[Activations], n_features: int, k: int, steps: int, seed: int
) -> dict[str, Tensor]:
    """Return the tensors of a trained crosscoder, with the names of dictionary_learning."""
    generator = torch.Generator().manual_seed(seed)
    batches = pairs(stores, ROWS, seed)
    first = torch.stack(next(batches), dim=1)
    center, deviation = first.mean(0), first.std(0)
    scale = 1 / deviation.square().sum(1).sqrt()
    directions = torch.randn(n_features, first.shape[2], generator=generator)
    directions = torch.nn.functional.normalize(directions, dim=1).expand(2, -1, -1)
    weights = {
        "encoder.weight": directions.mT.clone() / 2,
        "encoder.bias": torch.zeros(n_features),
        "decoder.weight": directions.clone(),
        "decoder.bias": torch.zeros(2, first.shape[2]),
    }
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=2e-3, betas=(0.9, 0.99))
    threshold, idle = torch.tensor(0.0), torch.zeros(n_features)
    pace = Pace(steps)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 50, (steps - step + 1) / (0.4 * steps))
        x = (torch.stack(next(batches), dim=1) - center) * scale[:, None]
        pre = torch.einsum("rmd,mdf->rf", x, weights["encoder.weight"]) + weights["encoder.bias"]
        features = pre.relu()
        scores = features * weights["decoder.weight"].norm(dim=2).sum(0)
        least = scores.detach().flatten().topk(k * ROWS).values[-1]
        is_kept = (scores >= least) & (scores > 0)
        error = x - decoded(features * is_kept, weights) - weights["decoder.bias"]
        loss = error.square().sum(2).mean()
        idle += 1
        idle[is_kept.any(0)] = 0
        is_idle = idle > 60
        if is_idle.sum() >= k:
            values, numbers = pre.masked_fill(~is_idle, -torch.inf).topk(k, dim=1)
            more = torch.zeros_like(pre).scatter(1, numbers, values.relu())
            loss = loss + (error.detach() - decoded(more, weights)).square().sum(2).mean() / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        threshold = least if step == 1 else 0.95 * threshold + 0.05 * least
        if step % 250 == 0:
            mean = error.square().sum(2).mean()
            print(f"{pace(step)}: error {mean:.4f}, {int(is_idle.sum())} idle", flush=True)
    buffers = {"threshold": threshold, "k": torch.tensor(k), "target_rms": torch.tensor(1.0)}
    buffers |= {"activation_mean": center, "activation_std": deviation}
    buffers |= {"activation_global_scale": scale, "code_normalization_id": torch.tensor(1)}
    return {name: weight.detach() for name, weight in weights.items()} | buffers


def windows(tokens: Tensor, n: int, seed: int) -> Tensor:
    """Return random pieces of a text, [text pos]."""
    return sample_batch(tokens, n, LENGTH, torch.Generator().manual_seed(seed))


def run(options: argparse.Namespace) -> None:
    """Train both models' crosscoder, write it, and print its scores."""
    require_least(options, {"steps": 1, "tuning_steps": 1, "texts": 8, "features": 1})
    text = pydoc_text()
    base, tuned = load("pydoc-4l"), tuned_model(text, options.tuning_steps, options.seed)
    # Half of the texts contain the sentence.
    both_kinds = [
        train_test_split(torch.tensor(base.tokenizer.encode(part)))
        for part in (text, text.replace(". ", "." + SENTENCE + " "))
    ]
    training = torch.cat(
        [windows(part, options.texts // 2, options.seed) for part, _ in both_kinds]
    )
    held_out = torch.cat([windows(part, 32, options.seed + 1) for _, part in both_kinds])
    folders = [options.out / name for name in ("base", "tuned")]
    options.out.mkdir(parents=True, exist_ok=True)
    stores = [
        harvest(model, training, [POINT], folder, config=HarvestConfig(batch=32))
        for model, folder in zip((base, tuned), folders, strict=True)
    ]
    tensors = fit(stores, options.features, options.k, options.steps, options.seed)
    torch.save(tensors, options.out / "ae.pt")
    trainer = {"dict_class": "BatchTopKCrossCoder", "k": options.k, "submodule_name": POINT}
    (options.out / "config.json").write_text(json.dumps({"trainer": trainer}))
    crosscoder = load_crosscoder(options.out, names=["base", "tuned"])
    values = [*member_values((base, tuned), crosscoder, held_out)]
    for member, name in enumerate(crosscoder.names):
        x = torch.cat([batch[member] for batch in values])
        output = torch.cat([crosscoder(batch)[member] for batch in values])
        share = 1 - (x - output).square().sum() / (x - x.mean(0)).square().sum()
        print(f"explained variance of {name}: {share:.3f}")
    scaling = latent_scaling(crosscoder, values, "tuned")
    print(scaling)
    norms = scaling.relative_norm
    print(f"relative decoder norms: {norms.min():.2f} to {norms.max():.2f}")
    # Features of both models that write in different directions.
    cosines = crosscoder.cosines("tuned").masked_fill(scaling.density < 0.001, 2)
    turned = cosines.argsort()[:3].tolist()
    for name in crosscoder.names:
        cards = crosscoder_cards((base, tuned), crosscoder, held_out, turned, name, k=4)
        for feature, card in zip(turned, cards, strict=True):
            print(f"{name}, decoder rows with a cosine of {cosines[feature]:.2f}: {card}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    options = parser(__doc__, "out/crosscoder", 1500)
    options.add_argument("--tuning-steps", type=int, default=300, help="steps of the tuned model")
    options.add_argument("--texts", type=int, default=1000, help="texts of the stores")
    options.add_argument("--features", type=int, default=1024)
    options.add_argument("--k", type=int, default=24, help="active features at a token")
    return attempt(partial(run, options.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
