"""Where the demonstration runs: --device, the same training on a GPU as on the CPU, and what it says at its end."""

import os
import pathlib
import re
import shlex

import pytest

SMALL = ["--vocab", "2000", "--dim", "48", "--inner", "40", "--batch", "4", "--sequence-length", "64",
         "--validation-batches", "1"]  # fmt: skip


@pytest.fixture
def train(run, ok, tmp_path):
    """train(*arguments) -> Result of a small run that must succeed."""
    if run("train", "--help").code != 0:
        pytest.skip("this build has no train command")
    words = ["red", "green", "blue", "seven", "eleven", "north", "south", "early", "late"]
    lines = [f"{words[k % 9]} {words[k * k % 7]} {k} is a number, {k * k} its square.\n" for k in range(9000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    return lambda *arguments: ok("-q", *arguments, "text.txt", *SMALL)


def test_devices_that_cannot_be_are_refused(run, refused):
    if run("train", "--help").code != 0:
        pytest.skip("this build has no train command")
    refused(2, "--device: expected auto, cpu, cuda or cuda:N, got 'gpu'", "train", "--device", "gpu")
    refused(2, "--device: expected cpu or cuda:N, got 'cuda:x'", "train", "--device", "cuda:x")
    refused(2, "--device: expected cpu with --backend cpu, got 'cuda'", "--backend", "cpu", "train", "--device", "cuda")
    refused(2, "--device: expected cuda:N with --backend cuda, got 'cpu'",
            "--backend", "cuda", "train", "--device", "cpu")  # fmt: skip
    refused(1, "--device: expected a usable CUDA device, got cuda:4096", "train", "--device", "cuda:4096")


def test_a_run_ends_with_commands_to_try_next(train, run, binary):
    result = train("train", "--device", "cpu", "--steps", "2", "--compare-steps", "1", "-o", "it's mine")
    _, _, rest = result.out.partition("What to try next:\n")
    commands = [shlex.split(line) for line in rest.splitlines() if line.startswith("    ")]
    assert 2 <= len(commands) <= 4
    assert all(command[0] == binary for command in commands)
    told = re.search(r"validation text in the checkpoint, which was ([\d.]+) here", rest)
    loss = run("--json", *commands[0][1:])
    assert loss.code == 0, loss.err
    assert loss.json["loss"] == pytest.approx(float(told[1]), abs=1e-5)
    for command in commands[1:]:
        assert run(command[1], "--help").code == 0
        assert command[1] != "train" or "-o" in command  # what was written above stays


def test_without_a_usable_gpu_auto_is_the_cpu_and_says_why(train, ok):
    if any(device["usable"] for device in ok("--json", "info").json["cuda_devices"]):
        pytest.skip("there is a usable GPU")
    result = train("train", "--steps", "1", "--compare-steps", "0")
    assert result.out.startswith("device      this machine's processors (no GPU: ")


@pytest.fixture
def onednn_or_plain_loops(run, binary, monkeypatch):
    """The processors multiply matrices: where oneDNN is not installed, by the stand-in that tests/gpu builds."""
    refusal = run("train", "--device", "cpu", "--steps", "1", "--budget", "1")
    if "oneDNN" not in refusal.err:
        return
    folder = pathlib.Path(binary).resolve().parents[1] / "tests" / "gpu" / "plain_dnnl"
    if not (folder / "libdnnl.so.3").exists():
        pytest.skip(f"neither oneDNN nor {folder} is here")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}")


@pytest.mark.gpu
@pytest.mark.usefixtures("onednn_or_plain_loops")
def test_a_gpu_trains_the_model_that_the_cpu_trains(train, cuda_device):
    steps = ["train", "--steps", "4", "--compare-steps", "4", "--device"]
    on_cpu, on_gpu = (train("--json", *steps, device).json for device in ("cpu", "auto"))
    assert on_cpu["device"] == "this machine's processors"
    assert cuda_device in on_gpu["device"]
    assert on_gpu["agreement"]["holds"]  # of the two heads there
    tolerances = on_cpu["agreement"]["loss_tolerance"]
    for head in ("materialized", "fused"):
        # Rounding of the head, as the agreement of two heads bounds it with sums of 2,000 terms, and as much for the
        # layers below it, whose sums are of at most 256.
        for got, expected, tolerance in zip(on_gpu[head]["loss"], on_cpu[head]["loss"], tolerances, strict=True):
            assert abs(got - expected) <= 2 * tolerance
        assert on_gpu[head]["loss"][-1] < on_gpu[head]["loss"][0]


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_that_of_the_gpu(train, cuda_device):
    steps = ["train", "--steps", "2", "--compare-steps", "2", "--budget", "1MiB", "--device", cuda_device]
    figures = train("--json", *steps).json
    tokens, vocabulary = 4 * 64, figures["text"]["vocabulary"]
    assert figures["peak_bytes_are_of"] == "GPU: peak allocated" and figures["peak_bytes_are_separate"]
    assert figures["materialized"]["workspace_bytes"] == tokens * (4 * vocabulary + 8)
    assert 0 < figures["fused"]["workspace_bytes"] <= 1 << 20
    for head in ("materialized", "fused"):
        parameters = 4 * 4 * figures["model"]["parameters"]  # values, gradients and two moments
        assert figures[head]["peak_bytes"] >= figures[head]["workspace_bytes"] + parameters
    more = figures["materialized"]["peak_bytes"] - figures["fused"]["peak_bytes"]
    workspaces = figures["materialized"]["workspace_bytes"] - figures["fused"]["workspace_bytes"]
    assert abs(more - workspaces) <= 64  # the fused head's scalars, in both runs or in one
