"""Checks measures of the repository's structure that may only fall: check_structure.py ROOT

A larger number means one fact stated in one more place. When a number falls, lower its ceiling here.
"""

import importlib.machinery
import importlib.util
import pathlib
import sys

# Counts of files, without tests and pages, that name an option. Options whose names have other meanings are left out.
OPTION_FILES = {
    "z_loss": 8,
    "label_smoothing": 25,
    "softcap": 61,
    "bias_scale": 19,
    "temperature": 70,
    "token_weight": 26,
    "class_weight": 47,
    "num_items": 25,
    "ignore_index": 44,
    "targets_per_row": 29,
    "top_k": 45,
    "batch_invariant": 22,
    "allow_tf32": 14,
    "compute_dtype": 29,
    "max_workspace_bytes": 67,
}
# Measures of scripts/measure_structure; its option --places lists where they occur.
MEASURES = {
    "declarations of max_workspace_bytes in Python": 5,
    "copies of the preparation chain": 1,
    "circles of imports in Python": 0,
    "code that parses the library's messages": 0,
}


def measuring(root):
    """Loads scripts/measure_structure as a module; its name has no suffix."""
    path = str(pathlib.Path(root, "scripts", "measure_structure"))
    loader = importlib.machinery.SourceFileLoader("measure_structure", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("measure_structure", loader))
    sys.modules["measure_structure"] = module
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


def compare(numbers, ceilings):
    """Returns lines for the numbers above their ceilings, and for those below."""
    above = [
        f"{name}: expected at most {most}, got {numbers[name]}"
        for name, most in ceilings.items()
        if numbers[name] > most
    ]
    below = [
        f"{name}: {numbers[name]}, below its ceiling {most}" for name, most in ceilings.items() if numbers[name] < most
    ]
    return above, below


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    script = measuring(root)
    tree = script.Tree(root)
    options = {f"files that name {name}": most for name, most in OPTION_FILES.items()}
    numbers = {f"files that name {name}": len(tree.naming(name)) for name in OPTION_FILES}
    numbers |= {name: number for name, (number, _) in script.measures(tree).items()}
    above, below = compare(numbers, options | MEASURES)
    for line in (*above, *below):
        print(line)
    print(f"{len(options | MEASURES)} numbers, {len(above)} above their ceilings")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
