"""What can go wrong, by class; the command line maps every class to exit code 2.

AprfmtError
├── FormatError(ValueError)        the bytes are not what the format says
│   ├── TruncatedError             declared more than the file holds
│   └── UnsupportedError           valid, but a version, encoding or flag we don't handle
├── CodecError(ValueError)         shape or companion tensors don't fit the codec
│   └── MissingPartError           a packed weight lacks tensors that its encoding needs
├── ArchError(ValueError)          unknown architecture, missing or misshapen tensors
├── ConversionError(ValueError)    the target cannot hold what was asked for, or a flag is missing
├── RemoteError(OSError)            an address does not answer, or not with what was asked for
├── OutputError(OSError)           an output exists, or cannot be written where it was asked for
├── UsageError(ValueError)         the request itself makes no sense (no such tensor pattern, say)
├── TensorNotFoundError(KeyError)  with its own __str__ (KeyError quotes its message)
└── BackendUnavailableError(ImportError)

Wording of every message: where - what was found - what was expected - what to do.
"""


class AprfmtError(Exception):
    """Base of every error this package raises on purpose.

    `kind` names the class in JSON output and is what `aprfmt explain` looks up.
    """

    @property
    def kind(self) -> str:
        """The class name without its suffix, in lower case: `format`, `truncated`, ..."""
        return type(self).__name__.removesuffix("Error").lower()


class FormatError(AprfmtError, ValueError):
    """The bytes are not what the format says."""


class TruncatedError(FormatError):
    """The file declares more bytes than it holds."""


class UnsupportedError(FormatError):
    """Valid, but a version, encoding or flag this package does not handle."""


class CodecError(AprfmtError, ValueError):
    """A shape, a byte count or a companion tensor does not fit the codec."""


class MissingPartError(CodecError):
    """A packed weight lacks tensors that its encoding needs.

    `parts` are their suffixes. `weight` is the name of the weight and `stored` the names of its
    tensors in the file, where they are known.
    """

    def __init__(
        self, text: str, parts: tuple[str, ...] = (), weight: str = "", stored: tuple[str, ...] = ()
    ) -> None:
        super().__init__(text)
        self.parts, self.weight, self.stored = parts, weight, stored

    @property
    def kind(self) -> str:
        """That of a CodecError: what differs is only how much is known."""
        return "codec"


class ArchError(AprfmtError, ValueError):
    """Unknown architecture, or tensors that do not fit the architecture."""


class ConversionError(AprfmtError, ValueError):
    """The target cannot hold what was asked for, or a lossy step lacks its flag."""


class RemoteError(AprfmtError, OSError):
    """An address cannot be reached, may not be read, or answers with other bytes than it should."""


class OutputError(AprfmtError, OSError):
    """The output exists, or cannot be written where it was asked for."""


class UsageError(AprfmtError, ValueError):
    """The request itself makes no sense."""


class TensorNotFoundError(AprfmtError, KeyError):
    """No tensor of that name; the message carries near names."""

    def __str__(self) -> str:
        """Return the message itself; KeyError would print its repr."""
        return str(self.args[0]) if self.args else ""


class BackendUnavailableError(AprfmtError, ImportError):
    """A backend, engine or extra is not installed or has no device."""
