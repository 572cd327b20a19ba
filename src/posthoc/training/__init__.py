"""The training loop, which knows an objective and its parameters but not what they mean."""

from posthoc.training.batches import Block, Source, drawn_rows
from posthoc.training.checkpoint import Checkpoint
from posthoc.training.distributed import Ranks, slice_of
from posthoc.training.loop import train
from posthoc.training.options import History, Training
from posthoc.training.parallel import run_parallel, single_thread

__all__ = [
    "Block",
    "Checkpoint",
    "History",
    "Ranks",
    "Source",
    "Training",
    "drawn_rows",
    "run_parallel",
    "single_thread",
    "slice_of",
    "train",
]
