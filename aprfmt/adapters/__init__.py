"""LoRA adapters: read in three spellings, merged into a base, written in another spelling."""

from aprfmt.adapters.answers import AdapterAnswer, answers
from aprfmt.adapters.merging import convert_merged, merged_model
from aprfmt.adapters.placing import LowRank, placed
from aprfmt.adapters.reading import Adapter, Stored, read_adapter
from aprfmt.adapters.writing import convert_adapter

__all__ = [
    "Adapter", "AdapterAnswer", "LowRank", "Stored", "answers", "convert_adapter", "convert_merged",
    "merged_model", "placed", "read_adapter",
]  # fmt: skip
