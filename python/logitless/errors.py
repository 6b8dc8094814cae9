"""The exceptions of logitless. Bad arguments raise plain ``TypeError`` or ``ValueError`` as well, so callers that
catch those need not know this module."""

from __future__ import annotations


class LogitlessError(Exception):
    """Base of every error that the native library reports.

    Attributes:
        argument: which one it is about; ``""`` where the message is all that is known, as the next two.
        expected: what was expected of it.
        got: what was got.
        required_bytes: the smallest budget or workspace that works; None where none is too small.
        row: of a target that is out of range, its place in ``targets``; else None.
    """

    argument = expected = got = ""
    required_bytes: int | None = None
    row: int | None = None


class InvalidArgumentError(LogitlessError, ValueError):
    """An option or a shape is out of range; the message names argument, expected and got."""


class InvalidTargetError(LogitlessError, ValueError, IndexError):
    """A target is neither in ``[0, V)`` nor ``ignore_index``; the message has its place and value. It is an
    ``IndexError``, too, which PyTorch raises."""


class BudgetTooSmallError(LogitlessError, ValueError):
    """No plan fits into ``max_workspace_bytes``; ``required_bytes`` is the smallest budget that works."""

    def __init__(self, message: str, required_bytes: int | None = None) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes


class UnsupportedError(LogitlessError, NotImplementedError):
    """No backend of this machine can run the problem."""


class BackendUnavailableError(LogitlessError, RuntimeError):
    """A backend or instruction set asked for by name is not usable here."""


class OutOfMemoryError(LogitlessError, MemoryError):
    """The native library could not allocate memory."""


class InternalError(LogitlessError, RuntimeError):
    """A fault of the native library."""


class CommunicationError(LogitlessError, RuntimeError):
    """A collective of a group of ranks failed; what the group's backend raised is its cause."""


class LibraryNotFoundError(LogitlessError, ImportError):
    """The native library is not where it is looked for, or cannot be loaded."""
