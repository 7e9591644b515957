"""Texts for models whose circuit is known, as many as a test needs."""

import copy
import functools

import torch

from interp import Circuit, Claim, Pairs
from interp.graph import Graph
from tests.interp.planted import KNOWN, YES, N, V, comparison, induction

EDGES = KNOWN["induction"][-1]
COMPARISON = KNOWN["comparison"][-1]


def induction_pairs(n, seed):
    """Return pairs in which B follows A, and the text ends in A, so that the answer is B.

    In the corrupted text of a pair, another token replaces B, the earlier A or the last A.
    """
    draw = torch.Generator().manual_seed(seed)
    clean, corrupted, answers = [], [], []
    for number in range(n):
        tokens = torch.randperm(V, generator=draw)
        a, b, c, new = tokens[:4].tolist()
        text = tokens[torch.randint(4, V, (N,), generator=draw)]
        at = int(torch.randint(1, N - 3, (1,), generator=draw))
        text[at], text[at + 1], text[-1] = a, b, a
        other = text.clone()
        place, token = ((at + 1, c), (at, new), (N - 1, new))[number % 3]
        other[place] = token
        clean.append(text)
        corrupted.append(other)
        answers.append([b, c])
    return Pairs(torch.stack(clean), torch.stack(corrupted), torch.tensor(answers))


def comparison_pairs(n, seed):
    """Return pairs of three digits, of which the sum of the first and the last is above 5 in the
    clean text and at most 5 in the corrupted text.
    """
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(7, (60 * n, 5), generator=draw)
    is_large = rows[:, 1] + rows[:, 3] > 5
    clean, corrupted = rows[is_large][:n], rows[~is_large][:n]
    return Pairs(clean, corrupted, torch.tensor([[1, 0]] * n))


@functools.cache
def model_of(name):
    return {"induction": induction, "comparison": comparison}[name](KNOWN[name][2])


@functools.cache
def deciding():
    """Return the comparison with logits of -0.5 and 0.5 in place of 0 and 1, so none are equal."""
    model = copy.deepcopy(model_of("comparison"))
    with torch.no_grad():
        model.blocks[0].mlp.b_out[YES] = -0.5
    return model


def variable_claim(**numbers):
    """Return a claim that a value carries the first of two digits whose sum is compared."""
    draw = torch.Generator().manual_seed(5)
    digits = torch.randint(7, (600, 5), generator=draw)
    # The corrupted text has another first digit, which changes the answer.
    other = digits.clone()
    other[:, 1] = torch.randint(7, (600,), generator=draw)
    sums, others = (these[:, 1] + these[:, 3] > 5 for these in (digits, other))
    rows = (sums != others).nonzero()[:90, 0]
    right = sums[rows].long()
    pairs = Pairs(digits[rows], other[rows], torch.stack([right, 1 - right], 1))
    options = {"point": "blocks.0.attn.z", "k": 1, "epochs": 12, "rate": 0.1, **numbers}
    return Claim.variable(deciding(), pairs[:40], "the digit", test=pairs[40:], **options)


def claim_of(edges, says="a circuit", n=24, **promised):
    """Return a claim about a circuit of the induction model, with other pairs to test it."""
    model = model_of("induction")
    circuit = Circuit(Graph(model), edges)
    pairs, test = induction_pairs(n, 1), induction_pairs(n, 2)
    return Claim.circuit(model, pairs, circuit, says, test=test, **promised)
