"""Words of `transformers` and TransformerLens, for errors to say what does the same here."""

from collections.abc import Collection

from hooks import UnknownNameError
from hooks.shared import register_hints, unknown_name

_MARKING = "models.attach(model) gives a model of transformers the names of points"
_ADDED = "HookedRunner(model).add({name: function})"
_ATTRIBUTES = {
    "run_with_cache": "HookedRunner(model).run_with_cache(tokens)",
    "run_with_hooks": "HookedRunner(model).run_with_hooks(tokens, hooks={name: function})",
    "hooks": "HookedRunner(model).hooks({name: function})",
    "add_hook": _ADDED,
    "add_perma_hook": _ADDED,
    "reset_hooks": "handle.remove(), where add gave the handle; runner.handles has all",
    "hook_dict": "HookedRunner(model).points",
    "cfg": "model.config",
    "to_str_tokens": "model.to_pieces(tokens)",
    "to_string": "model.to_text(tokens)",
    "to_single_token": "model.to_id(text)",
    "generate": "models.generate(model, prompts, max_new_tokens=9), or generate_text",
    "loss_fn": "models.next_token_loss(logits, tokens)",
    "fold_layer_norm": "models.fold_norms(model)",
    "center_writing_weights": "models.center(model)",
    "center_unembed": "models.center(model)",
    "process_weights_": "models.fold_norms(models.center(model))",
    "remove_batch_dim": "cache.at(batch=0)",
    "cache_dict": "dict(cache)",
    "stack_activation": "cache.stack(name)",
}
_ARGUMENTS = {
    "names_filter": "names=, with names, globs, or a predicate on a point",
    "fwd_hooks": "hooks={name: function}",
    "bwd_hooks": "backward={name: function}",
    "incl_bwd": "grads=True",
    "return_type": "nothing: the model returns logits, and interp.metrics takes a loss from them",
    "stop_at_layer": "capture(..., names='blocks.L.resid_pre'), which stops there",
    "start_at_layer": "starting_at_layer=",
    "pos_slice": "positions=",
    "remove_batch_dim": "nothing: index the cached values",
    "prepend_bos": "model.to_tokens(texts, bos=True or False)",
    "padding_side": "model.to_tokens(texts, side='left')",
    "loss_per_token": "nothing: models.next_token_loss(logits, tokens) gives each",
    "past_kv_cache": "kv_cache=",
    "reset_hooks_end": "nothing: hooks end with the call",
    "return_cache_object": "nothing: dict(cache) is a plain dict",
}


def _attached_first(name: str, known: Collection[str], what: str) -> UnknownNameError | None:
    """The error for a name of a block's point in a model whose points have other names."""
    if not name.startswith(("blocks.", "*.")) or any("blocks." in other for other in known):
        return None
    error = unknown_name(name, known, what)
    error.args = (f"{error.args[0]} ({_MARKING})",)
    return error


register_hints(
    _attached_first,
    arguments=_ARGUMENTS,
    attributes=_ATTRIBUTES,
    watchers=["transformers.utils.output_capturing"],
    marking=_MARKING,
)
