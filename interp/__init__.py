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
from interp.subspaces import alignment, drift, principal_angles, subspace_angles
from interp.svd import (
    SVD,
    condition_number,
    decompose,
    effective_rank,
    randomized_svd,
    spectral_gap,
    stable_rank,
)
from interp.targets import ResidualStream, SVDTargets, residual_stream, svd_targets, wvwo

__all__ = [
    "SVD",
    "LanguageModel",
    "LogitLens",
    "Metric",
    "PatchingResult",
    "ResidualStream",
    "SVDTargets",
    "activation_patching",
    "alignment",
    "condition_number",
    "decompose",
    "drift",
    "effective_rank",
    "induction_scores",
    "log_prob",
    "logit_diff",
    "logit_lens",
    "previous_token_scores",
    "principal_angles",
    "randomized_svd",
    "repeated_tokens",
    "residual_stream",
    "run_with_cache",
    "spectral_gap",
    "stable_rank",
    "subspace_angles",
    "svd_targets",
    "wvwo",
]
