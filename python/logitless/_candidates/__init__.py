"""Operators behind ``logitless.linear_candidates`` (candidates.py).

operators.py  makes logits at lists of columns and their gradients, by the library's kernels
samplers.py   draws ids, and makes lists of targets and negatives
segments.py   adds up lists of rows, of one length or of several
"""
