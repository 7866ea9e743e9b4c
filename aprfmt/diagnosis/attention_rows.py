"""Finds, token by token, which rows attention read and which positions it used.

Attention is causal: the row of token t depends on tokens up to t alone. So the first row that
differs says what is wrong with its own key, value or position; with that put right the next row
that differs says the same of its token, and so on. It works from outputs of layers and logits too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.forward.attention import (
    forgotten_starts_change,
    hide_keys,
    mask_change,
    show_keys,
)
from aprfmt.causes.forward.kv_cache import BLOCKS as CACHE_BLOCKS
from aprfmt.causes.forward.kv_cache import cache_change
from aprfmt.causes.forward.mismatch import Change, Layers, Mismatch, computed_layer, spanned_layers
from aprfmt.causes.forward.residual_stream import token_ids_change
from aprfmt.causes.forward.rope import positions_change
from aprfmt.causes.forward.rotations import token_positions
from aprfmt.inference.layer_heads import kv_head_count

Array = NDArray[Any]
ZERO = -1  # a row that was never written
NEAR = 12  # earlier rows that are tried for a token
SMALL = 512  # ids of a vocabulary that are all tried for a token
EVERY = 64  # rows of a sequence that are all tried for a token
BLOCK = 16  # tokens of a cache's block, in a longer one
FAR = 40  # steps by which positions are tried to jump
WIDEST = 64  # tokens at the start that may all see each other
FEW_HEADS = 4  # key heads of which each alone is tried
AGREES = 2.0  # times the tolerance of a point, for one of its rows

# Returns the residual of every row of the point under a change; None if it cannot be run.
MeasureChange = Callable[[Change, Layers], Array | None]
Make = Callable[[Array], Change]
Tries = Callable[[int, int], Iterator[int]]  # of a token, and the step of the one before it


@dataclass(frozen=True)
class Solver:
    """How one quantity is solved for each token: candidates, and the change that values make.

    `make` builds the change from all tokens' values, `tries` yields a token's values. `right` are
    the right ones, `highest` is the largest there is (None: no bound). `single`: a token's value
    says nothing of the next one's.
    """

    right: Array
    make: Make
    highest: int | None
    tries: Tries
    single: bool = False


def row_solvers(case: Mismatch) -> Iterator[tuple[str, Solver]]:
    """Yield (operation, Solver) of each quantity that can be solved token by token.

    The quantities are the starts of passes whose mask forgot them, the rows read from the KV cache,
    positions and token ids. The operation must be one of those before the divergence.
    """
    n, alone = case.tokens, len(spanned_layers(case)) < 2
    own = np.arange(n)
    yield "probs", Solver(0 * own, forgotten_starts_change, None, _starts_to_try)
    parts = (("mix", True, True), ("scores", True, False), ("mix", False, True))
    for heads in _key_heads_to_try(case):
        for name, keys, values in parts if case.view.point == "attn" or not heads else parts[:1]:
            tried = _rows_to_try(n, alone and not heads)
            yield name, Solver(own, _cache_solver(keys, values, heads), n - 1, tried)
    where = token_positions(case.patched)
    yield (
        "rope",
        Solver(
            where, lambda at: positions_change(where, at), None, _positions_to_try(where, alone)
        ),
    )
    vocabulary = int(case.patched.hp["vocab_size"])
    if vocabulary <= SMALL:
        ids = np.asarray(case.patched.ids)
        yield (
            "embed",
            Solver(
                ids,
                lambda read: token_ids_change(ids, read),
                None,
                _ids_to_try(ids, vocabulary),
                True,
            ),
        )


def restart_solver(case: Mismatch) -> Solver | None:
    """Return the Solver of positions that are counted anew from some token, as behind a prefix.

    It tries the usual numbers only, so that it takes few passes. None where no position is read.
    """
    ops = {call.op for call in case.view.calls}
    learned = case.patched.spec.block.position == "learned"
    if "rope" not in ops and not (learned and "embed" in ops):
        return None
    where = token_positions(case.patched)
    return Solver(where, lambda at: positions_change(where, at), None, _restarts_to_try(where))


def _restarts_to_try(where: Array) -> Tries:
    """Return a function (token, shift) that yields numbers from which positions begin again.

    `where` are the right positions.
    """

    def tries(token: int, shift: int) -> Iterator[int]:
        """Yield numbers that a token's position may have, where the right one is another.

        First the same offset as the token's before, `shift`, and none. Then 0 and small numbers,
        the number of the token's block in a cache, one more, and a prefix that is counted twice.
        """
        own = int(where[token])
        blocks = (own // size for size in CACHE_BLOCKS)
        found = [own + shift, own] if shift else []
        found += [0, 1, 2, *blocks, own - 1, own + 1, 2 * own]
        yield from (p for p in dict.fromkeys(found) if p >= 0 and (shift or p != own))

    return tries


def _starts_to_try(token: int, shift: int) -> Iterator[int]:
    """Yield how many leading tokens a token's mask may have ignored: all before it, or none.

    Nothing for token 0. `shift` is not used: a pass that begins here ignored the same for each of
    its tokens.
    """
    yield from (token, 0) if token else ()


def _cache_solver(keys: bool, values: bool, heads: Sequence[int]) -> Make:
    """Return a function from cached row numbers to the change that attention reads these rows.

    It exchanges the rows of keys, of values, or of both, in the key heads `heads`, () for all.
    """
    return lambda rows: cache_change(rows if keys else None, rows if values else None, heads=heads)


def _key_heads_to_try(case: Mismatch) -> Iterator[tuple[int, ...]]:
    """Yield the key heads whose cached rows may be other ones, () for all of them.

    Attention's output shows which they are. After its product all are tried, then each alone where
    they are few, and no other layer is in question.
    """
    layer = computed_layer(case)
    count = kv_head_count(case.patched.hp, layer) if layer >= 0 else 0
    if case.view.point != "attn":
        yield ()
        few = 1 < count <= FEW_HEADS and len(spanned_layers(case)) < 2
        yield from ((head,) for head in range(count if few else 0))
        return
    mine, theirs = (np.asarray(x, np.float64) for x in case.recorded_rows)
    width = mine[0].size
    if not count or width % count:
        yield ()
        return
    mine, theirs = (x.reshape(len(x), count, -1) for x in (mine, theirs))
    apart = np.linalg.norm(mine - theirs, axis=(0, 2))
    sizes = np.maximum(np.linalg.norm(theirs, axis=(0, 2)), 1e-30)
    wrong = tuple(np.flatnonzero(apart > AGREES * case.view.tolerance * sizes).tolist())
    yield () if len(wrong) == count else wrong


def _rows_to_try(n: int, widely: bool = False) -> Tries:
    """Return a function (token, shift) that yields the cached rows that a token may have read.

    In order: at the same offset as the token before, a row never written, its neighbours, earlier
    rows, the first, the last; `widely`, then all others, or of a long sequence those whole blocks
    away. `n` is the number of tokens.
    """
    apart = 1 if n <= EVERY else BLOCK

    def tries(token: int, shift: int) -> Iterator[int]:
        """Yield the cached rows that attention may have read for a token, each once.

        `shift` is the offset of the row that the token before read; ZERO is a row never written.
        `widely`, a token's own row is one of them where the one before read another: a run ends.
        """
        found = [ZERO, token - 1, token + 1, *range(token - 2, max(-1, token - NEAR), -1), 0, n - 1]
        found += range(token % apart, n, apart) if widely else ()
        found = [token + shift, token, *found] if shift else found
        returns = bool(shift) and widely
        yield from (
            row for row in dict.fromkeys(found) if ZERO <= row < n and (returns or row != token)
        )

    return tries


def _ids_to_try(ids: Array, vocabulary: int) -> Tries:
    """Return a function (token, shift) that yields all ids of a small vocabulary.

    Those that `ids`, the recorded ones, have right after and before the token come first.
    """

    def tries(token: int, shift: int) -> Iterator[int]:
        """Yield the ids that the run may have read for a token, each once."""
        near = (int(ids[at]) for at in (token + 1, token - 1) if 0 <= at < len(ids))
        yield from dict.fromkeys([*near, *range(vocabulary)])

    return tries


def _positions_to_try(where: Array, widely: bool = False) -> Tries:
    """Return a function (token, shift) that yields positions that a token may have had.

    `where` are the right positions.
    """

    def tries(token: int, shift: int) -> Iterator[int]:
        """Yield the positions that rope may have used for a token, each once.

        `shift` is the offset of the position that the token before had. `widely`, a token's own
        position is one of them where the token before had another: a run ends.
        """
        own = int(where[token])
        returns = bool(shift) and widely
        found = [own + shift] if shift else []
        found += [own, 0, own - 1]
        for step in range(1, max(FAR, len(where)) + 1):
            found += [own + step, own - step]
        yield from (p for p in dict.fromkeys(found) if p >= 0 and (returns or p != own))

    return tries


def solve_rows(
    solver: Solver, measure: MeasureChange, layers: Layers, rows: Array, bound: float
) -> Change | None:
    """Return the change that makes every row agree, found token by token; None if there is none.

    `measure` returns the residual of each row under a change in `layers`. `rows` are the
    residuals without a change, `bound` is the largest residual of a row that agrees.
    """
    values, shift, change = solver.right, 0, None
    for _ in range(len(values) + 1):
        late = np.flatnonzero(rows > bound)
        if not len(late):
            return change
        token = int(late[0])
        for tried, step, reach in _candidate_values(solver, values, token, shift):
            seen = measure(solver.make(tried), layers)
            if seen is not None and not (seen[: token + reach] > bound).any():
                values, rows, shift, change = tried, seen, step, solver.make(tried)
                break
        else:
            return None
    return None


def _candidate_values(
    solver: Solver, values: Array, token: int, shift: int
) -> Iterator[tuple[Array, int, int]]:
    """Yield trial solutions for a token: (values of all tokens, offset, rows that must agree).

    A value is what the solver looks for: the row that attention read, or a position. It is tried
    for this token alone, which one row can show, and as an offset of this and all later tokens,
    which two rows have to show. `values` are those solved so far, `shift` is the offset of the
    token before.
    """
    own = solver.right
    for value in solver.tries(token, shift):
        if solver.single:
            alone = values.copy()
            alone[token] = value
            yield alone, 0, 1
            continue
        step = 0 if value == ZERO else value - int(own[token])
        if step or shift:
            moved = values.copy()
            moved[token:] = np.clip(own[token:] + step, 0, solver.highest)
            yield moved, step, 2
        alone = values.copy()
        alone[token] = value
        yield alone, step, 1


# --- masks ---------------------------------------------------------------------------------------


def solve_masks(late: Array, n: int) -> Iterator[Change]:
    """Yield changes of the mask that would make just the differing rows differ.

    `late` are the numbers of the differing rows, `n` is the number of tokens. What the layer's
    own mask hides stays hidden, keys outside its window too.
    """
    if not len(late):
        return
    first, last = int(late[0]), int(late[-1])
    at = np.arange(n)
    query, key = at[:, None], at[None]
    alone = last < n - 1 and len(late) == last + 1  # after a single layer later rows agree
    for size in (last + 2,) if alone else range(2, min(n, WIDEST)) if not first else ():
        says = f"the first {size} tokens all see each other"
        yield mask_change(says, show_keys((query < size) & (key < size)))
    for size in (last + 1,) if alone else range(2, min(n, WIDEST)) if not first else ():
        says = f"the first {size} tokens see all tokens"
        yield mask_change(says, show_keys((query < size) & (key < n)))
    if first and np.array_equal(late, np.arange(first, last + 1)):
        block = (query >= first) & (query <= last + 1)
        if last + 2 < n:
            says = f"tokens {first} to {last + 1} all see each other"
            yield mask_change(says, show_keys(block & (key >= first) & (key <= last + 1)))
        which = f"tokens {first} to {last}" if last + 2 < n else f"tokens from {first} on"
        seen = (query >= first) & ((query <= last) | (last + 2 >= n))
        yield mask_change(f"{which} see all tokens", show_keys(seen & (key < n)))
    if first > 1:
        yield mask_change(
            f"tokens from {first} on do not see those before",
            hide_keys((query < first) | (key >= first)),
        )
        yield mask_change(
            f"attention reaches back within chunks of {first} tokens only",
            hide_keys(query // first == key // first),
        )
    for hidden in range(1, min(first, 9)):  # evicted once later tokens came
        what = "key is" if hidden == 1 else f"{hidden} keys are"
        says = f"the first {what} gone from token {first} on"
        yield mask_change(says, hide_keys((key >= hidden) | (query < first)))
    for kept in range(1, min(first, 9)):  # a full cache that evicts after its first keys
        what = "first key and" if kept == 1 else f"first {kept} keys and"
        says = f"only the {what} the last {first - kept} are seen"
        yield mask_change(says, hide_keys((key < kept) | (key > query - first + kept)))
    for hidden in range(1, min(first, 9)):  # a cache that is taken for a shorter one
        what = "key" if hidden == 1 else f"{hidden} keys"
        says = f"tokens from {first} on do not see the last {what} before them"
        yield mask_change(
            says, hide_keys((key < first - hidden) | (key >= first) | (query < first))
        )
    for hidden in range(1, min(first + 1, 9)):
        what = "token is" if hidden == 1 else f"{hidden} tokens are"
        says = f"the first {what} hidden from later ones"
        yield mask_change(says, hide_keys((key >= hidden) | (query == key)))


STRIDES = range(2, 9)  # distances between the keys of a strided mask that are tried
SPARSE = 2  # keys at least that the last token sees in strides: one alone may be a first token


def solve_strided_masks(late: Array, n: int) -> Iterator[Change]:
    """Yield changes of the mask to sparse ones that see each key of a stride, and the last keys.

    Keys of a stride are those at distances divisible by it, or at positions divisible by it. How
    many last keys a token also sees follows from the first differing row. `late` are the numbers of
    the differing rows, `n` is the number of tokens.
    """
    if not len(late) or not late[0]:
        return
    first, at = int(late[0]), np.arange(n)
    query, key = at[:, None], at[None]
    for stride in STRIDES:
        ways = [("distances", first, (query - key) % stride == 0)]
        if first > 1:
            ways.append(("positions", first - 1, (key % stride == 0) | (query < 0)))
        for name, near, strided in ways:
            local = query - key < near
            causal = (strided | local) & (key <= query)
            if causal[first, : first + 1].all() or (strided & ~local)[-1].sum() < SPARSE:
                continue  # the first differing row would agree, or nothing shows the stride
            if name == "distances" and (near - 1) % stride == 0:
                near = max(1, near - 1)  # the furthest of the last keys is one of the stride
            what = "their own key" if near == 1 else f"the last {near} keys"
            says = f"tokens see {what}, and of earlier ones those at {name} divisible by {stride}"
            yield mask_change(says, hide_keys(strided | local))
