"""The one training loop: it knows an objective and its parameters, nothing of what they mean."""

from posthoc.training.batches import Block, Source, drawn_rows
from posthoc.training.checkpoint import Checkpoint
from posthoc.training.distributed import Ranks, slice_of
from posthoc.training.loop import train
from posthoc.training.options import History, Training
from posthoc.training.threads import few_threads, side_by_side

__all__ = [
    "Block",
    "Checkpoint",
    "History",
    "Ranks",
    "Source",
    "Training",
    "drawn_rows",
    "few_threads",
    "side_by_side",
    "slice_of",
    "train",
]
