"""The one table of checks: name, what a PASS proves, to which formats it applies, who runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.base.registry import load
from aprfmt.validation.report import Result

if TYPE_CHECKING:
    from aprfmt.validation.context import Context

_HERE = "aprfmt.validation."


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check; `formats` empty means every format, `run` is `module:function`."""

    name: str
    proves: str
    run: str
    formats: tuple[str, ...] = ()

    def load(self) -> "Callable[[Context], Result]":
        """Import and return the function."""
        function: Callable[[Context], Result] = load(_HERE + self.run)
        return function


CHECKS: tuple[CheckRow, ...] = (
    CheckRow("layout", "sizes, offsets and order are as the format's own writers make them; "
             "no overlap, no hole, nothing behind the data", "layout:layout"),
    CheckRow("checksum", "every byte is as it was written", "layout:checksum", ("apr",)),
    CheckRow("manifest", "every byte is as it was when the side manifest was written",
             "layout:side_manifest"),
    CheckRow("padding", "bytes that belong to nothing are zeros", "layout:padding",
             ("apr", "gguf")),
    CheckRow("alignment", "tensors begin at multiples of 64", "layout:alignment", ("apr",)),
    CheckRow("shards", "index, file names, counts and files of a set agree", "layout:shards"),
    CheckRow("names", "names of tensors and keys show as they are", "layout:names"),
    CheckRow("writer", "no trait of a writer whose files are known to be wrong", "writers:writer",
             ("apr", "gguf")),
    CheckRow("values", "no NaN and no infinity in any tensor", "values:values"),
    CheckRow("block_scales", "no scale of a block is NaN, infinite or impossible",
             "values:block_scales"),
    CheckRow("packed", "weights stored as several tensors are whole and decode", "values:packed"),
    CheckRow("architecture", "names and keys fit the architecture", "population:architecture"),
    CheckRow("completeness", "every tensor the configuration demands is there",
             "population:completeness"),
    CheckRow("shapes", "every tensor has the shape the configuration gives it",
             "population:shapes"),
    CheckRow("unexpected", "no tensor is of no role", "population:unexpected"),
    CheckRow("hyperparameters", "keys, configuration and tensors say the same",
             "population:hyperparameters"),
    CheckRow("role_bounds", "embeddings and norms have statistics of trained weights",
             "population:role_bounds"),
    CheckRow("tokenizer", "the vocabulary is whole and builds", "vocabulary:lists"),
    CheckRow("vocabulary_size", "every token has a row of the embedding", "vocabulary:size"),
    CheckRow("special_ids", "special ids are those of tokens", "vocabulary:ids"),
    CheckRow("merges", "every merge joins two tokens to a third", "vocabulary:merges"),
    CheckRow("chat_template", "the chat template only joins texts", "vocabulary:template"),
    CheckRow("file_type", "general.file_type is that of the weights", "claims:file_type",
             ("gguf",)),
    CheckRow("quantization", "config.json names a quantization exactly if weights are packed so",
             "claims:quantization"),
    CheckRow("dtype", "float weights have the dtype config.json names", "claims:dtype",
             ("safetensors",)),
    CheckRow("counts", "stated counts and shapes are those of the tensors", "claims:counts",
             ("apr",)),
)  # fmt: skip
