"""Prefill, steps and pieces give the same logits; in deterministic mode the same bits.

Seen red: a step's mask counted from 0, the cache not committed, a block placed from its first row
instead of its position, all keys summed at once, dynamic frequencies kept over a longer sequence,
the last row of layers that share keys at the first one's position.
"""

from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.errors import UsageError
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel
from tests.inference.moved_keys import hidden_blocks_move_no_bit
from tests.models import IDS, MAKERS, save_tiny

# More than one block of rows, and not a whole number of them.
LONG = [int(i) for i in np.random.default_rng(5).integers(0, 97, 150)]


def session_logits(session: Session, ids: list[int], cuts: list[int]) -> np.ndarray:
    """Run `ids` in pieces that end at `cuts`; return the logits of all tokens."""
    session.truncate()
    parts, start = [], 0
    for stop in [*cuts, len(ids)]:
        parts.append(session.extend(ids[start:stop], logits_rows="all"))
        start = stop
    return np.concatenate(parts)


def rounding_limit(session: Session, tokens: int) -> float:
    """Return how far apart two passes over `tokens` tokens may be, as a relative L2 distance.

    A delta net rounds its state once a token, by eps / 2 at most, and each of the two passes has
    roundings of its own: eps * tokens for each such layer. That is an estimate: decay makes old
    roundings smaller, the norm after the state makes those of a small row larger. So it was
    measured, with the tiny qwen3_next (three such layers), in the last row of 12 random texts of
    each length. A float32 pass is up to 1.3e-5 from the float64 pass at 29 tokens and 1.7e-5 at
    58. Two float32 passes are up to 5.7e-6 apart at 29 tokens (9.8e-6 for IDS) and 1.5e-5 at 58;
    the limits are 1.0e-5 and 2.1e-5. A state that lacks one token is 5e-2 apart or more.
    """
    if session.backend.dtype == "float64":
        return 1e-12
    mixed = session.hp.get("delta_layers")
    layers = sum(mixed) if isinstance(mixed, tuple) else 0
    return max(5e-6, float(np.finfo(session.backend.dtype).eps) * tokens * layers)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("run_", ["numpy:float64", "torch:float32"])
def test_steps_and_pieces_equal_the_prefill(name: str, run_: str) -> None:
    ids = list(IDS)
    with open_model(judged(name).folder) as model, Session.open(model, backend(run_)) as session:
        limit = rounding_limit(session, len(ids))
        whole = session.logits(ids)
        steps = session_logits(session, ids, list(range(11, len(ids))))
        pieces = session_logits(session, ids, [1, 2, 9, 20])
        # Of a last row alone, layers that share keys run no other row.
        alone = [session.prefill(ids[:9])[-1], session.extend(ids[9:])[-1]]
    assert rel(steps, whole) < limit
    assert rel(pieces, whole) < limit
    assert rel(np.stack(alone), whole[[8, -1]]) < limit


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"]
)
def test_a_state_that_lacks_one_token_is_far_beyond_the_rounding(name: str) -> None:
    """The limit of a delta net's float32 passes still separates a wrong state from rounding.

    Seen red: the state of all nine tokens left in its place.
    """
    ids = list(IDS)
    b = backend("torch:float32")
    with open_model(judged(name).folder) as model, Session.open(model, b) as session:
        limit = rounding_limit(session, len(ids))
        whole = session.logits(ids)[[8, -1]]
        session.prefill(ids[:8])
        assert session.cache is not None
        late = session.cache.states()
        first = session.prefill(ids[:9])[-1]
        session.cache.commit(0, late)
        wrong = np.stack([first, session.extend(ids[9:])[-1]])
    assert rel(wrong, whole) > 1000 * limit


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-long"])
def test_frequencies_that_change_with_the_length_rerun_the_sequence(name: str) -> None:
    ids = list(IDS)
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend("numpy:float64")) as session:
            for stop in (10, 16, 17, 29):
                session.prefill(ids[:9])
                for token in ids[9:stop]:
                    stepped = session.step(token)
                assert rel(stepped, session.logits(ids[:stop])[-1]) < 1e-12
                assert session.ids == ids[:stop]
                assert session.cache is not None and session.cache.length == stop


def test_layers_with_keys_and_a_state_say_how_much_fits() -> None:
    """A layer of falcon_h1 has both. Seen red: layers with a state were not asked for buffers."""
    with open_model(judged("falcon_h1").folder) as model:
        with Session.open(model, backend("numpy:float64")) as session:
            session.prefill(list(IDS))
            assert session.cache is not None
            assert session.cache.fits(1) and not session.cache.fits(10_000)


