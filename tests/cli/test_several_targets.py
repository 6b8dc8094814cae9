"""`logitless loss` with targets [..., tokens, K] and a weight for each."""

import functools

import numpy as np
import oracle
import pytest
from oracle import D, K, N, V, assert_close, check_report, forward, random_head, several_targets, write_npy
from safetensors.numpy import load_file


@pytest.fixture
def problem(random):
    return random_head(random) | several_targets(random, weighted=True)


both = functools.partial(oracle.both, several=True)


def test_weights_move_with_the_shift(ok, tmp_path, problem):
    shaped = {name: x if name == "weight" else x.reshape(4, 15, -1) for name, x in problem.items()}
    files = write_npy(tmp_path, shaped)
    moved = {name: x.copy() for name, x in shaped.items()}
    moved["targets"] = np.full((4, 15, K), -100)
    moved["targets"][:, :-2] = shaped["targets"][:, 2:]
    moved["target_weight"][:, :-2] = shaped["target_weight"][:, 2:]
    flat = [moved["hidden"].reshape(N, D), moved["weight"]]
    flat += [moved[name].reshape(N, K) for name in ("targets", "target_weight")]
    exact, naive = both(*flat)
    for outputs in (["--per-token", "t.safetensors"], ["--gradients", "g.safetensors"]):
        check_report(ok("--json", "loss", *files, "--shift", 2, *outputs).json, exact, naive)
    tokens = load_file(tmp_path / "t.safetensors")
    assert (tokens["targets"] == moved["targets"]).all()
    assert tokens["target_log_probs"].shape == (4, 15, K) and tokens["nll"].shape == (4, 15)
    assert_close(load_file(tmp_path / "g.safetensors")["d_hidden"].reshape(N, D), exact["d_hidden"], naive["d_hidden"])
    # Flat tokens give the same result; a shift past the end leaves none.
    flat = write_npy(tmp_path, {**problem, "hidden": shaped["hidden"]})
    check_report(ok("--json", "loss", *flat, "--shift", 2).json, exact, naive)
    assert ok("--json", "loss", *flat, "--shift", 99).json["valid_tokens"] == 0


def test_one_of_several_is_one_target(ok, tmp_path, problem):
    problem["targets"] = np.arange(N) % V
    del problem["target_weight"]
    expected = forward(*problem.values())["loss"]
    files = write_npy(tmp_path, {**problem, "targets": problem["targets"][:, None]})
    report = ok("--json", "loss", *files).json
    assert report["loss"] == pytest.approx(expected, rel=1e-6) and report["targets_per_token"] == 1


def test_text_and_top_k(ok, tmp_path, problem):
    files = write_npy(tmp_path, problem)
    text = ok("loss", *files, "--top-k", 3, "--per-token", "t.safetensors").out
    assert "reduction: mean" in text and "accuracy" not in text
    assert load_file(tmp_path / "t.safetensors")["top_ids"].shape == (N, 3)


def test_refusals(refused, tmp_path, problem):
    def of(changes, *arguments, code=1, message):
        changed = {name: x for name, x in {**problem, **changes}.items() if x is not None}
        refused(code, message, "loss", *write_npy(tmp_path, changed), *arguments)

    several = f"with {K} targets a token"
    of({"class_weight": np.ones(V, np.float32)}, code=2, message="--class-weight: expected none with targets_per_row")
    sparsified = ["--gradients", "g.safetensors", "--gradient", "sparsified"]
    of({}, *sparsified, code=2, message=f"--gradient: expected exact {several}, got sparsified")
    of({}, "--is-top1", code=2, message=f"--is-top1: expected one target a token, got {K}")
    one = problem["targets"][:, 0]
    of(
        {"targets": one},
        code=2,
        message="--target-weight: expected targets of shape [..., tokens, K] with it, got [60]",
    )
    of({"target_weight": np.ones((N, K - 1))}, message=f"target_weight.npy: expected shape [{N}, {K}]")
    of({"target_weight": np.ones((N, K), np.int64)}, message="expected dtype F32, BF16, F16 or F64, got I64")
    of({"target_weight": np.full((N, K), np.nan)}, message="target_weight.npy: expected finite weights")
    many = {"targets": np.zeros((N, 65), int), "target_weight": None}
    of(many, message="expected 1 to 64 targets a token, got [60, 65]")
    of(
        {"targets": np.zeros((N, 0), int), "target_weight": None},
        message="expected 1 to 64 targets a token, got [60, 0]",
    )
    of({"targets": np.zeros((N + 1, K), int)}, message="targets.npy: expected shape [60] (as the leading dimensions")
    bad = problem["targets"].copy()
    bad[3, 2] = V
    of({"targets": bad}, message=f"expected targets in [0, {V}) or -100, got {V} at [3, 2]")


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [0, 3])
def test_on_a_device(cuda_device, ok, tmp_path, problem, top_k):
    """Copies between host and device change the result by roundings of a logit at most."""
    files = write_npy(tmp_path, problem)
    outputs = ["--top-k", top_k, "--per-token"]
    ok("loss", *files, *outputs, "host.safetensors")
    ok("loss", "--device", cuda_device, *files, *outputs, "device.safetensors")
    host, device = (load_file(tmp_path / f"{where}.safetensors") for where in ("host", "device"))
    assert set(host) == set(device)
    size = (np.abs(problem["hidden"]) @ np.abs(problem["weight"]).T).max()
    error = 2 * (2 * (D + 8) * 2.0**-24 * size + 2.0**-21)
    for name in ("target_log_probs", *(["top_log_probs"] if top_k > 0 else [])):
        assert np.abs(host[name] - device[name]).max() <= error
    weights = np.abs(problem["target_weight"]).sum(axis=1).max()
    assert np.abs(host["nll"] - device["nll"]).max() <= error * weights
