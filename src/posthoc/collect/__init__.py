"""From a network and data, or from files, to `Outputs`: what every method is fitted on."""

from posthoc.collect.files import open_outputs, opened, read_identity
from posthoc.collect.folder_writer import OutputsWriter
from posthoc.collect.saving import save_outputs

__all__ = ["OutputsWriter", "open_outputs", "opened", "read_identity", "save_outputs"]
