"""scripts/release in a small repository, and the files of this one that name the version."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = {
    "include/logitless/logitless.h": "".join(
        f"#define LOGITLESS_VERSION_{part} {number}\n" for part, number in (("MAJOR", 1), ("MINOR", 2), ("PATCH", 3))
    ),
    "CITATION.cff": "version: 1.2.3\n",
    "packaging/conda/recipe.yaml": "context:\n  version: 1.2.3\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3, 2030-01-31\n\nNew.\n\n- A thing.\n\n## 1.2.2, 2030-01-01\n\nOld.\n",
}


def git(folder, *arguments):
    name = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for variable in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{variable}_NAME", "A")
        monkeypatch.setenv(f"{variable}_EMAIL", "a@example.org")
    folder = tmp_path / "clone"
    git(tmp_path, "init", "-q", "--bare", "remote")
    git(tmp_path, "clone", "-q", "remote", "clone")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "release", folder / "scripts")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    return folder


def release(folder, *arguments):
    script = folder / "scripts" / "release"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def tags(folder):
    return git(folder.parent / "remote", "tag").split()


def test_one_command_pushes_the_tag(clone):
    done = release(clone)
    assert done.returncode == 0, done.stderr
    assert tags(clone) == ["v1.2.3"]


def test_notes_are_the_section_of_the_version(clone):
    assert release(clone, "notes").stdout == "New.\n\n- A thing.\n"


@pytest.mark.parametrize(
    "name, old, new, expected",
    [
        ("CITATION.cff", "1.2.3", "1.2.2", "CITATION.cff: expected version 1.2.3, got 1.2.2"),
        ("packaging/conda/recipe.yaml", "1.2.3", "1.0.0", "recipe.yaml: expected version 1.2.3, got 1.0.0"),
        ("CHANGELOG.md", ", 2030-01-31", ", not released yet", "with the day of the release, got not released yet"),
        ("CHANGELOG.md", "## 1.2.3", "## 1.2.4", "expected a section 1.2.3 with the day of the release, got None"),
    ],
)
def test_files_that_are_not_ready_are_named(clone, name, old, new, expected):
    (clone / name).write_text(FILES[name].replace(old, new))
    git(clone, "commit", "-qam", "change")
    done = release(clone)
    assert done.returncode != 0 and expected in done.stderr, done.stderr
    assert tags(clone) == []


def test_changes_are_refused(clone):
    (clone / "new").write_text("")
    done = release(clone)
    assert done.returncode != 0 and "expected a tree without changes" in done.stderr
    assert tags(clone) == []


def test_another_tag_is_refused(clone):
    assert release(clone, "check", "v1.2.3").returncode == 0
    assert "tag: expected version 1.2.3, got 1.2.4" in release(clone, "check", "v1.2.4").stderr


def test_versions_of_this_repository_agree():
    # Only the day may be missing.
    assert all("not released yet" in line for line in release(ROOT, "check").stderr.splitlines())


def test_conda_recipe_renders_with_and_without_cuda():
    rattler_build = pytest.importorskip("rattler_build")
    recipe = rattler_build.Stage0Recipe.from_file(str(ROOT / "packaging/conda/recipe.yaml"))
    common = {"c_compiler": ["gcc"], "cxx_compiler": ["gxx"], "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]}
    for cuda in ({}, {"cuda_compiler": ["cuda-nvcc"], "cuda_compiler_version": ["13.0"]}):
        (variant,) = recipe.render(rattler_build.VariantConfig(common | cuda))
        packages = variant.recipe.to_dict()["requirements"]["host"]
        assert ("cuda-version 13.0.*" in packages) == bool(cuda)
