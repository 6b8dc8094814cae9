"""The packages that building the site installs."""

import importlib.metadata as metadata
import re

import blocks
import pytest


def closure(names):
    """Returns names of packages, as installed here, with everything that they require."""
    packages = set()
    while names:
        name = names.pop()
        if name in packages:
            continue
        packages.add(name)
        for line in metadata.requires(name) or []:
            if "extra ==" not in line:
                try:
                    metadata.version(needed := re.match(r"[\w.-]+", line)[0].lower())
                except metadata.PackageNotFoundError:  # of another system or Python
                    continue
                names.append(needed)
    return packages


def test_the_site_needs_no_trainer():
    """Building reads files only, so none of its packages may bring PyTorch. Tests run the code on pages."""
    names = [line.partition("==")[0] for line in (blocks.ROOT / "docs" / "requirements.txt").read_text().split()]
    try:
        required = closure(names)
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"./scripts/site installs {missing}")
    assert not required & {"torch", "numpy", "transformers", "lightning", "pytorch-lightning"}


def test_the_page_names_the_releases_of_the_requirements():
    def releases(name):
        lines = (blocks.ROOT / "tests" / f"requirements{name}.txt").read_text().split()
        return dict(line.split("==") for line in lines if "==" in line)

    oldest, pinned, newest = releases("-oldest"), releases(""), releases("-newest")
    rows = [
        f"| {name} | {oldest.get(name, pinned.get(name, ''))} | {pinned.get(name, '')} | {newest[name]} |"
        for name in newest
    ]
    page = (blocks.ROOT / "docs" / "hugging_face.md").read_text()
    assert "\n".join(["| Package | Oldest | Pinned | Newest |", "|---|---|---|---|", *rows, ""]) in page


def test_hooks_before_a_commit_have_the_tests_versions():
    hooks = (blocks.ROOT / ".pre-commit-config.yaml").read_text()
    tests = (blocks.ROOT / "tests" / "requirements.txt").read_text().split()
    for name in ("ruff", "codespell"):
        pinned = next(line for line in tests if line.startswith(f"{name}=="))
        assert re.search(rf"/{name}(-pre-commit)?\n    rev: v{re.escape(pinned.partition('==')[2])}\n", hooks), pinned
