"""Analyses of what happens inside a model. They see it through its hook points only."""

try:
    from hooks import HookedRunner as _HookedRunner  # noqa: F401  # only ours has it
except ImportError as error:
    import hooks as _found

    raise ImportError(
        f"interp needs the package `hooks` of hookscope, and Python found {_found.__file__}; "
        "rename or move that one, or put hookscope before it on sys.path"
    ) from error

from interp.heads import induction_scores, previous_token_scores, repeated_tokens
from interp.lens import LogitLens, logit_lens
from interp.metrics import Metric, log_prob, logit_diff
from interp.patching import PatchingResult, activation_patching
from interp.protocol import LanguageModel
from interp.run import run_with_cache

__all__ = [
    "LanguageModel",
    "LogitLens",
    "Metric",
    "PatchingResult",
    "activation_patching",
    "induction_scores",
    "log_prob",
    "logit_diff",
    "logit_lens",
    "previous_token_scores",
    "repeated_tokens",
    "run_with_cache",
]
