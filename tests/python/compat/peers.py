"""Signatures of other libraries, read from their source. Neither they nor their imports are imported.

An installed library is used if there is one. Otherwise the source is a wheel in the folder LOGITLESS_PEER_WHEELS, which
``pip download --no-deps --dest FOLDER PACKAGE==VERSION`` fills.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import zipfile
from pathlib import Path

import pytest


def source(path):
    """Returns a module's text by its path in site-packages, such as ``quack/linear_cross_entropy.py``."""
    wheels = os.environ.get("LOGITLESS_PEER_WHEELS")
    for wheel in sorted(Path(wheels).glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            if path in archive.namelist():
                return archive.read(path).decode()
    package = path.split("/")[0]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder).parent / path
        if file.exists():
            return file.read_text()
    pytest.skip(f"{package} is neither installed nor a wheel in LOGITLESS_PEER_WHEELS")


def definition(path, name):
    """Returns the last definition of ``function`` or ``Class.function``, because overloads come before it."""
    body, result = ast.parse(source(path)).body, None
    for part in name.split("."):
        named = [node for node in body if getattr(node, "name", None) == part]
        assert named, f"{path} has no {name}"
        result = named[-1]
        body = result.body
    return result


def parameters(path, name):
    """Returns names, kinds and defaults as text, without self and ctx. Constants of the module appear by value."""
    arguments = definition(path, name).args
    assigned = [node for node in ast.parse(source(path)).body if isinstance(node, ast.Assign)]
    constants = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in assigned}
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    entries = [(a.arg, "positional", _text(d)) for a, d in zip(positional, defaults, strict=True)]
    entries += [(a.arg, "keyword", _text(d)) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return [(a, kind, constants.get(d, d)) for a, kind, d in entries if a not in ("self", "ctx", "cls")]


def ours(function):
    return [
        (p.name, "keyword" if p.kind is p.KEYWORD_ONLY else "positional", _default(p.default))
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


def _text(node):
    return "-" if node is None else ast.unparse(node)


def _default(value):
    if value is inspect.Parameter.empty:
        return "-"
    return value.name if hasattr(value, "name") else repr(value)
