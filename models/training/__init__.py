"""Training: `train` a model on a text, `evaluate` it on another."""

from models.training.config import TrainingConfig
from models.training.data import Batches, next_token_loss, sample_batch, split
from models.training.evaluation import Evaluation, evaluate
from models.training.loop import train
from models.training.run import TrainingResult

__all__ = [
    "Batches",
    "Evaluation",
    "TrainingConfig",
    "TrainingResult",
    "evaluate",
    "next_token_loss",
    "sample_batch",
    "split",
    "train",
]
