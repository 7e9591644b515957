"""Analyses of what happens inside a model, through its hook points and `interp.protocol`."""

import sys as _sys

try:
    from hooks import HookedRunner as _HookedRunner  # noqa: F401  # only ours has it
except ImportError as error:
    import hooks as _found

    _reason = (
        f"the package `hooks` must be hookscope's; got {_found.__file__}: "
        "rename or move that one, or put hookscope before it on sys.path"
    )
    if _sys.argv[:1] == ["-m"]:  # `python -m interp`, before its `main` can say it in one line
        _sys.exit(f"error: {_reason}")
    raise ImportError(_reason) from error
except KeyboardInterrupt:
    if _sys.argv[:1] == ["-m"]:
        _sys.exit(130)
    raise

from interp import edits, graph
from interp.causal import circuits
from interp.causal.attribution import attribution_patching
from interp.causal.comparison import compare
from interp.causal.edges import edge_attribution
from interp.causal.evaluation import Curve, auroc, completeness, curve, faithfulness, minimality
from interp.causal.integrated import integrated_gradients
from interp.causal.patching import activation_patching
from interp.causal.paths import edge_patching, path_patching
from interp.causal.top import top_attributions
from interp.causal.verified import verified_top
from interp.circuit import Circuit
from interp.masked import run_circuit
from interp.metrics import (
    Metric,
    accuracy,
    cross_entropy,
    kl_divergence,
    log_prob,
    logit_diff,
    rank,
)
from interp.pairs import Pairs
from interp.protocol import LanguageModel, run_with_cache
from interp.reading.heads import induction_scores, previous_token_scores, repeated_tokens
from interp.reading.lens import LogitLens, logit_lens
from interp.result import Result
from interp.spectral.subspaces import alignment, drift, principal_angles, subspace_angles
from interp.spectral.svd import (
    SVD,
    condition_number,
    effective_rank,
    randomized_svd,
    spectra,
    spectral_gap,
    stable_rank,
    svd,
)
from interp.spectral.targets import ResidualStream, SVDTargets, residual_stream, svd_targets, wvwo
from interp.sweep import sweep

__all__ = [
    "SVD",
    "Circuit",
    "Curve",
    "LanguageModel",
    "LogitLens",
    "Metric",
    "Pairs",
    "ResidualStream",
    "Result",
    "SVDTargets",
    "accuracy",
    "activation_patching",
    "alignment",
    "attribution_patching",
    "auroc",
    "circuits",
    "compare",
    "completeness",
    "condition_number",
    "cross_entropy",
    "curve",
    "drift",
    "edge_attribution",
    "edge_patching",
    "edits",
    "effective_rank",
    "faithfulness",
    "graph",
    "induction_scores",
    "integrated_gradients",
    "kl_divergence",
    "log_prob",
    "logit_diff",
    "logit_lens",
    "minimality",
    "path_patching",
    "previous_token_scores",
    "principal_angles",
    "randomized_svd",
    "rank",
    "repeated_tokens",
    "residual_stream",
    "run_circuit",
    "run_with_cache",
    "spectra",
    "spectral_gap",
    "stable_rank",
    "subspace_angles",
    "svd",
    "svd_targets",
    "sweep",
    "top_attributions",
    "verified_top",
    "wvwo",
]
