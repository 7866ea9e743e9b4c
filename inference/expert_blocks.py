"""The chosen experts of a layer computed at once, in blocks of rows of one expert each.

Three products for a layer instead of three for an expert, and nothing that depends on the choice
comes to the host: how many blocks there are follows from the numbers of tokens and of experts.
Numbers and their order of adding are those of moe.py's loop.
"""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.backends.hosted import ExpertBlocks
from aprfmt.inference.context import Context

MOST = 128  # rows of a block: more are padding where experts have few


def block_shape(tokens: int, used: int, experts: int) -> tuple[int, int]:
    """Return (number of blocks, rows of a block) that are enough however experts are chosen.

    A block has at least half of the rows that an expert gets on average, as a power of two up to
    MOST.
    """
    pairs, size = tokens * used, 1
    while size < MOST and 2 * experts * size < pairs:
        size *= 2
    return (pairs + min(experts, pairs) * (size - 1)) // size, size


def run_expert_blocks(c: Context, layer: int, x: Array, found: ExpertBlocks) -> Array:
    """Return the weighted sum of the experts' outputs [tokens, width] for x.

    `found` says which rows of x each expert multiplies. Weights multiply the experts' inputs or
    outputs, as the block spec says.
    """
    b, size = c.backend, found.size
    inputs, weights = b.take(x, found.rows), found.weights
    if c.block.expert_weights == "input":
        inputs = b.mul(inputs, b.column(weights))
    inputs = inputs.reshape(-1, size, inputs.shape[-1])
    plain = c.block.mlp == "plain"
    gate = None if plain else _block_product(c, layer, "ffn_gate_exps", inputs, found)
    up = _block_product(c, layer, "ffn_up_exps", inputs, found)
    del inputs
    gated = c.activate(up) if gate is None else c.gate(gate, up)
    del gate, up
    y = _block_product(c, layer, "ffn_down_exps", gated, found)
    applied = None if c.block.expert_weights == "input" else b.take(weights, found.places)
    return b.combine(y.reshape(-1, y.shape[-1]), found.places, applied)


def _block_product(c: Context, layer: int, role: str, inputs: Array, found: ExpertBlocks) -> Array:
    """Return [n, size, out]: each block of inputs times its expert's weight, plus its bias.

    `inputs` are [n, size, in], `found` has the expert of each block.
    """
    b = c.backend
    y = b.multiply_stack(inputs, c.weights.role(layer, f"{role}.weight"), found.experts)
    bias = c.weights.get_role(layer, f"{role}.bias")
    return y if bias is None else b.add(y, b.take(bias.array(b), found.experts)[:, None])
