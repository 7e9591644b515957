"""Analyses of what happens inside a model, through its hook points and `interp.protocol`.

The analyses are in `effects` (values are changed), `reading` (caches and weights are read), `spectral`
(singular values) and `tracing` (attribution graphs). They stand on `edits`, `runs` (sweeps, masked runs, gradients), the
`graph` of a model and `numbers`, and give tables of `results`, which `pictures` draws. `inputs` are what they are given:
texts, pairs of them, and positions; `metrics` say what is measured, and `protocol` what a model must have.
"""

import signal as _signal
import sys as _sys
from itertools import pairwise as _pairwise

# `python -m interp` imports this before its `main`. Until then Ctrl-C ends the process itself, because an
# exception inside an import would end in a traceback.
if (
    _sys.argv[:1] == ["-m"]
    and ("-m", "interp") in _pairwise(_sys.orig_argv)
    and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

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

from pathlib import Path as _Path

from hooks import __version__  # noqa: F401  # the version of all three packages
from hooks.base import missing_name as _missing_name
from interp import edits, features, graph, pictures, spectral, tracing
from interp.effects.acdc import acdc
from interp.effects.attribution import attribution_patching
from interp.effects.comparison import compare
from interp.effects.curves import curve
from interp.effects.edges import edge_attribution
from interp.effects.evaluation import auroc, completeness, faithfulness, minimality
from interp.effects.integrated_gradients import integrated_gradients
from interp.effects.nodes import node_effects
from interp.effects.patch_top_k import patch_top_k
from interp.effects.patching import activation_patching, sweep
from interp.effects.paths import edge_patching, path_patching
from interp.effects.top import top_attributions
from interp.features import evaluate_sae, load_sae, splice
from interp.graph import circuits
from interp.graph.circuit import Circuit
from interp.inputs.pairs import Pairs
from interp.measuring import Metric, measure
from interp.metrics import accuracy, cross_entropy, kl_divergence, log_prob, logit_diff, rank
from interp.protocol import LanguageModel, run_with_cache
from interp.reading.attending import why_attends
from interp.reading.decompose import apply_norm, decompose
from interp.reading.experts import expert_load
from interp.reading.heads import head_scores, repeated_tokens
from interp.reading.jacobian import JacobianLens, jacobian_lens
from interp.reading.lens import logit_lens
from interp.reading.logit_attribution import accumulated, direct_logit_attribution
from interp.reading.maxima import max_activating
from interp.reading.tuned import TunedLens, tuned_lens
from interp.results.result import Result
from interp.runs.masked import run_circuit
from interp.shadowed import warn_of_another_models as _warn_of_another_models
from interp.spectral.factored import FactoredMatrix
from interp.spectral.targets import residual_stream, spectra, svd_targets
from interp.spectral.weight_scores import composition_scores, copying_scores, positional_scores
from interp.spectral.weights import (
    full_circuits,
    ov_circuit,
    qk_circuit,
    singular_tokens,
    token_directions,
)
from interp.tracing import attribution_graph
from interp.transformer_lens import hooks_name

_warn_of_another_models(_Path(__file__).parent.parent)

__all__ = [
    "Circuit", "FactoredMatrix", "JacobianLens", "LanguageModel", "Metric", "Pairs", "Result",
    "TunedLens", "accumulated", "accuracy", "acdc", "activation_patching", "apply_norm",
    "attribution_graph", "attribution_patching", "auroc", "circuits", "compare", "completeness",
    "composition_scores", "copying_scores", "cross_entropy", "curve", "decompose",
    "direct_logit_attribution", "edge_attribution", "edge_patching", "edits", "evaluate_sae",
    "expert_load", "faithfulness", "features", "full_circuits", "graph", "head_scores",
    "hooks_name", "integrated_gradients", "jacobian_lens", "kl_divergence", "load_sae", "log_prob",
    "logit_diff", "logit_lens", "max_activating", "measure", "minimality", "node_effects",
    "ov_circuit", "patch_top_k", "path_patching", "pictures", "positional_scores", "qk_circuit",
    "rank", "repeated_tokens", "residual_stream", "run_circuit", "run_with_cache",
    "singular_tokens", "spectra", "spectral", "splice", "svd_targets", "sweep", "token_directions",
    "top_attributions", "tracing", "tuned_lens", "why_attends",
]  # fmt: skip

__getattr__ = _missing_name(__name__, __all__)
