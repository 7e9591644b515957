"""Claims about a model that can be saved, exchanged and tested: `Claim.circuit(...).verify()`.

Read `verdict` (a test and the worst of several tests) and `claim` first, then the tests of each
kind of claim: `circuit`, `effect` (a head or a feature), `direction` and `variable`, with `trial`
for tests of several kinds. The file of a claim is in `texts` and `fields`: pairs of texts and the
model as JSON, and the checks of its fields.
"""

from hooks.base import missing_name as _missing_name
from interp.claims.claim import Claim
from interp.claims.verdict import Test, Verdict

__all__ = ["Claim", "Test", "Verdict"]

__getattr__ = _missing_name(__name__, __all__)
