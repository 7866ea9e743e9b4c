"""torch.save's containers (.pt, .pth, .bin, .ckpt), read without pickle; never written."""

from aprfmt.base.registry import LazyFunction
from aprfmt.formats import FormatSpec
from aprfmt.formats.pytorch.layout import recognise

FORMAT = FormatSpec(
    name="pytorch",
    extensions=(".pt", ".pth", ".bin", ".ckpt"),
    recognise=recognise,
    open_source=LazyFunction("aprfmt.formats.pytorch.reader:open_source"),
    open_sink=LazyFunction("aprfmt.formats.pytorch.reader:refuse_writing"),
    holds=lambda row: False,
    style="hf",
    header_fields=LazyFunction("aprfmt.formats.pytorch.fields:header_fields"),
    keys_like="safetensors",
    checksum=LazyFunction("aprfmt.formats.pytorch.reader:check_record_checksums"),
    writes=False,
)
