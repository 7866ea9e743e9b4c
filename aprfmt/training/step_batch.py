"""The batch of a training step, with the auxiliary losses that its model's configuration states."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.inference.batch import BALANCE, Batch, read_batch
from aprfmt.inference.gradients.documents import routers
from aprfmt.model import Model

RETURNED = "output_router_logits"  # a configuration with which transformers adds the routers' loss


def read_step_batch(path: Path, model: Model) -> Batch:
    """Return the batch of a training step, with the auxiliary losses of its model.

    What the file does not say of routers' load balancing is taken from the model's configuration:
    with `output_router_logits` transformers adds it to the loss, `router_aux_loss_coef` times.
    Raises FormatError for arrays that are no batch.
    """
    batch = read_batch(path, int(model.hyper["vocab_size"]))
    if batch.router_balance is not None or not has_routers(model):
        return batch
    config = model.config if isinstance(model.config, Mapping) else {}
    factor = config.get(BALANCE)
    if config.get(RETURNED) is not True or not isinstance(factor, int | float) or factor < 0:
        return batch
    return replace(batch, router_balance=float(factor), router_by_config=True)


def has_routers(model: Model) -> bool:
    """Return whether a layer of the model has a router.

    A configuration may count experts and make every layer dense.
    """
    return any(split_key(key)[1] == "ffn_gate_inp.weight" for key in model.roles)


def router_text(batch: Batch) -> str:
    """Return a note on the auxiliary losses in a batch's gradients; "" without any."""
    found = routers(batch)
    if not found.any:
        return ""
    words = {
        "load balancing": found.balance,
        "load balancing of each layer": found.by_layer,
        "the router's z-loss": found.z,
    }
    said = " and ".join(f"{value:.3g} times {word}" for word, value in words.items() if value)
    by = f"{RETURNED} of the configuration" if batch.router_by_config else "the batch"
    return f"the computed gradients have {said}, as {by} states"
