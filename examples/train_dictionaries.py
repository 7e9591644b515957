"""Train the dictionaries that ship with pydoc-4l: a sparse autoencoder and four skip transcoders.

The autoencoder reads and writes the residual stream after block 2. Each transcoder reads the input
of one MLP, and writes the output of this MLP. Each dictionary has 1,024 features, and 32 of them
are active at each position. The texts are `pydoc_data.topics` without its last tenth, and repeated
random characters. Both are needed: with a dictionary that is trained on prose alone, the model
loses half of its ability to copy random characters.

For each dictionary:

1. Read its inputs and its outputs at all positions of the texts from a store. All dictionaries use
   the same store, which `harvest` wrote before. Scale inputs and outputs to a mean square of 1.
2. Begin with random directions. The skip connection of a transcoder begins as the best linear map
   from inputs to outputs.
3. Minimise the squared error with Adam. A second term of the loss trains features that have not
   been active for some time to reconstruct the remaining error (Gao et al. 2024).
4. Round the weights to 8 bits, with one scale for each feature.

The training takes some minutes on one core. Then the script measures the rounded dictionaries on
held-out prose and on held-out repeated characters, and prints the share of the loss that they
recover.

    python examples/train_dictionaries.py --out out/dictionaries
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from commands import Pace, attempt, parser, pydoc_text, require_least
from safetensors.torch import save_file
from torch import Tensor
from train_pydoc import repeated

from interp.features import Dictionary, TopK, evaluate_sae
from interp.features.bundled import packed, unpacked
from interp.store import HarvestConfig, harvest
from models import load, train_test_split

FEATURES, ACTIVE, ROWS, COPIES, LENGTH = 1024, 32, 1200, 400, 256


def texts(part: Tensor, rows: int, copies: int, vocab_size: int, seed: int) -> Tensor:
    """Return `rows` texts of prose and `copies` of repeated characters, [text, LENGTH]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(part) - LENGTH, (rows, 1), generator=generator)
    prose = part[starts + torch.arange(LENGTH)]
    return torch.cat([prose, repeated(copies, LENGTH, vocab_size, generator)])


def fit(read: Tensor, write: Tensor, steps: int, seed: int, reads: str, writes: str) -> Dictionary:
    """Return a trained dictionary that computes `write` from `read`, both [row d_model]."""
    generator = torch.Generator().manual_seed(seed)
    is_transcoder = reads != writes
    in_mean, out_mean = read.mean(0), write.mean(0)
    in_scale, out_scale = (
        (read - in_mean).square().mean().sqrt(),
        (write - out_mean).square().mean().sqrt(),
    )
    x, y = (read - in_mean) / in_scale, (write - out_mean) / out_scale
    d = x.shape[1]
    directions = torch.nn.functional.normalize(torch.randn(FEATURES, d, generator=generator), dim=1)
    W_enc = directions.T.clone().requires_grad_()
    W_dec = (directions * (0.1 if is_transcoder else 1.0)).clone().requires_grad_()
    b_enc, b_dec = torch.zeros(FEATURES, requires_grad=True), torch.zeros(d, requires_grad=True)
    W_skip = torch.linalg.lstsq(x, y).solution.requires_grad_() if is_transcoder else None
    weights = [W_enc, W_dec, b_enc, b_dec, *([W_skip] if W_skip is not None else [])]
    optimizer = torch.optim.Adam(weights, lr=2e-3, betas=(0.9, 0.99))
    unused = torch.zeros(FEATURES)
    pace = Pace(steps)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 50, (steps - step + 1) / (0.4 * steps))
        rows = torch.randint(len(x), (1024,), generator=generator)
        some, wanted = x[rows], y[rows]
        pre = (some if is_transcoder else some - b_dec) @ W_enc + b_enc
        kept, numbers = TopK(ACTIVE).top(pre)
        output = (
            torch.nn.functional.embedding_bag(numbers, W_dec, per_sample_weights=kept, mode="sum")
            + b_dec
        )
        if W_skip is not None:
            output = output + some @ W_skip
        error = wanted - output
        loss = error.square().mean()
        unused += 1
        unused[numbers[kept > 0]] = 0
        idle = unused > 60
        if idle.sum() >= ACTIVE:
            more, which = TopK(ACTIVE).top(pre.masked_fill(~idle, -torch.inf))
            guess = torch.nn.functional.embedding_bag(
                which, W_dec, per_sample_weights=more, mode="sum"
            )
            loss = loss + (error.detach() - guess).square().mean() / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 250 == 0:
            print(
                f"{writes}: {pace(step)}: error {error.square().mean():.4f}, {int(idle.sum())} "
                "idle",
                flush=True,
            )
    with torch.no_grad():
        # Undo the scaling, so that the dictionary reads and writes values of the model. The bias
        # of the encoder subtracts the mean of the inputs.
        shift = in_mean / in_scale + (0 if is_transcoder else b_dec)
        skip = None if W_skip is None else W_skip * out_scale / in_scale
        constant = b_dec * out_scale + out_mean - (0 if skip is None else in_mean @ skip)
        return Dictionary(
            W_enc / in_scale,
            W_dec * out_scale,
            b_enc - shift @ W_enc,
            constant,
            TopK(ACTIVE),
            W_skip=skip,
            reads=reads,
            writes=writes,
        )


def run(options: argparse.Namespace) -> None:
    """Train all dictionaries, write them to two files, and print their scores."""
    require_least(options, {"steps": 1})
    model = load("pydoc-4l")
    tokenizer, vocab_size = model.tokenizer, model.config.vocab_size
    training, validation = train_test_split(torch.tensor(tokenizer.encode(pydoc_text())))
    tokens = texts(training, ROWS, COPIES, vocab_size, options.seed)
    places = {"blocks.2.resid_post": "blocks.2.resid_post"}
    places |= {f"blocks.{n}.mlp_out": f"blocks.{n}.ln2.normalized" for n in range(4)}
    options.out.mkdir(parents=True, exist_ok=True)
    points, made = sorted({*places, *places.values()}), {}
    # If this script was stopped before, the harvest continues where it stopped.
    store = harvest(
        model, tokens, points, options.out / "store", config=HarvestConfig(batch=100, per_file=100)
    )
    for writes, reads in places.items():
        read, write = (
            torch.cat([store.file(n, [name])[name] for n in range(len(store.files))])
            for name in (reads, writes)
        )
        made[writes] = fit(read, write, options.steps, options.seed, reads, writes)
    held_out = {
        "prose": texts(validation, 60, 0, vocab_size, options.seed + 1),
        "repeated": texts(validation, 0, 60, vocab_size, options.seed + 1),
    }
    for name, points in {"resid_post": [*places][:1], "transcoders": [*places][1:]}.items():
        rounded = packed({point: made[point] for point in points})
        save_file(rounded, options.out / f"{name}.safetensors")
        for kind, some in held_out.items():
            print(f"{name}, {kind}:\n{evaluate_sae(model, unpacked(rounded), some)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    options = parser(__doc__, "out/dictionaries", 1500)
    return attempt(partial(run, options.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
