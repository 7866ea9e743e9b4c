"""The one table of checks: name, what a PASS proves, the function, its formats and its needs.

`validate` runs the rows that need a file; the others are the gates of `qa`. Other packages add rows
through the entry points `aprfmt.checks` and cannot replace one of aprfmt's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from aprfmt.base.registry import Registry, load_attribute
from aprfmt.checks.records import Result
from aprfmt.errors import UsageError

Need = Literal["file", "source", "second_reader", "model", "session", "baseline"]


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check or gate: its name, what a PASS proves, its function and what it needs.

    `run` is "module:function" (".module:function" of this package). It takes a CheckContext, or for
    a gate of `qa` a ModelUnderTest, which is one. It returns a Result or raises NotRun. No
    `formats` are all formats.

    `needs` says what has to be there: "file", one that opens, damaged or not; "source", such a file
    and what it was made of; "second_reader", such a file and the wish to have it read by the
    format's official library too; "model", a whole model of a known architecture; "session", one
    that can run, and is not run where `tensor-contract` failed; "baseline", a baseline file and the
    answers before. `reads_all_bytes` marks the rows of a file that read every stored byte.
    """

    name: str
    proves: str
    run: str
    formats: tuple[str, ...] = ()
    needs: Need = "file"
    reads_all_bytes: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown `needs`."""
        if self.needs not in get_args(Need):
            raise UsageError(
                f"check {self.name!r}: needs {self.needs!r}; expected one of "
                f"{', '.join(get_args(Need))}"
            )

    @property
    def of_file(self) -> bool:
        """Whether this is a row of `validate`; the others are gates of `qa`."""
        return self.needs in ("file", "source", "second_reader")

    @property
    def own(self) -> bool:
        """Whether the row's function is in aprfmt, not in another package."""
        return self.run.startswith(".")

    def load(self) -> Callable[[Any], Result]:
        """Return the row's function, imported."""
        target = f"aprfmt.checks{self.run}" if self.run.startswith(".") else self.run
        function: Callable[[Any], Result] = load_attribute(target)
        return function


