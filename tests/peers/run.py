"""Runs another library's own tests of its fused head on the CPU, through logitless.compat.

    python tests/peers/run.py LIBRARY --repository FOLDER [arguments of pytest]

FOLDER is a checkout of the library's repository. This tool does not fetch it, so no other test runs it. The library
itself, Triton and a GPU are not needed. The tests get Logitless where they import the fused head, their references come
out of the checkout, and the device "cuda" is the CPU. docs/pytorch.md has the results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import libraries
import pytest
from on_cpu import cuda_on_cpu


@dataclass(frozen=True)
class Library:
    """A library's tests and how to run them.

    Attributes:
        files: its test files.
        prepare: puts Logitless under its names, given the repository.
        left_out: functions of these files that are not run, and why.
        compile: whether ``torch.compile`` compiles.
        conftest: whether its conftest.py is used.
    """

    files: tuple[str, ...]
    prepare: Callable[[Path], None]
    left_out: dict[str, str] = field(default_factory=dict)
    compile: bool = False
    conftest: bool = False


LIBRARIES = {
    "cut_cross_entropy": Library(
        (
            "tests/test_cce_loss_forward.py",
            "tests/test_cce_loss_backward.py",
            "tests/test_cce_lse.py",
            "tests/test_compute_z_loss.py",
        ),
        libraries.prepare_cut_cross_entropy,
    ),
    "liger_kernel": Library(
        ("test/transformers/test_fused_linear_cross_entropy.py",), libraries.prepare_liger_kernel, conftest=True
    ),
    "fla": Library(
        ("tests/modules/test_cross_entropy.py", "tests/modules/test_l2warp.py"),
        libraries.prepare_fla,
        {
            "test_fused_cross_entropy": "of another function, which takes logits",
            "test_fused_cross_entropy_softcap": "of another function, which takes logits",
            "test_l2_warp_grad_output_scaling": "of another function, which takes logits",
        },
    ),
    "quack": Library(("tests/test_linear_cross_entropy.py",), libraries.prepare_quack, compile=True),
    "verl": Library(
        ("tests/utils/test_linear_cross_entropy.py", str(Path(__file__).with_name("verl_cases.py"))),
        libraries.prepare_verl,
    ),
    "veomni": Library(
        ("tests/ops/test_chunk_topk_distill.py", "tests/ops/test_chunked_fused_linear_grad_gating.py"),
        libraries.prepare_veomni,
    ),
    "prime_rl": Library(("tests/unit/train/rl/test_fused_lm_head.py",), libraries.prepare_prime_rl),
}


class LeaveOut:
    """Deselects tests, and reports how many for which reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons
        self.counts: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, left_out = [], []
        for item in items:
            name = getattr(item, "originalname", item.name)
            reason = self.reasons.get(name)
            (kept if reason is None else left_out).append(item)
            if reason is not None:
                self.counts[f"{name}: {reason}"] += 1
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, count in self.counts.items():
            terminalreporter.line(f"left out: {count} of {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--repository", type=Path, required=True, help="a checkout of the library's repository")
    options, arguments = parser.parse_known_args()
    library, repository = LIBRARIES[options.library], options.repository.resolve()
    files = [str(repository / file) for file in library.files]
    if missing := [file for file in files if not Path(file).is_file()]:
        parser.error(f"--repository: expected a checkout of {options.library}'s repository, which has {missing[0]}")
    os.environ["LOGITLESS_PEER_REPOSITORY"] = str(repository)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(repository))
    library.prepare(repository)
    with cuda_on_cpu(library.compile):
        settings = ["-c", os.devnull, "--rootdir", str(repository), "-p", "no:cacheprovider", "-q"]
        settings += ["-W", "ignore", "--tb", "short", *([] if library.conftest else ["--noconftest"])]
        return pytest.main([*settings, *files, *arguments], plugins=[LeaveOut(library.left_out)])


if __name__ == "__main__":
    sys.exit(main())
