"""The one training loop: it knows an objective and its parameters, nothing of what they mean."""

from posthoc.training.checkpoint import Checkpoint
from posthoc.training.loop import train
from posthoc.training.options import History, Training
from posthoc.training.ranks import Ranks, slice_of
from posthoc.training.source import Block, Source, drawn_rows
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
