"""Token tables of two lengths, with a row for each token id, and the rows that both have.

A and B are the two files that are compared; a *side* is one of them, or its tensor.
"""

from typing import TYPE_CHECKING

import numpy as np

from aprfmt.errors import AprfmtError
from aprfmt.measure.row_reader import RowReader, SelectedRows
from aprfmt.tokenizer.hf_json import vocabulary_from_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.causes.tensor.context import PairContext
    from aprfmt.model import Model

TABLES = ("token_embd.weight", "output.weight", "output.bias")


def is_token_table(key: str, a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> bool:
    """Return whether a tensor of shapes `a` and `b` is a token table that is longer on one side."""
    if key not in TABLES or not a or not b or len(a) != len(b):
        return False
    return a[1:] == b[1:] and a[0] != b[0] and min(a[0], b[0]) > 0


def common_rows(key: str, a: RowReader, b: RowReader) -> tuple[RowReader, RowReader] | None:
    """Return both sides' common rows of a token table, the first ones, as two readers.

    None where the tensor `key` is no token table, or the two have one length or two widths.
    """
    if not is_token_table(key, a.shape, b.shape):
        return None
    both = np.arange(min(a.rows, b.rows))
    return SelectedRows(a, both), SelectedRows(b, both)


def extra_rows_text(
    context: "PairContext", first: RowReader, second: RowReader
) -> tuple[int, str, str] | None:
    """Return (number of rows that both tables have, words on the longer one's further rows, end).

    The end is the words' last clause: what these rows are for. None for tables of one length or of
    two widths, and where the shorter table lacks rows for ids of its own model's tokenizer: these
    were lost.
    """
    if first.columns != second.columns or first.rows == second.rows:
        return None
    few, label = min((first.rows, "B"), (second.rows, "A"))
    more = max(first.rows, second.rows) - few
    shorter = "a" if label == "B" else "b"
    own = vocabulary_size(context.models[shorter])
    longer = vocabulary_size(context.models[label.lower()])
    if (own or 0) > few:
        return None
    if own is None and longer is None and claims_more_rows(context.models[shorter]):
        return None
    if (longer or 0) > few:
        reached = f"for ids that {shorter.upper()}'s tokenizer does not have"
    elif own is None and longer is None:
        reached = "and neither side has a tokenizer that could reach them"
    else:
        reached = "which no id of a tokenizer reaches"
    says = f"{label} has {more} more rows after the {few} of {shorter.upper()}, {reached}"
    return few, says, reached


def rows_by_token(context: "PairContext", shorter: str, few: int) -> "NDArray[np.int64] | None":
    """Return the longer table's row of the token of each of the `few` rows, int [few].

    `shorter` is the side with fewer rows, "a" or "b". -1 for ids whose token the other side has
    not, or twice. None where a side has no list of tokens, or where no token has another id.
    """
    from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts

    sides = context.models[shorter], context.models["b" if shorter == "a" else "a"]
    try:
        own, other = (read_tokenizer_parts(side) for side in sides)
    except AprfmtError:
        return None
    if own is None or other is None:
        return None
    places: dict[str, int] = {}
    for i, text in enumerate(other.vocabulary.tokens):
        places[text] = -1 if text in places else i
    found = np.array([places.get(text, -1) for text in own.vocabulary.tokens[:few]], np.int64)
    found = np.concatenate([found, np.full(few - len(found), -1)])
    return found if np.any((found >= 0) & (found != np.arange(few))) else None


def is_longer_table(context: "PairContext", key: str, first: RowReader, second: RowReader) -> bool:
    """Return whether one token table is longer, and the shorter one has rows for all its ids."""
    table = is_token_table(key, first.shape, second.shape)
    return table and extra_rows_text(context, first, second) is not None


def claims_more_rows(model: "Model") -> bool:
    """Return whether a model's own key says more rows of its token table than it has.

    Only where no tokenizer says which rows are read does the key count: then rows were lost. With
    one, a table may be cut to the ids that exist.
    """
    table = model.find(TABLES[0])
    config = None if model.folder is None else model.folder.config
    if table is None or not config:
        return False
    said = [one.get("vocab_size") for one in (config, config.get("text_config")) if one]
    sizes = [size for size in said if isinstance(size, int)]
    return bool(sizes) and sizes[-1] > table.shape[0]


def vocabulary_size(model: "Model") -> int | None:
    """Return how many rows of a token table the ids of a model's tokenizer need.

    None if it has no tokenizer that can be read. Ids past the vocabulary that stand for images or
    sounds are not counted, since their rows come from an encoder.
    """
    cache = model.carried.cache
    if "table_ids" not in cache:
        cache["table_ids"] = {"count": _count_ids(model)}
    count: int | None = cache["table_ids"]["count"]
    return count


def _count_ids(model: "Model") -> int | None:
    """Return how many rows of a token table the ids of a model's tokenizer need, by parsing it.

    None if it has no tokenizer that can be read.
    """
    from aprfmt.tokenizer.identity import tokenizer_facts
    from aprfmt.tokenizer.quick_checks import PLACEHOLDER

    carried = model.carried
    try:
        size = tokenizer_facts(model).get("vocab_size")
        data = carried.parse_tokenizer_json()
        beyond = vocabulary_from_json(carried, data).rowless if data is not None else {}
    except AprfmtError:
        return None
    if not isinstance(size, int):
        return None
    return max([size, *(i + 1 for i, text in beyond.items() if not PLACEHOLDER.search(text))])
