"""True and false claims about models with a known mechanism, and about the bundled model.

Each entry is a function that returns a claim and the fresh pairs of the person who tests it. None
means that this person has no other pairs than the claim's.
"""

import copy
import functools
import random

import torch

from interp import Circuit, Claim, Pairs, circuits, edge_attribution
from interp.directions import Direction, difference_of_means
from interp.graph import Graph
from interp.graph.circuits import random_backward
from tests.interp.claims.known import (
    COMPARISON,
    EDGES,
    comparison_pairs,
    induction_pairs,
    model_of,
    variable_claim,
)
from tests.interp.planted import DIGITS, SUM, YES
from tests.shipped import pydoc

LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


# Pairs and models.


@functools.cache
def copying_pairs(n, seed):
    """Return pairs for the bundled model, whose texts end where the model copies a digit."""
    draw = random.Random(seed)
    clean, corrupted, answers = [], [], []
    for _ in range(n):
        part = "".join(draw.sample(LETTERS, 4)) + "-" + "".join(draw.sample(LETTERS, 2)) + "8"
        digits = draw.sample("123456789", 2)
        first, second = (f"part {part}{digit} is sold out; ask for {part}" for digit in digits)
        clean.append(first)
        corrupted.append(second)
        answers.append(tuple(digits))
    return Pairs(clean, corrupted, answers).read_by(pydoc())


def one_digit_pairs(n, seed):
    """Return pairs of the comparison in which only the first digit differs."""
    draw = torch.Generator().manual_seed(seed)
    clean = torch.randint(7, (n, 5), generator=draw)
    clean[:, 1] = torch.randint(3, 7, (n,), generator=draw)
    clean[:, 3] = 3
    corrupted = clean.clone()
    corrupted[:, 1] = torch.randint(0, 3, (n,), generator=draw)
    return Pairs(clean, corrupted, torch.tensor([[1, 0]] * n))


@functools.cache
def repaired():
    """Return a model that copies a digit with head 0. If head 0 writes nothing, head 1 replaces it.

    The MLP computes relu(u) + relu(w - 10 u), where u and w are what the two heads write.
    """
    model = copy.deepcopy(model_of("comparison"))
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    with torch.no_grad():
        attn.W_K[1, DIGITS + 2, 0] = 0.0
        attn.W_K[1, DIGITS + 1, 0] = 1.0
        attn.W_O[2] = 0.0
        mlp.W_in.zero_()
        mlp.b_in.zero_()
        mlp.W_in[SUM, 0] = 1.0
        mlp.W_in[SUM, 1] = -10.0
        mlp.W_in[SUM + 1, 1] = 1.0
        mlp.W_out[0, YES] = mlp.W_out[1, YES] = 1.0
    return model


@functools.cache
def constant():
    """Return the comparison with a head that adds 3 to each sum, which the MLP compares with 9."""
    model = copy.deepcopy(model_of("comparison"))
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    with torch.no_grad():
        attn.W_V[1, :DIGITS, 0] = 3.0
        attn.W_O[1] = 0.0
        attn.W_O[1, 0, SUM] = 1.0
        mlp.b_in.sub_(3.0 * mlp.W_in[SUM])
    return model


# Claims of each kind.


def circuit(model, edges, pairs, test, fresh=None, **promised):
    claim = Claim.circuit(model, pairs, Circuit(Graph(model), edges), "c", test=test, **promised)
    return claim, fresh


def of_induction(edges, **promised):
    model = model_of("induction")
    return circuit(model, edges, induction_pairs(24, 1), induction_pairs(24, 2), **promised)


def of_comparison(edges):
    model = model_of("comparison")
    return circuit(model, edges, comparison_pairs(20, 1), comparison_pairs(24, 2))


def of_copying(n=None, edges=None):
    """Return a claim about `n` edges that attribution finds in the bundled model, or some edges."""
    model, pairs = pydoc(), copying_pairs(12, 1)
    if edges is None:
        edges = [*circuits.greedy(Graph(model), edge_attribution(model, pairs), n)]
    return circuit(model, edges, pairs, copying_pairs(20, 2))


def fitted_to_one_pair(fresh):
    """Return a claim about a circuit that is found and tested on a single pair."""
    model, pairs = pydoc(), copying_pairs(12, 3)[:1]
    found = circuits.greedy(Graph(model), edge_attribution(model, pairs), 10)
    claim = Claim.circuit(model, pairs, found, "c", test=pairs)
    return claim, fresh


def first_digit_only(fresh):
    """Return a claim about a part of the comparison, found and tested where one digit differs."""
    edges = [edge for edge in COMPARISON if "h2" not in edge]
    pairs = one_digit_pairs(20, 1)
    return circuit(model_of("comparison"), edges, pairs, pairs, fresh)


def grown(name, n, seed):
    return [*random_backward(Graph(model_of(name)), n, seed)]


def head(model, pairs, test, place, matters=0.3):
    return Claim.effect(model, pairs, "h", head=place, matters=matters, test=test), None


def head_of(name, place, **promised):
    pairs_of = {"induction": induction_pairs, "comparison": comparison_pairs}[name]
    return head(model_of(name), pairs_of(12, 1), pairs_of(40, 2), place, **promised)


def head_of_copying(place, matters):
    return head(pydoc(), copying_pairs(4, 1), copying_pairs(20, 2), place, matters)


