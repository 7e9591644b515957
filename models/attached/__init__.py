"""Hook points for models of `transformers`."""

from models.attached.attached import Attached, attach

__all__ = ["Attached", "attach"]
