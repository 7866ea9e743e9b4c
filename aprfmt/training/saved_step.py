"""Saves one step of a training run in torch, for `aprfmt step` to check.

saved = SavedStep(model, "step")
loss = model(**batch).loss
loss.backward()
saved.before()
optimizer.step()
saved.after()
"""

from functools import partial
from pathlib import Path
from typing import Any


class SavedStep:
    """Saves one training step to a folder: call `before` ahead of the optimizer, then `after`.

    `folder` then has `batch.safetensors`, the inputs of the last forward pass before the step,
    `grads.safetensors`, the gradients by parameter, and the checkpoints `before/` and `after/`, as
    the model's own `save_pretrained` writes them; of a PEFT model these are adapters. Every array
    has the trainer's type. Only the first step is saved: further calls do nothing, so that a
    callback need not count steps.
    """

    def __init__(self, model: Any, folder: Path | str, points: bool = False) -> None:
        """Begin to watch a model, which is a torch module with `save_pretrained`.

        `points`: also save, as `points.safetensors`, the gradient of what each module reads (by
        its name with `#in`) and gives (by its name). These are as large as the activations.
        """
        self.model, self.folder = model, Path(folder)
        self.points: dict[str, Any] = {}
        self.saved = self.done = False
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hooks = [model.register_forward_pre_hook(self._keep_batch, with_kwargs=True)]
        for name, module in model.named_modules() if points else ():
            hook = partial(self._keep_point, name)
            self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def before(self) -> None:
        """Save the weights before the step and the gradients; call it after the backward pass.

        Under mixed precision call it after the scaler has unscaled the gradients.
        """
        if self.saved:
            return
        self.saved = True
        for hook in self.hooks:
            hook.remove()
        self.model.save_pretrained(self.folder / "before")
        named = self.model.named_parameters()
        self._save("grads", {name: p.grad for name, p in named if p.grad is not None})
        if self.points:
            self._save("points", self.points)
            self.points = {}

    def after(self) -> None:
        """Save the weights after the step; call it after the optimizer's step."""
        if self.saved and not self.done:
            self.done = True
            self.model.save_pretrained(self.folder / "after")

    def _keep_batch(self, model: Any, args: Any, given: dict[str, Any]) -> None:
        """Write the inputs of a forward pass to the batch's file, over those of the pass before."""
        arrays = {name: x for name, x in given.items() if hasattr(x, "detach") and x.ndim}
        if args and "input_ids" not in arrays:
            arrays["input_ids"] = args[0]
        # Copies, as labels may be the ids themselves.
        copies = {name: x.detach().to("cpu", copy=True) for name, x in arrays.items()}
        self._save("batch", copies)

    def _keep_point(self, name: str, module: Any, args: Any, given: Any, result: Any) -> None:
        """Register hooks that keep the gradients of a module's input and output."""
        read = args[0] if args else given.get("hidden_states")
        made = result[0] if isinstance(result, tuple) else result
        for key, x in ((f"{name}#in", read), (name, made)):
            if getattr(x, "requires_grad", False):
                x.register_hook(partial(self._keep_gradient, key))

    def _keep_gradient(self, key: str, gradient: Any) -> None:
        """Keep a copy of the gradient of a capture point under `key`."""
        self.points[key] = gradient.detach().to("cpu", copy=True)

    def _save(self, name: str, tensors: dict[str, Any]) -> None:
        """Write tensors to the file `name` in the step's folder, as safetensors."""
        from safetensors.torch import save_file

        held = {key: x.detach().cpu().contiguous() for key, x in tensors.items()}
        save_file(held, self.folder / f"{name}.safetensors")
