"""Tests over transformers, skipped without it; those of PEFT and accelerate are skipped without these."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    import transformers

    transformers.logging.set_verbosity_error()
except ImportError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def llama():
    from tiny import build

    return build(transformers.LlamaForCausalLM)
