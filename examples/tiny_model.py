"""Shared parts of the examples: arguments, a random model for --tiny, and the cost of a step with each head.

The random language model has a byte tokenizer, and is saved like a model on a hub.
"""

import argparse
import ctypes
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

SPECIAL = ["<pad>", "<eos>"]


def parser(steps: int) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that these examples share."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name or folder of a model")
    options.add_argument("--steps", type=int, default=steps, help="steps of training")
    options.add_argument("--tiny", action="store_true", help="train a random model on the CPU")
    return options


def make_tokenizer() -> Any:
    """Makes a tokenizer with one token per byte, so that any text has tokens."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    symbols = SPECIAL + sorted(ByteLevel.alphabet())
    bytes_only = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def save(folder: str, vocab_size: int | None = None) -> str:
    """Saves the model and its tokenizer. Returns the folder, which serves as the model's name.

    The vocabulary is the tokenizer's by default. A larger one has entries that no text uses, and a head that costs
    as much as a real one's.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def step_of(trainer: Any) -> Callable[[], None]:
    """Returns a step of a Trainer on its next batch: forward and backward, without the optimizer."""
    model = trainer.model_wrapped.train()
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    def step() -> None:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, inputs)
        loss.mean().backward()

    return step


def compare(steps: dict[str, Callable[[], object]], device: str) -> str:
    """Measures steps, which run forward and backward, in the order given.

    Args:
        steps: What a step does, by name.
        device: "cuda", or "cpu" for anything else.

    Returns:
        A table of three lines: names, the median time of five steps, and the peak memory of a step. The peak is beyond
        what exists before the step, so it leaves out weights, gradients and optimizer state. On a GPU it is that of
        PyTorch's allocator. On the CPU it is that of the process's resident set, which varies by some MiB and is
        known on Linux only.
    """
    columns = [("one step, forward and backward", "time, ms", f"peak memory, MiB ({MEASURED[device == 'cuda']})")]
    for name, step in steps.items():
        step()  # compiles, plans, and makes the gradients
        times = [seconds(step, device) for _ in range(5)]
        peak = peak_bytes(step, device)
        columns.append((name, f"{1e3 * statistics.median(times):.1f}", "-" if peak is None else f"{peak / 2**20:.1f}"))
    return "\n".join(f"{line[0]:40}" + "".join(f"{cell:>16}" for cell in line[1:]) for line in zip(*columns))


MEASURED = {True: "PyTorch's allocator", False: "resident set"}


def seconds(step: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step: Callable[[], object], device: str) -> int | None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)  # returns memory that earlier steps freed
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    step()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
