"""Hypothesis that an engine makes one embedding of a text's rows by another pooling.

The last hidden states are the model's own, and the embedding is the mean of them, or one of them,
where 1_Pooling/config.json or `pooling_type` says another.
"""

from collections.abc import Iterator

from aprfmt.causes.forward.mismatch import Change, Hypothesis, Mismatch, hyper_change

KINDS = {
    "mean": "the mean of the last layer's rows",
    "cls": "the first row of the last layer",
    "last": "the last row of the last layer",
}


def find_pooling(case: Mismatch) -> Iterator[Change]:
    """Yield the changes of the pooling to each other kind, at the pooled embedding."""
    if case.view.point != "pooled" or case.tokens < 2:
        return
    own = str(case.patched.hp["pooling"])
    for kind, rows in KINDS.items():
        if kind != own:
            says = f"the embedding is {rows} ({kind}); the model says {own}"
            yield hyper_change("pooling", says, pooling=kind)


HYPOTHESES = (
    Hypothesis("pooling", find_pooling, 23, "rows of the stream, before any factor of them"),
)
