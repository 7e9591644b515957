"""Hooks that are registered on a model."""


def hooks_of(model):
    return [[*m._forward_hooks.items(), *m._forward_pre_hooks.items()] for m in model.modules()]
