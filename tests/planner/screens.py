"""Widths of screens, in pixels."""

WIDE, PHONE = 1280, 360
