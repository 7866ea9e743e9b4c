"""LoRA adapters: read in four spellings, merged into a base, written in another spelling."""

from aprfmt.adapters.answers import AdapterAnswer, answer_merge
from aprfmt.adapters.merging import convert_merged, has_packed_weight, merge_adapter
from aprfmt.adapters.placing import LowRank, place_pairs
from aprfmt.adapters.writing import convert_adapter
from aprfmt.model.adapter_reading import Adapter, StoredPair, read_adapter

__all__ = [
    "Adapter",
    "AdapterAnswer",
    "LowRank",
    "StoredPair",
    "answer_merge",
    "convert_adapter",
    "convert_merged",
    "has_packed_weight",
    "merge_adapter",
    "place_pairs",
    "read_adapter",
]
