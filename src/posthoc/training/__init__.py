"""The training loop, which knows an objective and its parameters but not what they mean."""

from posthoc.training.checkpoint import Checkpoint
from posthoc.training.distributed import Ranks
from posthoc.training.loop import Block, History, Source, Training, single_thread, train

__all__ = ["Block", "Checkpoint", "History", "Ranks", "Source", "Training", "single_thread", "train"]
