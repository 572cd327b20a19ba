"""From a network and data, or from files, to `Outputs`: what every method is fitted on."""

from posthoc.collect.files import open_outputs, opened, read_identity, save_outputs
from posthoc.collect.folder import OutputsWriter

__all__ = ["OutputsWriter", "open_outputs", "opened", "read_identity", "save_outputs"]
