"""Files of `Outputs`: `.npz`, `.safetensors`, Parquet, CSV, and folders that are mapped instead of read."""

from posthoc.storage.opening import open_outputs, opened, read_identity
from posthoc.storage.saving import save_outputs
from posthoc.storage.writer import OutputsWriter

__all__ = ["OutputsWriter", "open_outputs", "opened", "read_identity", "save_outputs"]
