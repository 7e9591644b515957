"""The command `verify`: test the claim in a file on a model."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hooks.base import Text, storage, strict_json
from interp.claims import Claim
from interp.claims.fields import entries, fields, integer
from interp.cli.common import model_of, print_or_write
from interp.features import load_sae
from interp.pairs.pairs import Pairs

STATUSES: Mapping[str, int] = {"holds": 0, "fails": 1, "cannot tell": 3}


def run(options: argparse.Namespace) -> int:
    """Print the table of tests, and return 0 if the claim holds, 1 if it fails, and 3 otherwise."""
    claim = Claim.load(options.claim)
    fresh = None if options.fresh is None else _pairs(options.fresh)
    dictionary = None if options.dictionary is None else load_sae(options.dictionary)
    verdict = claim.verify(
        model_of(options, trained=True),
        fresh=fresh,
        on="another model" if options.on_another_model else None,
        seeds=options.seeds,
        dictionary=dictionary,
    )
    print_or_write(options, repr(verdict), verdict.as_json())
    return STATUSES[verdict.status]


def _pairs(path: str) -> Pairs:
    """Return the pairs of a file of JSON with lists of texts and answers.

    A text is a string or a list of tokens, and so is an answer of one token.

    Raises:
        ValueError: if a field is missing, unknown or wrong.
    """
    with storage.one_error(path, "have pairs of texts with answers"):
        content = strict_json.loads(Path(path).read_text(encoding="utf-8"))
        facts = fields(content, "the file", "clean", "corrupted", "answers")
        corrupted = facts["corrupted"]
        answers = []
        for place, entry in entries(facts["answers"], "answers", least=1):
            answers.append(tuple(_word(answer, at) for at, answer in entries(entry, place, 1)))
        return Pairs(
            _texts(facts["clean"], "clean"),
            None if corrupted is None else _texts(corrupted, "corrupted"),
            answers,
        )


def _texts(value: Any, path: str) -> Any:
    """Return a list of strings, or the tokens of texts with the same length."""
    rows = entries(value, path, least=1)
    if all(isinstance(row, str) for _, row in rows):
        return [row for _, row in rows]
    tokens = []
    for place, row in rows:
        numbers = [integer(token, at, 0) for at, token in entries(row, place, least=1)]
        tokens.append(torch.tensor(numbers))
    return Text.padded(tokens)


def _word(value: Any, path: str) -> str | int:
    """Return an answer: a string or a token."""
    return value if isinstance(value, str) else integer(value, path, 0)
