"""Hook points for models of `transformers`."""

from models.attached.attached import Attached, attach, detach

__all__ = ["Attached", "attach", "detach"]
