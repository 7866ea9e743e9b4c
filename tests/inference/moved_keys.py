"""Keys in other places of a pass, behind keys that every mask hides: the bits must not see it."""

import numpy as np

from aprfmt.inference.backends.base import Backend, Heads


def hidden_blocks_move_no_bit(b: Backend) -> None:
    """Check a deterministic backend's attention, fused and in steps, over keys in two runs.

    The second run begins at each of the first blocks of keys that is free, as compressed keys do
    behind more and more keys of tokens.
    """
    random = np.random.default_rng(7)
    first, second, tokens = 40, 30, 3
    q, near, far = (
        b.array(random.standard_normal((count, heads, 16)).astype(np.float32))
        for count, heads in ((tokens, 4), (first, 2), (second, 2))
    )
    shown = random.random((tokens, first + second)) < 0.7
    found = []
    for blocks in range(1, 6):
        gap = blocks * b.key_block - first
        keys = b.stack([near, b.zeros((gap, 2, 16)), far])
        mask = b.join_masks(shown[:, :first], shown[:, first:], gap)
        heads = Heads(mask, 0.25, None, None, "float32")
        stepped = b.mix(b.probs(b.scores(q, keys, heads), heads), keys)
        found += [b.to_numpy(x) for x in (b.attention(q, keys, keys, heads), stepped)]
    for values in found[1:]:
        np.testing.assert_array_equal(values, found[0])
