"""Training: `train` a model on one text and `evaluate` it on another.

Read `data` first: the settings, the batches and the loss. Then read `loop`, whose state and files
are in `run`.
"""

from models.training.data import (
    Batches,
    Evaluation,
    TrainingConfig,
    evaluate,
    next_token_loss,
    sample_batch,
    train_test_split,
)
from models.training.loop import TrainingResult, train

__all__ = [
    "Batches",
    "Evaluation",
    "TrainingConfig",
    "TrainingResult",
    "evaluate",
    "next_token_loss",
    "sample_batch",
    "train",
    "train_test_split",
]
