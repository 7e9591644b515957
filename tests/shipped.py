"""The bundled model, loaded once in each process, for tests that do not change it."""

from hooks.base import weights_hash
from models import load
from tests.hooks.registered import hooks_of


def state_of(model):
    """Return everything that a test could change in a model, as values that can be compared.

    These are weights, modes, attributes, hooks and the tokenizer.
    """
    weights = [(each.dtype, each.requires_grad, each.grad is None) for each in model.parameters()]
    modules = [(name, part.training, sorted(vars(part))) for name, part in model.named_modules()]
    return weights_hash(model, whole=True), weights, modules, hooks_of(model), id(model.tokenizer)


class Shared:
    """A model that is loaded at the first call. A test that changes it loads a model of its own."""

    def __init__(self, name):
        self.name = name
        self.model = None
        self.state = None
        self.is_used = False

    def __call__(self):
        if self.model is None:
            self.model = load(self.name)
            self.state = state_of(self.model)
        self.is_used = True
        return self.model

    def require_unchanged(self):
        """Fail if a test has changed the model since the last call of this method."""
        if self.is_used:
            assert state_of(self.model) == self.state, f"a test has changed the shared {self.name}"
        self.is_used = False


pydoc = Shared("pydoc-4l")
