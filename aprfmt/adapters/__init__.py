"""LoRA adapters: read in four spellings, merged into a base, written in another spelling."""

from aprfmt.adapters.merge_answers import AdapterAnswer, answer_merge
from aprfmt.adapters.merge_command import MergeCommand, merge_command
from aprfmt.adapters.merging import convert_merged, has_packed_weight, merge_adapter
from aprfmt.adapters.pair_placement import LowRank, place_pairs
from aprfmt.adapters.writing import convert_adapter
from aprfmt.model.adapter_reading import Adapter, StoredPair, read_adapter

__all__ = [
    "Adapter",
    "AdapterAnswer",
    "LowRank",
    "MergeCommand",
    "StoredPair",
    "answer_merge",
    "convert_adapter",
    "convert_merged",
    "has_packed_weight",
    "merge_adapter",
    "merge_command",
    "place_pairs",
    "read_adapter",
]
