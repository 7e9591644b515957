"""Analyses of what happens inside a model, through its hook points and `interp.protocol`."""

try:
    from hooks import HookedRunner as _HookedRunner  # noqa: F401  # only ours has it
except ImportError as error:
    import hooks as _found

    raise ImportError(
        f"the package `hooks` must be hookscope's; got {_found.__file__}: "
        "rename or move that one, or put hookscope before it on sys.path"
    ) from error

from interp.metrics import Metric, log_prob, logit_diff
from interp.patching import PatchingResult, activation_patching
from interp.protocol import LanguageModel, run_with_cache
from interp.reading.heads import induction_scores, previous_token_scores, repeated_tokens
from interp.reading.lens import LogitLens, logit_lens
from interp.spectral.subspaces import alignment, drift, principal_angles, subspace_angles
from interp.spectral.svd import (
    SVD,
    condition_number,
    effective_rank,
    randomized_svd,
    spectra,
    spectral_gap,
    stable_rank,
)
from interp.spectral.targets import ResidualStream, SVDTargets, residual_stream, svd_targets, wvwo

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
    "spectra",
    "spectral_gap",
    "stable_rank",
    "subspace_angles",
    "svd_targets",
    "wvwo",
]