def test_a_session_can_go_back() -> None:
    ids = list(IDS)
    with open_model(judged("mistral").folder) as model:
        with Session.open(model, backend("numpy:float64")) as session:
            session.prefill(ids)
            session.truncate(12)
            again = session.extend(ids[12:])
            assert rel(again[-1], session.logits(ids)[-1]) < 1e-12
            assert session.cache is not None and session.cache.nbytes > 0
            with pytest.raises(UsageError, match="holds 29 positions"):
                session.cache.truncate(30)


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32", "torch:bfloat16"])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        "gpt2",
        "gpt_oss",
        "cohere",
        "deepseek_v3",
        "olmo2",
        "qwen2_moe",
        "qwen3_5",
        "lfm2",
        "llama4",
        "deepseek_v4",
    ],
)
def test_deterministic_bits_depend_on_nothing_else(name: str, run_: str) -> None:
    b = backend(run_, deterministic=True)
    ids = LONG[:60] if name == "gpt2" else LONG
    with open_model(judged(name).folder) as model, Session.open(model, b) as session:
        whole = session.logits(ids)
        prefix = session.logits(ids[: len(ids) - 13])
        pieces = session_logits(session, ids, [1, 30, 31, 40])
        first = session.prefill(ids[: len(ids) - 6], "all")
        steps = np.stack([session.step(token) for token in ids[len(ids) - 6 :]])
    np.testing.assert_array_equal(prefix, whole[: len(prefix)])
    np.testing.assert_array_equal(pieces, whole)
    np.testing.assert_array_equal(first, whole[: len(first)])
    np.testing.assert_array_equal(steps, whole[len(first) :])


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_K", "Q5_0", "NF4", "BF16"])
@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32"])
def test_deterministic_bits_of_encoded_weights(
    run_: str, encoding: str, demo_model: Path, tmp_path: Path
) -> None:
    """Steps multiply on the stored bytes otherwise, prefills on decoded ones."""
    target = tmp_path / "m.apr"
    aprfmt.convert(demo_model, target, encoding=encoding, verify=False)
    ids = [i * 7 % 1500 for i in LONG[:80]]
    with open_model(target) as model:
        with Session.open(model, backend(run_, deterministic=True)) as session:
            whole, prefix = session.logits(ids), session.logits(ids[:33])
            first = session.prefill(ids[:70], "all")
            steps = np.stack([session.step(token) for token in ids[70:]])
        with Session.open(model, backend("numpy:float64")) as session:
            assert rel(whole, session.logits(ids)) < 5e-6
    np.testing.assert_array_equal(prefix, whole[:33])
    np.testing.assert_array_equal(np.concatenate([first, steps]), whole)


@pytest.mark.parametrize("run_", ["numpy:float64", "torch:float64"])
@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "gemma2",
        "gpt2",
        "gpt_oss",
        "cohere",
        "deepseek_v3",
        "olmo2",
        "phi2",
        "qwen3_next",
        "lfm2_moe",
    ],
)
def test_deterministic_results_are_right(name: str, run_: str) -> None:
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend(run_, deterministic=True)) as session:
            assert rel(session.logits(IDS), judged(name).true_logits) < 1e-12


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_deterministic_trace_has_the_bits_of_the_plain_pass(name: str, run_: str) -> None:
    """Every point at once: whatever a pass fuses, skips or cuts, it does no more.

    Seen red: compressed keys that only the plain pass moves to a block of their own.
    """
    same_bits_traced(judged(name).folder, run_)


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32"])
@pytest.mark.parametrize("chunk", [9, 50])
def test_chunks_that_share_a_block_of_keys(chunk: int, run_: str, tmp_path: Path) -> None:
    """Seen red: each chunk's keys counted from its first one, but in a trace from the pass's."""
    save_tiny("llama4", tmp_path / "m", "float32", attention_chunk_size=chunk)
    same_bits_traced(tmp_path / "m", run_)


def same_bits_traced(folder: Path, run_: str) -> None:
    b = backend(run_, deterministic=True)
    with open_model(folder) as model, Session.open(model, b) as session:
        learned = model.spec.block.position == "learned"
        ids, kept = LONG[: 60 if learned else 100], KeptValues()
        plain = session.logits(ids)
        trace = session.trace(
            ids, tuple(session.points), keep=kept.keep, fetch=kept.fetch, logits_rows="all"
        )
    np.testing.assert_array_equal(trace.recorded_values("logits"), plain)


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32", "torch:bfloat16"])
def test_deterministic_sums_do_not_see_whole_blocks_of_hidden_keys(run_: str) -> None:
    hidden_blocks_move_no_bit(backend(run_, deterministic=True))
