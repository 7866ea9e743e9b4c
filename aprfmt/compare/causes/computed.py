"""Causes that are first seen in hyperparameters or in the forward pass."""

from aprfmt.compare.causes.row import Cause

COMPUTED = (
    Cause(
        "gqa_mapping", "forward", "bug",
        "Query heads read the wrong key and value heads, or rows were permuted with the wrong "
        "head count.",
        "q, k and v are equal; scores of some heads differ while others are equal.",
        "Attention with the named mapping of heads makes the difference vanish.",
    ),
    Cause(
        "missing_bias", "config", "bug",
        "A bias that one side adds is dropped on the other.",
        "The difference is the same vector in every row and equals the bias.",
        "Dropping (or adding) the bias makes the difference vanish.",
    ),
    Cause(
        "norm_eps", "config", "bug",
        "The norms use another epsilon.",
        "The ratio is constant along a row and largest for small rows, from the first norm on.",
        "Solving both sides' rows gives one epsilon; the norms with it are equal.",
    ),
    Cause(
        "tied_embedding", "config", "bug",
        "The head is the embedding on one side and a matrix of its own on the other.",
        "Everything up to the final norm is equal and the logits differ; or a head is stored on "
        "one side only and is no copy of the embedding.",
        "Multiplying with the other matrix makes the logits equal.",
    ),
    Cause(
        "rope_theta", "config", "bug",
        "Rope turns with another base frequency.",
        "q and k are equal before rope and differ after it, more with position, but not in the "
        "first pair; the lengths are equal.",
        "The angles of the rows give the base; rope with it is equal.",
    ),
    Cause(
        "rope_scaling", "config", "bug",
        "Rope scaling for long contexts is missing, or its factors are others.",
        "As rope_theta, but the angles follow no single base, or all shrink by one factor.",
        "The angles give the factor of every frequency; rope with the other rule is equal.",
    ),
    Cause(
        "rope_layers", "config", "bug",
        "Layers rotate that should not, do not where they should, or use the other kind of rope "
        "(local and global layers exchanged).",
        "Some layers are equal after rope and others not.",
        "Turning rope on, off or to the other kind in the named layers makes them equal.",
    ),
    Cause(
        "partial_rotary", "config", "bug",
        "Another number of elements of each head is rotated.",
        "Elements past some index are rotated on one side and equal to the input on the other.",
        "Rope over the printed number of elements is equal.",
    ),
    Cause(
        "positions", "forward", "bug",
        "Tokens have other positions: counted from another start, or not at all.",
        "Rope's angles, or the learned rows, belong to positions at a constant distance.",
        "The pass with the printed positions is equal.",
    ),
    Cause(
        "sliding_window", "config", "bug",
        "Attention reaches back further, or less far, than the layer's window.",
        "Early rows are equal, rows past the window differ.",
        "Attention with the printed window is equal.",
    ),
    Cause(
        "mask", "forward", "bug",
        "Attention is not causal, or masks what it should see.",
        "The last row is equal and the first differs most; probabilities past the diagonal are "
        "not zero.",
        "Attention with the other mask is equal.",
    ),
    Cause(
        "softcap", "config", "bug",
        "Attention scores or logits are not capped, or by another cap.",
        "The larger a score or logit, the more it differs; one is a function of the other.",
        "Capping with the printed cap makes them equal.",
    ),
    Cause(
        "attention_scale", "config", "bug",
        "Attention scores are multiplied by another factor.",
        "q and k are equal and all scores differ by one factor.",
        "Attention with the printed factor is equal.",
    ),
    Cause(
        "softmax_reduction", "forward", "bug",
        "The softmax does not sum over all its keys, as over tiles of 32 that were not combined.",
        "Scores are equal, rows of the probabilities do not sum to 1 or are right for short rows "
        "only.",
        "A softmax over tiles of the printed size is equal.",
    ),
    Cause(
        "activation", "config", "bug",
        "Another activation function: gelu with erf for tanh, silu for gelu, a clamp left out.",
        "The inputs of the activation are equal, its outputs are another function of them.",
        "The named function gives the other side's values.",
    ),
    Cause(
        "residual", "forward", "bug",
        "A sublayer's output is not added to the stream, or is added in another place.",
        "The stream is equal to what was added, or unchanged, or both sublayers read one input.",
        "The sum as named is equal.",
    ),
    Cause(
        "multiplier", "config", "bug",
        "A factor of the embedding, the residual or the logits is missing or another.",
        "All values of a point differ by one factor.",
        "Multiplying by the printed factor makes them equal.",
    ),
    Cause(
        "moe_routing", "config", "bug",
        "Experts are chosen or weighted by another rule: not renormalised, another gate function, "
        "number of experts, grouping or scale.",
        "Router logits are equal; chosen experts or their weights differ, by more than the "
        "margins allow.",
        "Routing by the named rule gives the other side's weights.",
    ),
    Cause(
        "kv_cache", "forward", "bug",
        "Keys or values read from the cache are not those of the tokens: stale, moved or cut.",
        "One pass over all tokens is equal, steps with a cache are not; attention's output "
        "belongs to other keys or values than the recorded ones.",
        "Attention over the keys of the named rows is equal.",
    ),
    Cause(
        "kv_sharing", "forward", "bug",
        "A layer without keys and values of its own uses those of another layer than the model "
        "says: the last one of its kind that has some.",
        "The layer's queries are equal, and what its attention gives is not.",
        "Attention over the named layer's keys and values is equal.",
    ),
    Cause(
        "per_layer_input", "forward", "bug",
        "The embedding that every layer has a part of is left out, not scaled, or another layer's "
        "part is taken.",
        "The stream differs behind a layer's MLP, which is equal.",
        "Passes with the named part of it left out or exchanged are equal.",
    ),
    Cause(
        "altup", "forward", "bug",
        "The copies of the stream are predicted, corrected or added in another way.",
        "The stream that a layer reads or leaves differs, and what it computes between is equal.",
        "Passes with the named step left out or changed are equal.",
    ),
    Cause(
        "convolution", "forward", "bug",
        "A short convolution has its taps at other positions or in another order, or one of the "
        "gates beside it is left out.",
        "What the layer mixes differs in every token, and its input product is equal.",
        "Convolving with the named taps, or without the named gate, is equal.",
    ),
    Cause(
        "conv_state", "forward", "bug",
        "A short convolution looks back on other rows than those of the tokens before: the state "
        "was not reset between sequences, or not carried from step to step.",
        "The first tokens of a sequence or of a step differ, or all that look back on others.",
        "Convolving behind the named rows is equal.",
    ),
)  # fmt: skip
