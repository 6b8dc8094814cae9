"""Limits of time: python -m pytest bench/gpu/test_limits.py"""

from __future__ import annotations

import signal
import time

import pytest

from limits import StepTimeout, step_limit

OFF = (0.0, 0.0)  # of an interval timer


def test_a_limit_ends_what_it_holds_and_leaves_no_timer() -> None:
    with pytest.raises(StepTimeout, match="longer than 0.05 s"), step_limit(0.05):
        time.sleep(10)
    assert signal.getitimer(signal.ITIMER_REAL) == OFF
    with step_limit(10):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == OFF


def test_an_outer_limit_outlives_an_inner_one() -> None:
    with pytest.raises(StepTimeout, match="longer than 0.5 s"), step_limit(0.5):
        with step_limit(20):
            time.sleep(0.1)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.4
        time.sleep(10)
    assert signal.getitimer(signal.ITIMER_REAL) == OFF


def test_an_inner_limit_is_no_longer_than_the_outer_one() -> None:
    start, seen = time.monotonic(), []
    with pytest.raises(StepTimeout, match="longer than 0.2 s"), step_limit(0.2):
        try:
            with step_limit(20):
                time.sleep(10)
        except StepTimeout as error:  # as a benchmark does, which goes on with its next method
            seen.append(error)
        time.sleep(10)
    assert len(seen) == 1 and time.monotonic() - start < 5
    assert signal.getitimer(signal.ITIMER_REAL) == OFF


def test_an_inner_limit_ends_before_the_outer_one() -> None:
    with step_limit(20):
        with pytest.raises(StepTimeout, match="longer than 0.05 s"), step_limit(0.05):
            time.sleep(10)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 15
