"""Two models that are one under another numbering of tokens: other ids, rows moved with them.

A tokenizer with other ids is a fault where the rows stayed, and rows in another order are one where
the ids stayed. Both by the same numbering change no text's computation.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from aprfmt.diagnosis.records import Evidence, Touched
from aprfmt.diagnosis.static_findings import Levels
from aprfmt.errors import AprfmtError
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import EQUAL
from aprfmt.model import Model
from aprfmt.tensors.view import View
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer, read_tokenizer_parts

NUMBERED = "token_numbering"  # the cause
TABLES = ("token_embd.weight", "output.weight")  # a row a token
# Causes that state ids: under another numbering they say one thing.
_OF_IDS = frozenset({"tokenizer_pieces", "added_tokens", "special_ids", "generation_config"})
_ID = "_token_id"
_ROWS = 4096  # read at once


def settle_numbering(a: Model, b: Model, found: Levels) -> None:
    """Replace findings on ids and table rows by one, where B is A with its tokens renumbered.

    All tokens must be the same by their texts, flags and roles, the tables' rows must be those of
    the same tokens, bit for bit, and every other tensor equal. Else `found` is left as it is.
    """
    causes = {one.cause for one in found.stated}
    if "tokenizer_pieces" not in causes or not causes <= _OF_IDS or found.report is None:
        return
    apart = {row.key for row in found.report.tensors if row.verdict not in EQUAL}
    if not apart or not apart <= {*TABLES} or found.report.hyperparameters:
        return
    if any(one.level != "tensor" or not {*one.keys} <= apart for one in found.findings):
        return
    try:
        order = _match_token_ids(a, b)
        if order is None or not all(_same_rows(a, b, key, order) for key in apart):
            return
    except AprfmtError:
        return
    moved = sum(i != j for i, j in enumerate(order))
    tables = ", ".join(sorted(apart))
    found.evidence += [Evidence("tensor", one.says, one.where) for one in found.findings]
    found.evidence += [Evidence("identity", one.says, one.where) for one in found.stated]
    found.findings.clear()
    found.parts.clear()
    found.stated.clear()
    says = f"{moved} of {len(order)} tokens have other ids, and their rows of {tables} stand there"
    finding = Finding(
        NUMBERED,
        f"{says}: texts are the same to both, ids of one side mean other tokens on the other",
        "identity",
        "same",
        tuple(sorted(apart)),
        True,
        residual_before=moved / len(order),
        residual_after=0.0,
        of="tokens whose row is not that of the same id; after: not that of the same text",
        counted=True,
        proof=unfitted_proof(len(order)),
    )
    found.add(finding, Touched())
    found.checked.append(
        "forward pass: not needed, all that it reads is equal by the tokens' texts"
    )
    found.ended, found.complete, found.remainder = True, True, 0.0


def _match_token_ids(a: Model, b: Model) -> Sequence[int] | None:
    """Return B's id of each id of A, by the tokens' texts; None where more than ids differs."""
    mine, theirs = read_tokenizer_parts(a), read_tokenizer_parts(b)
    if mine is None or theirs is None:
        return None
    ours, others = mine.vocabulary.tokens, theirs.vocabulary.tokens
    place = {text: i for i, text in enumerate(others)}
    if len(ours) != len(others) or len(place) != len(others) or {*ours} != {*place}:
        return None
    order = [place[text] for text in ours]
    same = _facts_by_text(mine, order) == _facts_by_text(theirs, range(len(order)))
    return order if same and _settings(a, order) == _settings(b, range(len(order))) else None


def _facts_by_text(side: StatedTokenizer, order: Sequence[int]) -> tuple[Any, ...]:
    """Return (flags by token text, {role: id}, stop ids, chat template) of a tokenizer.

    Each id i is given as order[i].
    """
    flags = {
        token["content"]: {key: value for key, value in token.items() if key != "id"}
        for token in side.added_tokens
    }
    roles = {role: order[i] for role, i in side.vocabulary.ids.items() if i < len(order)}
    stops = {order[i] for i in side.stop_ids if i < len(order)}
    return flags, roles, stops, side.template


def _settings(model: Model, order: Sequence[int]) -> Mapping[str, Any]:
    """Return the generation settings and config.json's ids by name, each id i as order[i]."""
    found = dict(model.carried.parse_file("generation_config.json") or {})
    own = {key: value for key, value in (model.config or {}).items() if key.endswith(_ID)}
    for key, value in [*found.items(), *((f"config.json: {key}", own[key]) for key in own)]:
        if not key.endswith(_ID):
            continue
        ids = value if isinstance(value, list) else [value]
        if all(isinstance(i, int) and 0 <= i < len(order) for i in ids):
            found[key] = sorted(order[i] for i in ids)
    return found


def _same_rows(a: Model, b: Model, key: str, order: Sequence[int]) -> bool:
    """Return whether each row of A's table `key` is B's row of the same token, order[i] for row i.

    Rows after the tokens are compared by number.
    """
    mine, theirs = a.roles.get(key), b.roles.get(key)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return False
    if mine.shape[0] < len(order):
        return False
    x, y = _row_digests(mine), _row_digests(theirs)
    return all(x[i] == y[order[i] if i < len(order) else i] for i in range(len(x)))


def _row_digests(table: View) -> list[bytes]:
    """Return, for each row of a table, a digest of its values."""
    found: list[bytes] = []
    for start in range(0, table.shape[0], _ROWS):
        rows = table.rows(start, min(start + _ROWS, table.shape[0]))
        found += [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
    return found
