"""The training loop, which knows an objective and its parameters but not what they mean."""

from posthoc.training.checkpoint import Checkpoint
from posthoc.training.distributed import Ranks
from posthoc.training.loop import Block, History, Source, Training, train
from posthoc.training.parallel import run_parallel, single_thread

__all__ = ["Block", "Checkpoint", "History", "Ranks", "Source", "Training", "run_parallel", "single_thread", "train"]
