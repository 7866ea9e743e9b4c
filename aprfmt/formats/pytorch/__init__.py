"""torch.save's containers (.pt, .pth, .bin, .ckpt), read without pickle; never written."""

from aprfmt.base.registry import late
from aprfmt.formats import FormatSpec
from aprfmt.formats.pytorch.layout import recognise

FORMAT = FormatSpec(
    name="pytorch",
    extensions=(".pt", ".pth", ".bin", ".ckpt"),
    recognise=recognise,
    open_source=late("aprfmt.formats.pytorch.reader:open_source"),
    open_sink=late("aprfmt.formats.pytorch.reader:refuse_writing"),
    holds=lambda row: False,
    style="hf",
    header_fields=late("aprfmt.formats.pytorch.fields:header_fields"),
    keys_like="safetensors",
    checksum=late("aprfmt.formats.pytorch.reader:checksum"),
    writes=False,
)