def prompts(pairs):
    return Pairs(pairs.corrupted, answers=pairs.answers)


def direction(vector, moves, pairs, test, cost=5.0):
    claim = Claim.direction(
        model_of("comparison"),
        prompts(pairs),
        vector,
        "v",
        yes=pairs.clean,
        no=pairs.corrupted,
        others=pairs.clean,
        moves=moves,
        cost=cost,
        test=prompts(test),
    )
    return claim, None


def along(coordinate):
    vector = torch.zeros(YES + 4).double()
    vector[coordinate] = 3.0
    pairs, test = comparison_pairs(12, 1), comparison_pairs(24, 2)
    return direction(Direction({"blocks.0.resid_mid": vector}), 2.0, pairs, test)


def probed():
    """Return a claim about a direction that separates two kinds of texts, and that nothing reads.

    In these texts, the digit that no later part reads is large if the answer is 1.
    """
    pairs = comparison_pairs(24, 1)
    clean, corrupted = pairs.clean.clone(), pairs.corrupted.clone()
    clean[:, 2], corrupted[:, 2] = 6, 0
    correlated = Pairs(clean, corrupted, pairs.answers)
    point = "blocks.0.resid_mid"
    found = difference_of_means(model_of("comparison"), (clean, corrupted), point)
    vector = torch.zeros_like(found[point])
    vector[SUM + 1] = found[point][SUM + 1]
    assert vector.norm() > 1
    return direction(Direction({point: vector}), 0.5, correlated, comparison_pairs(24, 2))


def luckiest():
    """Return a claim about the random direction that moves the prompts of the claim most."""
    model, pairs = pydoc(), copying_pairs(12, 1)
    point = "blocks.2.resid_post"
    draw = torch.Generator().manual_seed(0)
    texts = prompts(pairs)
    best, largest = None, 0.0
    for _ in range(12):
        vector = torch.randn(128, generator=draw)
        candidate = Direction({point: 12 * vector / vector.norm()})
        claim = Claim.direction(
            model,
            texts,
            candidate,
            "v",
            yes=pairs.clean[:6],
            no=pairs.corrupted[:6],
            others=["def f(x):", "import os", "return self", "class A:", "for x in y"],
            moves=1.0,
            cost=5.0,
            test=prompts(copying_pairs(20, 2)),
            seeds=4,
        )
        moved = claim.verify(fresh=texts, seeds=1)["moves the metric"].measured
        if best is None or moved > largest:
            best, largest = claim, moved
    return best, None


EXTRA = ["a0.h0->logits", "input->a0.h0<v>", "input->a1.h0<k>", "a0.h0->a1.h0<k>"]

TRUE = {
    "a circuit of two heads copies a token": lambda: of_induction(EDGES),
    "a circuit compares a sum with 6": lambda: of_comparison(COMPARISON),
    "20 edges of the bundled model copy a digit": lambda: of_copying(20),
    "an induction head": lambda: head_of("induction", (1, 2)),
    "a head that attends to the token before": lambda: head(
        model_of("induction"), induction_pairs(36, 1)[1::3], induction_pairs(60, 2)[1::3], (0, 1)
    ),
    "a head that copies a digit": lambda: head_of("comparison", (0, 0)),
    "a head of the bundled model": lambda: head_of_copying((3, 0), 0.15),
    "another head of the bundled model": lambda: head_of_copying((3, 3), 0.15),
    "a direction that the unembedding reads": lambda: along(YES),
    "a digit at the output of a head": lambda: (variable_claim(head=0), None),
}

FALSE = {
    "random edges": lambda: of_induction([*circuits.random(Graph(model_of("induction")), 5)]),
    "random paths": lambda: of_induction(grown("induction", 40, 7)),
    "random paths of the comparison": lambda: of_comparison(grown("comparison", 9, 8)),
    "random edges of the bundled model": lambda: of_copying(
        edges=[*circuits.random(Graph(pydoc()), 20, seed=9)]
    ),
    "idle edges": lambda: of_induction([*EDGES, *EXTRA]),
    "a missing query": lambda: of_induction([e for e in EDGES if e != "input->a1.h2<q>"]),
    "a missing key": lambda: of_induction([e for e in EDGES if e != "a0.h1->a1.h2<k>"]),
    "60 edges, of which 20 suffice": lambda: of_copying(60),
    "tested on the pair that it was found on": lambda: fitted_to_one_pair(None),
    "found on one pair": lambda: fitted_to_one_pair(copying_pairs(20, 2)),
    "tested where one digit differs": lambda: first_digit_only(None),
    "found where one digit differs": lambda: first_digit_only(comparison_pairs(24, 2)),
    "a head that does nothing": lambda: head_of("induction", (1, 0)),
    "a head that nothing reads": lambda: head_of("comparison", (0, 1)),
    "a head whose loss is repaired": lambda: head(
        repaired(), one_digit_pairs(12, 1), one_digit_pairs(40, 2), (0, 0)
    ),
    "a head that only repairs": lambda: head(
        repaired(), one_digit_pairs(12, 1), one_digit_pairs(40, 2), (0, 1)
    ),
    "a head that writes a constant": lambda: head(
        constant(), comparison_pairs(12, 1), comparison_pairs(40, 2), (0, 1)
    ),
    "a probe direction that nothing reads": probed,
    "the best of twelve random directions": luckiest,
    "a digit at another head": lambda: (variable_claim(head=1), None),
}
