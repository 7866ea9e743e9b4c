"""torch on the CPU in float32, with encoded products by C kernels."""

from typing import Any

import torch

from aprfmt.inference.backends.base import Array
from aprfmt.inference.backends.torch_backend import TorchBackend
from aprfmt.inference.fast.encoded import EncodedProducts, kernels_apply
from aprfmt.inference.weights import Weight


def open_torch(
    device: str, dtype: str, *, deterministic: bool = False, **settings: Any
) -> TorchBackend:
    """Return the torch backend of a device: `cpu`, `cuda`, `cuda:N`, or `cuda:all`.

    Raises BackendUnavailableError for a device or dtype that is not there.
    """
    if device != "cpu":
        from aprfmt.inference.fast.torch_cuda import CudaBackend

        return CudaBackend(device, dtype, deterministic=deterministic, **settings)
    kind = NativeTorch if kernels_apply(dtype, deterministic) else TorchBackend
    return kind(device, dtype, deterministic=deterministic, **settings)


class NativeTorch(TorchBackend):
    """torch in float32 on the CPU that multiplies few rows with weights' encoded bytes."""

    def __init__(self, device: str, dtype: str, **settings: Any) -> None:
        """Open torch on the CPU with encoded products; `settings` go to TorchBackend."""
        super().__init__(device, dtype, **settings)
        self._encoded = EncodedProducts(torch.get_num_threads())

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, plus bias [out].

        The encoded bytes are multiplied where there is a kernel for them.
        """
        product = self._encoded.multiply(self.to_numpy(x), w)
        if product is None:
            return super().linear(x, w, bias)
        y = torch.from_numpy(product)
        return y if bias is None else y + bias
