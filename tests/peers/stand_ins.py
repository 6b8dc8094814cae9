"""Modules under another library's names, so that its tests import Logitless and none of its kernels."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def package(name: str, folder: Path | None = None) -> ModuleType:
    """Makes the package ``name`` without running its ``__init__``; its modules come from ``folder``, if given."""
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(package(parent), child, module)
    if folder is not None:
        if not folder.is_dir():
            raise SystemExit(f"--repository: expected a checkout with the folder {folder}")
        module.__path__ = [str(folder)]
    return module


def stand_in(name: str, **attributes: Any) -> ModuleType:
    """Makes the package ``name`` with these attributes."""
    module = package(name)
    vars(module).update(attributes)
    return module


def original(name: str, folder: Path) -> ModuleType:
    """Loads the library's module ``name`` from ``folder`` without the ``__init__`` of its packages."""
    parent = name.rpartition(".")[0]
    package(parent, folder)
    return importlib.import_module(name)


def definitions(file: Path, *names: str, **namespace: Any) -> dict[str, Any]:
    """Runs functions, classes and constants of a library's file alone, over the names in ``namespace``."""
    if not file.is_file():
        raise SystemExit(f"--repository: expected a checkout with the file {file}")
    chosen = [node for node in ast.parse(file.read_text()).body if _defines(node) & set(names)]
    missing = set(names) - set().union(*map(_defines, chosen))
    if missing:
        raise SystemExit(f"{file} has no {', '.join(sorted(missing))}: another version than this tool knows")
    exec(compile(ast.Module(chosen, []), str(file), "exec"), namespace)
    return {name: namespace[name] for name in names}


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
