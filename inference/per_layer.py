"""Per-layer inputs: an embedding of which each layer gets a slice (gemma3n, gemma4).

Once a pass, the token's row of a wide table and a projection of its embedding are added; a layer
gates its slice by the stream, projects it and adds it to the stream. Sources: transformers'
modeling_gemma3n and modeling_gemma4.
"""

from aprfmt.inference.backends.base import Array
from aprfmt.inference.capture import WHOLE
from aprfmt.inference.context import Context


def layer_inputs(c: Context, x: Array) -> Array | None:
    """Return the per-layer embeddings of all layers [tokens, n_layers * per_layer_size].

    x [tokens, hidden] are the embedded tokens. None for a model that has no such embeddings.
    """
    b, size = c.backend, int(c.hp["per_layer_size"])
    if not size:
        return None
    table = c.weights["per_layer_token_embd.weight"]
    ids = c.facts.ids
    if table.n_rows < int(c.hp["vocab_size"]):  # tokens of images and sounds have no row
        ids = b.ids_with_rows(ids, table.n_rows)
    # Rows of the second embedding, and a projection of the first, of all layers at once.
    rows = b.scale(b.embed(table, ids), b.rounded(float(size) ** 0.5))
    rows = c.tap("per_layer_embd", WHOLE, rows)
    made = c.linear(None, "per_layer_model_proj", x)
    made = b.scale(made, _model_factor(c, float(c.hp["hidden_size"]) ** -0.5))
    normed = c.norm(None, "per_layer_proj_norm", made.reshape(len(x), -1, size))
    normed = c.tap("per_layer_proj", WHOLE, normed.reshape(len(x), -1))
    both = b.scale(b.add(normed, rows), _model_factor(c, 2.0**-0.5))
    return c.tap("per_layer", WHOLE, both)


def layer_input_contribution(c: Context, layer: int, x: Array, inputs: Array) -> Array:
    """Return what a layer adds to the stream x, gated from its slice of `inputs`.

    `inputs` is the result of `layer_inputs`.
    """
    b, size = c.backend, int(c.hp["per_layer_size"])
    mine = b.to_layer_device(
        layer, int(c.hp["n_layers"]), inputs[:, layer * size : (layer + 1) * size]
    )
    gate = c.tap("per_layer_gate", layer, c.linear(layer, "inp_gate", x))
    gated = c.tap("per_layer_mul", layer, b.mul(c.activate(gate), mine))
    out = c.tap("per_layer_out", layer, c.linear(layer, "proj", gated))
    return c.tap("per_layer_contrib", layer, c.norm(layer, "post_norm", out))


def _model_factor(c: Context, value: float) -> float:
    """Return a factor as the model stores it: rounded to the weights' dtype in gemma3n."""
    return c.backend.rounded(value) if c.block.streams == "altup" else value
