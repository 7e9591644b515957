"""Hook points for models of `transformers`."""

from models.attached.attached import Attached, detach
from models.attached.attaching import attach

__all__ = ["Attached", "attach", "detach"]
