"""Finds this tree's package if LOGITLESS_LIBRARY names the library."""

import harness  # noqa: F401
