"""Hyperparameter rules for the layers of an encoder and a decoder that share the layer number {L}.

A *stack* is the encoder's layers or the decoder's. `n_layers` counts the longer stack; each stack
has the first so many of these layers.
"""

from collections.abc import Mapping, Sequence

from aprfmt.arch import hyper_rules
from aprfmt.arch.spec import Facts, Found, HyperRule, Params, Read, Write
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value


def longest_stack_reader(*counts: Sequence[str]) -> Read:
    """Return the read function of `n_layers`: the layers of the longest stack.

    `counts` has, for each stack, the keys of its number of layers.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (layers of the longest stack: encoder or decoder, key).

        None if no stack has a key.
        """
        found = [count for keys in counts if (count := facts.first(*keys)) is not None]
        return max(((whole_number(*one, 1), one[1]) for one in found), default=None)

    return read


def stack_layers_rule(stack: str, counts: Mapping[str, str]) -> HyperRule:
    """Return the rule for which of the `n_layers` layers a stack has: the first so many.

    `counts` is {style: key of the stack's number of layers}.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: the stack has it, key); None without the stack's key.

        A stack, the encoder or the decoder, has the first so many of the model's layers.
        """
        found = facts.first(*counts.values())
        if found is None:
            return None
        return tuple(i < whole_number(*found) for i in range(hp["n_layers"])), found[1]

    return HyperRule(
        f"{stack}_layers",
        {style: (key,) for style, key in counts.items() if style != "hf"},
        default=hyper_rules.per_layer(True),
        read=dict.fromkeys(counts, read),
        write={style: _count_writer(key) for style, key in counts.items()},
    )


def _count_writer(key: str) -> Write:
    """Return the write function that stores under `key` how many layers a stack has."""

    def write(value: Value, hp: Params) -> Params:
        """Return {`key`: number of layers of a stack}.

        `value` has one boolean per layer: it is in the stack.
        """
        return {key: sum(value)}

    return write
