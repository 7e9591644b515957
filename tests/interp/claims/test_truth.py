"""Claims that are known to be true or false: how many of them `verify` accepts.

The guide `claims.md` reports both numbers.
"""

import re
from pathlib import Path

import pytest

from tests.interp.claims.zoo import FALSE, TRUE

GUIDE = Path(__file__).parents[3] / "examples" / "guides" / "claims.md"


def accepted(claims):
    """Return the names of the claims whose verdict is `holds`."""
    names = []
    for name, make in claims.items():
        claim, fresh = make()
        if claim.verify(fresh=fresh).status == "holds":
            names.append(name)
    return names


# Each of these tests takes a minute.
@pytest.mark.full
def test_true_claims_are_accepted():
    names = accepted(TRUE)
    assert len(TRUE) == 10
    assert len(names) >= 9
    assert re.search(rf"accepts {len(names)} of 10 true claims", GUIDE.read_text("utf-8"))


@pytest.mark.full
def test_false_claims_are_not_accepted():
    names = accepted(FALSE)
    assert len(FALSE) == 20
    assert len(names) <= 1
    assert re.search(rf"and {len(names)} of 20 false claims", GUIDE.read_text("utf-8"))
