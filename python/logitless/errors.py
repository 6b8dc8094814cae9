"""The exceptions of logitless.

Bad arguments raise ``TypeError`` or ``ValueError``, plain ones or subclasses defined here, so callers that catch those
need not know this module.
"""

from __future__ import annotations


class LogitlessError(Exception):
    """Base of every error that the native library reports.

    Attributes:
        argument: The name of the argument. This one and the next two are ``""`` where only the message is known.
        expected: The expected value.
        got: The value that was passed.
        required_bytes: A budget, workspace or other size that works, if one was refused; else None.
        row: The index in ``targets`` of a target that is out of range; else None.
    """

    argument = expected = got = ""
    required_bytes: int | None = None
    row: int | None = None


class InvalidArgumentError(LogitlessError, ValueError):
    """An option or a shape is out of range; the message names argument, expected and got."""


class InvalidTargetError(LogitlessError, ValueError, IndexError):
    """A target is neither in ``[0, V)`` nor ``ignore_index``; the message has its place and value.

    It is also an ``IndexError``, which PyTorch raises.
    """


class BudgetTooSmallError(LogitlessError, ValueError):
    """No plan fits into ``max_workspace_bytes``; ``required_bytes`` is the smallest budget that works."""

    def __init__(self, message: str, required_bytes: int | None = None) -> None:
        super().__init__(message)
        self.required_bytes = required_bytes


class UnsupportedError(LogitlessError, NotImplementedError):
    """No backend of this machine can run the problem."""


class BackendUnavailableError(LogitlessError, RuntimeError):
    """The backend or engine chosen by name is not usable here."""


class OutOfMemoryError(LogitlessError, MemoryError):
    """The native library could not allocate memory."""


class InternalError(LogitlessError, RuntimeError):
    """A fault of the native library."""


class CommunicationError(LogitlessError, RuntimeError):
    """A collective of a group of ranks failed; the exception of the group's backend is its cause."""


class LibraryNotFoundError(LogitlessError, ImportError):
    """The native library was not found, or cannot be loaded."""
