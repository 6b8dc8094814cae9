"""Every Python block of the documentation runs, the blocks of a page in sequence in one namespace."""

import os
import pathlib
import subprocess
import sys
from itertools import groupby

import blocks
import pytest

SCRIPT = """
import sys, stand_ins
where = stand_ins.of_page({page!r})
for line, text in {texts!r}:
    exec(compile("\\n" * line + text, {page!r}, "exec"), where)
"""
BY_PAGE = [(page, list(group)) for page, group in groupby(blocks.of("python"), key=lambda block: block.page)]


NEEDS = {"docs/jax.md": "jax"}
ELSEWHERE = {"docs/hub.md": "tests/install/test_hub.py"}  # which has the repository that the page loads


@pytest.mark.parametrize("page, page_blocks", BY_PAGE, ids=[str(page.relative_to(blocks.ROOT)) for page, _ in BY_PAGE])
def test_page(page, page_blocks, tmp_path):
    """Each page has its own process: patches of one are not seen by another."""
    name = page.relative_to(blocks.ROOT).as_posix()
    if name in ELSEWHERE:
        pytest.skip(f"runs in {ELSEWHERE[name]}")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = SCRIPT.format(page=name, texts=[(block.line, block.text) for block in page_blocks])
    path = os.pathsep.join([str(blocks.ROOT / "python"), str(pathlib.Path(__file__).parent)])
    environment = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readers_diff():
    """The added line gives the same loss as the removed line."""
    import stand_ins

    changes = blocks.of("diff")
    assert changes
    for block in changes:
        where = stand_ins.tensors()
        for sign in "-+":
            code = "\n".join(line[2:] for line in block.text.splitlines() if line[:1] in (sign, " "))
            exec("import logitless\n" + code, where)
            where["loss" + sign] = where["loss"]
        assert abs(where["loss-"].item() - where["loss+"].item()) < 1e-5, blocks.name(block)


def test_languages():
    for page in blocks.PAGES:
        for block in blocks.blocks(page):
            assert block.language in blocks.KNOWN, f"{blocks.name(block)}: {block.language or 'no language'}"