CONTRACT, BASELINE = "tensor-contract", "baseline"  # whose answers others build on
ACCOUNTED, SECOND_READER = "accounted", "second_reader"
CHECKS: tuple[CheckRow, ...] = (
    CheckRow(
        "layout",
        "sizes, offsets and order are as the format's own writers make them; "
        "no overlap, no hole, nothing after the data",
        ".file.layout:check_layout",
    ),
    CheckRow(
        "checksum",
        "every byte is as it was written",
        ".file.layout:check_checksum",
        ("apr", "pytorch"),
        reads_all_bytes=True,
    ),
    CheckRow(
        "imports",
        "loading the pickle imports only what stands for its values",
        ".file.layout:check_imports",
        ("pytorch",),
    ),
    CheckRow(
        "manifest",
        "every byte is as it was when the side manifest was written",
        ".file.layout:check_side_manifest",
        reads_all_bytes=True,
    ),
    CheckRow(
        "padding",
        "bytes that belong to nothing are zeros",
        ".file.layout:check_padding",
        ("apr", "gguf"),
    ),
    CheckRow(
        "alignment", "tensors begin at multiples of 64", ".file.layout:check_alignment", ("apr",)
    ),
    CheckRow(
        "shards",
        "index, file names and counts of a set agree, and no other weights lie next to it under "
        "the name that loaders take",
        ".file.layout:check_shards",
    ),
    CheckRow("names", "names of tensors and keys show as they are", ".file.layout:check_names"),
    CheckRow(
        "writer",
        "no trait of a writer whose files are known to be wrong",
        ".file.faulty_writers:check_writer",
        ("apr", "gguf"),
    ),
    CheckRow(
        "values",
        "no NaN and no infinity in any tensor",
        ".file.values:check_values",
        reads_all_bytes=True,
    ),
    CheckRow(
        "block_scales",
        "no scale of a block is NaN, infinite or impossible",
        ".file.values:check_block_scales",
        reads_all_bytes=True,
    ),
    CheckRow(
        "activation_scales",
        "of the weights packed alike all have a scale of activations, or none has",
        ".file.stated_facts:check_activation_scales",
    ),
    CheckRow(
        "joined_scales",
        "weights that engines join have one NVFP4 factor of the whole tensor",
        ".file.joined_scales:check_joined_scales",
    ),
    CheckRow(
        "packed",
        "weights stored as several tensors decode, and have the parts that the configuration "
        "promises",
        ".file.values:check_packed",
        reads_all_bytes=True,
    ),
    CheckRow(
        "architecture",
        "names and keys fit the architecture",
        ".file.architecture_checks:check_architecture",
    ),
    CheckRow(
        "completeness",
        "every tensor the configuration demands is there",
        ".file.architecture_checks:check_completeness",
    ),
    CheckRow(
        "shapes",
        "every tensor has the shape the configuration gives it",
        ".file.architecture_checks:check_shapes",
    ),
    CheckRow(
        "second_layouts",
        "parameters that are stored in two layouts have the same values in both",
        ".file.second_layouts:check_second_layouts",
        reads_all_bytes=True,
    ),
    CheckRow("unexpected", "no tensor is of no role", ".file.architecture_checks:check_unexpected"),
    CheckRow(
        "unread",
        "every file, index entry and key is one that a table lists",
        ".file.architecture_checks:check_unread",
    ),
    CheckRow(
        "code",
        "the Python code that configurations name is in the folder",
        ".file.stated_facts:check_code",
        ("safetensors", "pytorch"),
    ),
    CheckRow(
        "hyperparameters",
        "keys, configuration and tensors say the same",
        ".file.architecture_checks:check_hyperparameters",
    ),
    CheckRow(
        "role_bounds",
        "embeddings, norms and matrices have the size of trained weights",
        ".file.architecture_checks:check_role_bounds",
        reads_all_bytes=True,
    ),
    CheckRow(
        "filled",
        "no matrix is one value throughout",
        ".file.architecture_checks:check_filled",
        reads_all_bytes=True,
    ),
    CheckRow(
        "tokenizer",
        "the vocabulary is whole, of the kind that it is said to be, and builds",
        ".file.vocabulary:check_lists",
    ),
    CheckRow(
        "vocabulary_size", "every token has a row of the embedding", ".file.vocabulary:check_size"
    ),
    CheckRow(
        "special_ids",
        "special ids are stated, those of tokens that are not named as another role's, and none "
        "contradicts the end of a turn that the chat template writes",
        ".file.vocabulary:check_ids",
    ),
    CheckRow(
        "ranges",
        "settings of the generation, lengths and epsilons are ones that readers take",
        ".file.ranges:check_ranges",
    ),
    CheckRow(
        "token_types",
        "the marks that the chat template writes are split off a text whole",
        ".file.template_tokens:check_token_types",
    ),
    CheckRow(
        "token_rows",
        "the marks that the chat template writes have rows of their own: no zeros, not tiny next "
        "to other rows, not the mean of all",
        ".file.template_tokens:check_token_rows",
        reads_all_bytes=True,
    ),
    CheckRow(
        "merges",
        "every merge joins two tokens to a third, and merges make every piece",
        ".file.vocabulary:check_merges",
    ),
    CheckRow(
        "round_trip",
        "what is encoded decodes to the same text",
        ".file.vocabulary:check_round_trip",
    ),
    CheckRow(
        "chat_template",
        "the chat template only joins texts, and writes no token the vocabulary lacks",
        ".file.vocabulary:check_template",
    ),
    CheckRow(
        "file_type",
        "general.file_type is that of the weights",
        ".file.stated_facts:check_file_type",
        ("gguf",),
    ),
    CheckRow(
        "quantization",
        "config.json names a quantization exactly if weights are packed so",
        ".file.stated_facts:check_quantization",
    ),
    CheckRow(
        "dtype",
        "float weights have the dtype config.json names",
        ".file.stated_facts:check_dtype",
        ("safetensors", "pytorch"),
    ),
    CheckRow(
        "counts",
        "stated counts and shapes are those of the tensors",
        ".file.stated_facts:check_counts",
        ("apr",),
    ),
    CheckRow(
        ACCOUNTED,
        "every tensor, scale, tied head and companion file of the source is here, "
        "transformed, or left out by a flag",
        ".file.source_accounting:check_accounted",
        needs="source",
    ),
    CheckRow(
        "source_settings",
        "hyperparameters, tokenizer, chat template and stops say what those of the source say",
        ".file.source_accounting:check_settings",
        needs="source",
    ),
    CheckRow(
        "source_values",
        "every tensor that the source has too holds its values, rounded at most as the coarser "
        "encoding rounds",
        ".source_values:check_source_values",
        needs="source",
        reads_all_bytes=True,
    ),
    CheckRow(
        SECOND_READER,
        "the format's official library reads the same names, types, shapes and bytes",
        ".file.second_reader:check_second_reader",
        ("gguf", "safetensors"),
        needs="second_reader",
        reads_all_bytes=True,
    ),
    CheckRow(
        CONTRACT,
        "every tensor the configuration demands is there, fits and can be decoded; none is unknown",
        ".gates.structure:check_tensor_contract",
        needs="model",
    ),
    CheckRow(
        "metadata",
        "hyperparameters, special ids and template can be a working model's and agree",
        ".gates.structure:check_metadata",
        needs="model",
    ),
    CheckRow(
        "second-reader",
        "the format's official library reads the same names, types, shapes and bytes",
        ".gates.structure:check_official_library",
        needs="model",
    ),
    CheckRow(
        "init-statistics",
        "weights are filled and of the size their part has in working models",
        ".gates.weights:check_init_statistics",
        needs="model",
    ),
    CheckRow(
        "logits",
        "the forward pass gives finite, spread and peaked logits",
        ".gates.forward:check_logits",
        needs="session",
    ),
    CheckRow(
        "loss",
        "the loss in nats is neither worse than guessing nor too good, and is of the next token",
        ".gates.forward:check_loss",
        needs="session",
    ),
    CheckRow(
        "state-isolation",
        "no call changes the next one: the same question has the same bits as answer",
        ".gates.forward:check_state",
        needs="session",
    ),
    CheckRow(
        "format-parity",
        "the same weights give equal bytes, capture points and logits in every format",
        ".gates.parity:check_format_parity",
        needs="session",
    ),
    CheckRow(
        "device-parity",
        "every device asked for computes the same",
        ".gates.parity:check_device_parity",
        needs="session",
    ),
    CheckRow(
        "golden-output",
        "prompts get the answers they should, and no gibberish",
        ".gates.generation:check_golden_output",
        needs="session",
    ),
    CheckRow(
        BASELINE,
        "no gate and no number got worse than in a baseline file",
        ".gates.baseline:check_baseline",
        needs="baseline",
    ),
)

_OTHERS: Registry[CheckRow] = Registry("checks", {})


def file_checks(*, source: bool = False, second_reader: bool = False) -> tuple[CheckRow, ...]:
    """Return the rows of `validate`, those of other packages last.

    `source` includes those that need the model's source, `second_reader` those that run another
    library.
    """
    wanted = {"file": True, "source": source, "second_reader": second_reader}
    return tuple(row for row in _all_rows() if wanted.get(row.needs, False))


def gates() -> tuple[CheckRow, ...]:
    """Return the rows of `qa`, the one that compares with a baseline last."""
    found = [row for row in _all_rows() if not row.of_file]
    return tuple(sorted(found, key=lambda row: row.needs == "baseline"))


def _all_rows() -> tuple[CheckRow, ...]:
    """Return aprfmt's rows and then those of other packages.

    A row of another package is left out if aprfmt has one of the same name.
    """
    own = {row.name for row in CHECKS}
    return (*CHECKS, *(row for row in _OTHERS.values() if row.name not in own))
