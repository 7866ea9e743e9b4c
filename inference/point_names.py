"""The names other engines have for a capture point, and the short form they are written in."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """One name another engine has for a point.

    transformers: `text` is a module's path below the layer (or the model); `#in` is what the
    module reads. `part` names the point's part if the module's result holds several side by side;
    `placement` is the block placement for which the name means this point, "" for all.
    llama.cpp: `text` is a graph node's name without its layer, `op` its operation; with `role` it
    is the node that reads this weight, whatever its name. If several nodes fit, the last one is
    used.
    """

    text: str
    part: str = ""
    placement: str = ""
    op: str = ""
    role: str = ""

    def __str__(self) -> str:
        """Return the name as the reference page prints it.

        Text, operation, weight, part and placement follow each other.
        """
        words = [self.text, self.op, f"of {self.role}" if self.role else ""]
        words += [f"({self.part})" if self.part else "", self.placement and f"[{self.placement}]"]
        return " ".join(word for word in words if word)


_MODULE = re.compile(r"([\w.#]*)(?:\[(\w+)\])?(?: (\S+))?")
_NODE = re.compile(r"(\w*) ?([A-Z_]*)(?::(\S+))?")


def transformers_names(*texts: str) -> tuple[Name, ...]:
    """Return the names that short texts stand for, in transformers.

    Examples: `self_attn.qkv_proj[q]`, `mlp.down_proj#in`, `post_attention_layernorm pre`.
    """
    found = [_MODULE.fullmatch(text) for text in texts]
    return tuple(Name(m[1], m[2] or "", m[3] or "") for m in found if m)


def llama_cpp_names(*texts: str) -> tuple[Name, ...]:
    """Return the names that short texts stand for, in llama.cpp.

    Examples: `kq_soft_max`, `Qcur ROPE`, ` MUL_MAT:attn_q.weight`.
    """
    found = [_NODE.fullmatch(text) for text in texts]
    return tuple(Name(m[1], op=m[2], role=m[3] or "") for m in found if m)
