"""Causes that are first seen in stored tensors."""

from aprfmt.causes.row import Cause

STORED = (
    Cause(
        "dtype_mislabel", "tensor", "bug",
        "The same bytes under the label of another 16-bit type, such as BF16 weights tagged F16.",
        "Equal bytes and other encodings, or values that are finite and moderate but unrelated.",
        "Reading the bytes as the other type gives the other side's values, bit for bit.",
    ),
    Cause(
        "endianness", "tensor", "bug",
        "Values stored in the other byte order.",
        "Values of wild magnitude; the same multiset of bytes.",
        "Swapping the bytes of every value gives the other side's values, bit for bit.",
    ),
    Cause(
        "byte_offset", "tensor", "bug",
        "The data is read or was written some bytes too early or too late.",
        "Equal byte runs at another place of the tensor.",
        "Shifting by the printed number of bytes makes the overlapping bytes equal.",
    ),
    Cause(
        "bit_rot", "tensor", "bug",
        "Very few damaged bits in data that is otherwise equal to the byte.",
        "One or a few differing bytes; the other blocks and tensors are equal.",
        "Undoing the named bits makes the bytes equal.",
    ),
    Cause(
        "tensor_names", "tensor", "bug",
        "Tensors stand under other names than readers look for: a prefix, a component, numbers of "
        "layers, or the names of another container.",
        "Tensors that the configuration demands miss, and as many of no role are there.",
        "Under one rename every demanded tensor is there, of its shape.",
    ),
    Cause(
        "config_sizes", "config", "bug",
        "A key of the configuration says another size than the tensors have.",
        "Many tensors have other shapes than the configuration gives, or none can be read by it.",
        "With the one value that is solved from the tensors every shape is right.",
    ),
    Cause(
        "transpose", "tensor", "bug",
        "A matrix stored or read with rows and columns exchanged.",
        "Equal multiset of values; shapes exchanged, or a square matrix that differs off the "
        "diagonal.",
        "The transposed matrix equals the other side's.",
    ),
    Cause(
        "row_offset", "tensor", "bug",
        "Rows are stored some rows further down or up, as in an embedding read one token off.",
        "Every row equals a row of the other side at one constant distance.",
        "Moving the rows by the printed number makes them equal.",
    ),
    Cause(
        "head_order", "tensor", "bug",
        "Whole attention heads stand in another order.",
        "Equal multiset of blocks of head_dim rows.",
        "Putting the heads in the printed order makes the tensors equal.",
    ),
    Cause(
        "rope_pairing", "tensor", "bug",
        "Rope turns adjacent elements where the weights are laid out for split halves, or the "
        "other way round.",
        "q and k are equal before rope and differ after it; position 0 is equal and the rotated "
        "vectors have equal length. In tensors: rows permuted inside each head.",
        "Rope with the other pairing, or the rows permuted back, makes the difference vanish.",
    ),
    Cause(
        "swapped_tensors", "tensor", "bug",
        "Two tensors of one shape stand under each other's names, such as gate and up.",
        "A tensor equals a differently named one of the other side.",
        "Exchanging the names makes both equal.",
    ),
    Cause(
        "layer_order", "tensor", "bug",
        "Layers stand in another order, or each tensor of a layer belongs to another layer.",
        "Tensors of a layer equal those of another layer of the other side.",
        "Renumbering the layers makes them equal.",
    ),
    Cause(
        "expert_order", "tensor", "bug",
        "The experts of a layer stand in another order than their router's rows.",
        "Equal multiset of experts.",
        "Putting the experts in the printed order makes the stack equal.",
    ),
    Cause(
        "permuted_neurons", "tensor", "same",
        "An MLP's neurons stand in another order, in gate, up and down alike; the function is "
        "equal.",
        "Each of the layer's MLP tensors has its rows (down: its columns) in another order.",
        "One order makes all of them equal.",
    ),
    Cause(
        "permuted_heads", "tensor", "same",
        "Attention heads stand in another order, in all tensors of the layer alike and every "
        "query head with its key head; the function is equal.",
        "Blocks of head_dim rows of q, k or v and columns of the output product are in another "
        "order.",
        "One order of query heads and one of key heads make all of them equal.",
    ),
    Cause(
        "permuted_experts", "tensor", "same",
        "The experts of a layer stand in another order, their router's rows too; the function is "
        "equal.",
        "The router's rows and every stack of experts are in another order.",
        "One order makes all of them equal.",
    ),
    Cause(
        "extra_tensor", "tensor", "same",
        "One side stores a tensor that nothing of the architecture reads.",
        "A name on one side only that is no role; everything else is compared without it.",
        "The forward pass does not ask for it.",
    ),
    Cause(
        "stale_tensor", "tensor", "bug",
        "A tensor was left at other values: of an older checkpoint, of initialisation, or zero.",
        "One tensor differs everywhere and relates to no tensor of the other side.",
        "It is constant, or of the size and spread of the other side's and related to it in "
        "nothing; in a pass, the values solved for it make every later difference vanish. That "
        "the other side's tensor removes the difference is true of any damage.",
    ),
    Cause(
        "norm_offset", "tensor", "bug",
        "Norm weights with one added where they should not be, or without where they should "
        "(gemma stores w and multiplies by 1 + w; GGUF stores 1 + w).",
        "Norm weights or the norms' factors differ by a constant 1.",
        "Adding the printed offset makes them equal.",
    ),
    Cause(
        "scale", "tensor", "bug",
        "A tensor multiplied by a constant, or by one constant a row.",
        "The ratio of the values is constant; cosine is 1.",
        "Dividing by the printed factor makes them equal.",
    ),
)  # fmt: skip
