"""Finds this tree's package, where LOGITLESS_LIBRARY names the library."""

import harness  # noqa: F401
