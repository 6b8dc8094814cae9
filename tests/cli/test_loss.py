import numpy as np
import pytest
from oracle import D, N, V, assert_close, both, check_report, forward, random_head, several_targets, write_npy
from safetensors.numpy import load_file


@pytest.fixture
def problem(random):
    return random_head(random) | {"targets": random.integers(0, V, N)}


STATISTICS = ("lse", "entropy", "target_logit", "mean_logit", "log_sum_sq_probs", "max_logit")

OPTIONS = {
    "plain": ({}, []),
    "softcap": ({"softcap": 3.0}, ["--softcap", 3]),
    "scale": ({"scale": 0.5}, ["--scale", 0.5]),
    "temperature": ({"temperature": 0.4, "softcap": 3.0}, ["--temperature", 0.4, "--softcap", 3]),
    "smoothing": ({"label_smoothing": 0.1}, ["--label-smoothing", 0.1]),
    "z-loss": ({"z_loss": 0.01}, ["--z-loss", 0.01]),
    "all": (
        {"softcap": 4.0, "scale": 1.5, "label_smoothing": 0.2, "z_loss": 0.001},
        ["--softcap", 4, "--scale", 1.5, "--label-smoothing", 0.2, "--z-loss", 0.001],
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "operands", ["none", "bias", "weights", "several", "several, weighted", "several, all weighted"]
)
def test_against_float64(ok, tmp_path, problem, random, name, operands):
    options, arguments = OPTIONS[name]
    arrays, extra = dict(problem), {}
    several = operands.startswith("several")
    if several:
        arrays |= several_targets(random, weighted="weighted" in operands)
    if operands == "several, all weighted":
        extra["token_weight"] = random.uniform(0, 2, N).astype(np.float32)
    if operands == "bias":
        extra["bias"] = random.standard_normal(V).astype(np.float32)
    if operands == "weights":
        extra["class_weight"] = random.uniform(0.5, 2, V).astype(np.float32)
        extra["token_weight"] = random.uniform(0, 2, N).astype(np.float32)
        if name == "plain":
            extra["token_temperature"] = random.uniform(0.1, 4, N).astype(np.float32)
        arrays["targets"] = np.where(random.random(N) < 0.2, -100, arrays["targets"])
    files = write_npy(tmp_path, {**arrays, **extra})
    rows = {"temperature": extra.pop("token_temperature")} if "token_temperature" in extra else {}
    exact, naive = both(*arrays.values(), several=several, **extra, **options, **rows)

    statistics = ("lse", "target_logit") if several else STATISTICS
    outputs = ["--" + name.replace("_", "-") for name in (*statistics, *(() if several else ["is_top1"]))]
    report = ok("--json", "loss", *files, *arguments, *outputs, "--per-token", "t.safetensors").json
    check_report(report, exact, naive)
    rows = np.abs(exact["lse"]) + np.abs(exact["nll"])
    if not several:
        rows = rows + np.abs(exact["entropy"]) + np.abs(exact["max_logit"]) + np.abs(exact["log_sum_sq_probs"])
    for key in statistics:
        mean = exact[key].sum() / exact["valid"]
        assert report[key] == pytest.approx(mean, abs=2.0**-23 * rows.max() * 4), key
    tokens = load_file(tmp_path / "t.safetensors")
    if several:
        log_probs, scale = exact["target_log_probs"], np.abs(exact["lse"])[:, None]
        assert report["targets_per_token"] == log_probs.shape[1]
        assert (tokens["target_log_probs"][arrays["targets"] == -100] == 0).all()
        assert_close(tokens["target_log_probs"], log_probs, naive["target_log_probs"], scale=np.abs(log_probs) + scale)
    else:
        assert report["is_top1"] == pytest.approx(exact["is_top1"].sum() / exact["valid"])
        assert tokens["is_top1"].dtype == bool and (tokens["is_top1"] == exact["is_top1"]).all()
    for key, mine in [("nll", "nll"), *((name, name) for name in statistics), ("row_loss", "loss")]:
        assert tokens[mine].dtype == np.float32 and tokens[mine].shape == (N,)
        assert_close(tokens[mine], exact[key], naive[key], scale=np.maximum(rows, np.abs(exact[key])))
    assert (tokens["argmax"] == exact["argmax"]).all()
    assert (tokens["targets"] == arrays["targets"]).all()

    report = ok("--json", "loss", *files, *arguments, "--gradients", "g.safetensors").json
    check_report(report, exact, naive)
    gradients = load_file(tmp_path / "g.safetensors")
    assert set(gradients) == {"d_hidden", "d_weight"} | ({"d_bias"} if operands == "bias" else set())
    for key, gradient in gradients.items():
        assert_close(gradient, exact[key], naive[key])


def test_batch_invariant(ok, tmp_path, problem):
    files = write_npy(tmp_path, problem)
    ok("loss", *files, "--batch-invariant", "--lse", "--per-token", "all.safetensors")
    some = [7, 3, 41]
    few = write_npy(tmp_path, {**problem, "hidden": problem["hidden"][some], "targets": problem["targets"][some]})
    ok("loss", *few, "--batch-invariant", "--lse", "--per-token", "few.safetensors", "--gradients", "g.safetensors")
    rows, alone = (load_file(tmp_path / f"{name}.safetensors") for name in ("all", "few"))
    for name in ("nll", "lse"):
        assert (rows[name][some] == alone[name]).all()


def test_logits_of_fp8(ok, refused, tmp_path):
    """Numbers that e4m3 has give the same loss; others are off by at most a 16th of each."""
    exact = {"hidden": np.float32([[448, -2, 0.875]]), "weight": np.float32([[0.001953125, 0, 1], [1, 0.5, -0.25]])}
    other = {**exact, "hidden": np.float32([[448, -2.1, 0.9]])}
    for arrays, is_equal in ((exact, True), (other, False)):
        files = write_npy(tmp_path, {**arrays, "targets": np.int64([0])})
        losses = [ok("loss", *files, "--json", *more).json["loss"] for more in ((), ("--compute-dtype", "fp8"))]
        assert (losses[0] == losses[1]) == is_equal and losses[1] == pytest.approx(losses[0], rel=0.02)
    refused(2, "one of float32|bfloat16|float16|fp8, got 'e4m3'", "loss", *files, "--compute-dtype", "e4m3")


@pytest.mark.parametrize("reduction", ["sum", "num-items"])
def test_reductions(ok, tmp_path, problem, reduction):
    files = write_npy(tmp_path, problem)
    exact = forward(*problem.values())
    arguments = ["--reduction", "sum"] if reduction == "sum" else ["--num-items", 7]
    divisor = 1 if reduction == "sum" else 7
    for outputs in ([], ["--gradients", "g.safetensors"]):
        report = ok("--json", "loss", *files, *arguments, *outputs).json
        assert report["loss"] == pytest.approx(exact["row_loss"].sum() / divisor, rel=1e-6)


def test_shift_inside_sequences(ok, tmp_path, problem):
    arrays = {**problem, "hidden": problem["hidden"].reshape(4, 15, D), "targets": problem["targets"].reshape(4, 15)}
    files = write_npy(tmp_path, arrays)
    shifted = np.full((4, 15), -100)
    shifted[:, :-2] = arrays["targets"][:, 2:]
    exact, naive = both(problem["hidden"], problem["weight"], shifted)
    report = ok("--json", "loss", *files, "--shift", 2, "--per-token", "t.npy", "--gradients", "g.safetensors").json
    check_report(report, exact, naive)
    assert np.load(tmp_path / "t.npy").shape == (4, 15)
    gradients = load_file(tmp_path / "g.safetensors")
    assert gradients["d_hidden"].shape == (4, 15, D)
    assert_close(gradients["d_hidden"].reshape(N, D), exact["d_hidden"], naive["d_hidden"])
    # The tokens are now flat, with the sequences' length as an argument.
    flat = write_npy(tmp_path, problem)
    again = ok("--json", "loss", *flat, "--shift", 2, "--sequence-length", 15).json
    assert again["nll"] == pytest.approx(report["nll"], rel=1e-6)
    # A shift past the end leaves no token.
    assert ok("--json", "loss", *flat, "--shift", 99).json["valid_tokens"] == 0


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64])
def test_integer_targets_of_any_width(ok, tmp_path, problem, dtype):
    problem["targets"] %= 100
    expected = forward(*problem.values())["loss"]
    files = write_npy(tmp_path, {**problem, "targets": problem["targets"].astype(dtype)})
    assert ok("--json", "loss", *files).json["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype, offset", [(np.float32, 1e6), (np.float32, 3e7), (np.float64, 1e15)])
def test_a_common_offset_of_the_logits_changes_nothing(ok, tmp_path, problem, random, dtype, offset):
    even = {"hidden": random.integers(-2, 3, (N, 5)), "weight": 2 * random.integers(-1, 2, (V, 5))}
    arrays = {name: array.astype(dtype) for name, array in even.items()} | {"targets": problem["targets"]}
    exact, naive = both(*arrays.values(), label_smoothing=0.2)
    files = write_npy(tmp_path, arrays | {"bias": np.full(V, offset, dtype)})
    report = ok("--json", "loss", *files, "--label-smoothing", 0.2, "--entropy", "--per-token", "t.safetensors").json
    made = ok("--json", "loss", *files, "--label-smoothing", 0.2, "--gradients", "g.safetensors").json
    check_report(report, exact, naive)
    check_report(made, exact, naive)
    tokens, gradients = load_file(tmp_path / "t.safetensors"), load_file(tmp_path / "g.safetensors")
    for key, mine in [("nll", "nll"), ("entropy", "entropy"), ("row_loss", "loss")]:
        assert_close(tokens[mine], exact[key], naive[key])
    for key in ("d_hidden", "d_weight", "d_bias"):
        assert_close(gradients[key], exact[key], naive[key])


def test_float16_and_float64(ok, tmp_path, problem):
    for dtype, unit in [(np.float16, 2.0**-11), (np.float64, 2.0**-53)]:
        arrays = {name: x if name == "targets" else x.astype(dtype) for name, x in problem.items()}
        files = write_npy(tmp_path, arrays)
        exact, naive = both(*arrays.values())
        report = ok("--json", "loss", *files, "--gradients", "g.safetensors").json
        check_report(report, exact, naive)
        gradients = load_file(tmp_path / "g.safetensors")
        assert gradients["d_hidden"].dtype == dtype
        smallest = 2.0**-25 if dtype == np.float16 else 0  # half of the smallest subnormal
        for key, gradient in gradients.items():
            rounded = exact[key] if dtype == np.float64 else naive[key].astype(dtype)
            scale = np.abs(exact[key]) + smallest / unit
            assert_close(gradient, exact[key], rounded, scale=scale, unit=max(unit, 2.0**-50))


def test_bf16_tensors_of_a_file_by_name(ok, refused, tmp_path, problem):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    tensors = {name: torch.from_numpy(x) for name, x in problem.items()}
    head, hidden = tensors["weight"].bfloat16(), tensors["hidden"].bfloat16()
    save_torch({"lm_head.weight": head, "model.embed_tokens.weight": hidden}, tmp_path / "model.safetensors")
    save_torch({"hidden": hidden, "input_ids": tensors["targets"].int()}, tmp_path / "acts.safetensors")
    exact, naive = both(hidden.float().numpy(), head.float().numpy(), problem["targets"])
    files = ["--hidden", "acts.safetensors:hidden", "--targets", "acts.safetensors:input_ids"]
    named = ["--weight", "model.safetensors:lm_head.weight"]
    report = ok("--json", "loss", *files, *named, "--gradients", "g.safetensors").json
    check_report(report, exact, naive)
    assert report["inputs"]["weight"]["tensor"] == "model.safetensors:lm_head.weight"
    gradients = load_torch(tmp_path / "g.safetensors")
    for key in ("d_hidden", "d_weight"):
        assert gradients[key].dtype == torch.bfloat16
        rounded = torch.from_numpy(naive[key]).bfloat16().float().numpy()
        assert_close(gradients[key].float().numpy(), exact[key], rounded, unit=2.0**-8)
    # The command never guesses a head, or what its model does to the logits.
    (tmp_path / "config.json").write_text('{"model_type": "gemma2", "final_logit_softcapping": 1.0}')
    refused(1, "name the weight as model.safetensors:TENSOR, one of 'lm_head.weight'", "loss", *files,
            "--weight", "model.safetensors")  # fmt: skip
    refused(1, "expected a .safetensors or .npy file", "loss", *files, "--weight", ".")
    again = ok("--json", "loss", *files, *named).json
    assert again["softcap"] == 0 and again["nll"] == pytest.approx(report["nll"], rel=1e-6)


def test_chosen_gradients_and_their_dtype(ok, tmp_path, problem):
    files = write_npy(tmp_path, {**problem, "hidden": problem["hidden"].astype(np.float16)})
    ok("loss", *files, "--gradients", "g.safetensors", "--gradients-of", "hidden", "--gradients-dtype", "f32")
    gradients = load_file(tmp_path / "g.safetensors")
    assert set(gradients) == {"d_hidden"} and gradients["d_hidden"].dtype == np.float32


def test_budget_is_kept_and_refused(ok, run, tmp_path, problem):
    files = write_npy(tmp_path, problem)
    report = ok("--json", "loss", *files, "--gradients", "g.safetensors", "--budget", "64MiB").json
    assert report["workspace_bytes"] <= 64 * 2**20
    refusal = run("loss", *files, "--budget", "1")
    assert refusal.code == 1 and "expected at least" in refusal.err


def test_no_valid_token_and_no_token(ok, tmp_path, problem):
    files = write_npy(tmp_path, {**problem, "targets": np.full(N, -100)})
    report = ok("--json", "loss", *files).json
    assert report["loss"] is None and report["valid_tokens"] == 0  # NaN
    files = write_npy(tmp_path, {**problem, "targets": np.zeros(0, int), "hidden": np.zeros((0, D), np.float32)})
    report = ok("--json", "loss", *files).json
    assert report["loss"] is None and report["tokens"] == 0


@pytest.mark.parametrize("several", [False, True])
def test_many_chunks_join_to_the_same_loss(ok, tmp_path, random, several):
    """There are more tokens than one run takes."""
    arrays = {
        "hidden": random.standard_normal((6000, 64)).astype(np.float32),
        "weight": random.standard_normal((3000, 64)).astype(np.float32) / 8,
        "targets": random.integers(0, 3000, (6000, 3) if several else 6000),
    }
    if several:
        arrays["target_weight"] = random.dirichlet(np.ones(3), 6000).astype(np.float32)
    files = write_npy(tmp_path, arrays)
    report = ok("--json", "--backend", "reference", "loss", *files, "--per-token", "t.safetensors").json
    assert report["tokens_per_run"] < 6000
    exact, naive = both(*arrays.values(), several=several)
    check_report(report, exact, naive)
    if several:
        got, scale = load_file(tmp_path / "t.safetensors")["target_log_probs"], np.abs(exact["lse"])[:, None]
        assert_close(got, exact["target_log_probs"], naive["target_log_probs"], scale=scale + np.abs(got))


def test_text_report(ok, tmp_path, problem):
    text = ok("loss", *write_npy(tmp_path, problem), "--lse", "--entropy").out
    facts = ("loss: ", "reduction: mean", "perplexity: ", "token accuracy: ", "lse: ", "entropy: ")
    assert all(part in text for part in (*facts, "hidden: tensor hidden.npy"))


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_on_a_device(cuda_device, ok, tmp_path, problem, gradients, dtype):
    """Every sum of D products may round in any order, on the host and on the device."""
    problem = {name: x if name == "targets" else x.astype(dtype) for name, x in problem.items()}
    arguments = write_npy(tmp_path, problem) + ["--entropy", "--lse", "--per-token", "t.safetensors"]
    if gradients:
        arguments += ["--gradients", "g.safetensors"]
    report = ok("--json", "loss", "--device", cuda_device, *arguments).json
    assert report["device"] == cuda_device and report["plan"]["backend"] == "cuda"
    exact = forward(**problem)
    unit, hidden, weight = np.finfo(dtype).eps / 2, np.abs(problem["hidden"]), np.abs(problem["weight"])
    logit = (D + 8) * unit * (hidden @ weight.T).max()  # error of a logit, and of lse
    rows = load_file(tmp_path / "t.safetensors")
    z = problem["hidden"].astype(np.float64) @ problem["weight"].astype(np.float64).T
    for name, factor in (("nll", 2), ("lse", 1), ("entropy", 2 * (1 + np.abs(z).max()))):
        assert np.abs(rows[name] - exact[name]).max() <= factor * logit + 8 * unit, name
    assert abs(report["loss"] - exact["loss"]) <= 2 * logit + 8 * unit
    assert report["correct_tokens"] == exact["correct"]
    if not gradients:
        return
    parts = np.exp(z - exact["lse"][:, None])
    parts[np.arange(N), problem["targets"]] += 1
    parts /= exact["divisor"]
    relative = 2 * logit + 8 * unit + (V + 8) * unit
    got = load_file(tmp_path / "g.safetensors")
    assert (np.abs(got["d_hidden"] - exact["d_hidden"]) <= relative * (parts @ weight)).all()
    assert (np.abs(got["d_weight"] - exact["d_weight"]) <= relative * (parts.T @ hidden)).all()


def test_sparsified_gradients(ok, refused, tmp_path, problem):
    arguments = ["loss", *write_npy(tmp_path, problem), "--gradients"]

    def gradients(name, *options):
        ok(*arguments, f"{name}.safetensors", *options)
        return load_file(tmp_path / f"{name}.safetensors")

    exact = gradients("exact")
    sparsified = ["--gradient", "sparsified", "--threshold"]
    close = gradients("close", *sparsified, "1e-9")
    for name in ("d_hidden", "d_weight"):
        assert np.abs(close[name] - exact[name]).max() <= 1e-5 * np.abs(exact[name]).max()
    first = gradients("first", *sparsified, "2^-4", "--seed", 5)
    assert np.array_equal(first["d_hidden"], gradients("again", *sparsified, "0.0625", "--seed", 5)["d_hidden"])
    assert not np.array_equal(first["d_hidden"], gradients("other", *sparsified, "2^-4")["d_hidden"])
    refused(
        2,
        "--threshold: expected a number in [1.1754943508222875e-38, 1]",
        *arguments,
        "x.safetensors",
        *sparsified,
        "2^1",
    )
    refused(2, "--threshold: expected a number in", *arguments, "x.safetensors", *sparsified, "0")
    refused(2, "--gradient: expected exact without --gradients FILE", *arguments[:-1], *sparsified, "0.1")


@pytest.mark.parametrize("value, shown", [(0.0, "got 0 at 3"), (-0.125, "got -0.125 at 3"), (np.inf, "at 3")])
def test_bad_temperatures(refused, tmp_path, problem, value, shown):
    temperatures = np.ones(N, np.float32)
    temperatures[3] = value
    files = write_npy(tmp_path, {**problem, "token_temperature": temperatures})
    assert shown in refused(1, "token_temperature", "loss", *files).err
    files = write_npy(tmp_path, problem)
    refused(2, "--temperature", "loss", *files, "--temperature", 0)


def test_one_temperature_at_a_time(refused, tmp_path, problem):
    files = write_npy(tmp_path, {**problem, "token_temperature": np.ones(N, np.float32)})
    refused(2, "--token-temperature", "loss", *files, "--temperature", 2)


def test_top_k(ok, refused, tmp_path, problem, random):
    problem["targets"] = np.where(random.random(N) < 0.2, -100, problem["targets"])
    files = write_npy(tmp_path, problem)
    report = ok("--json", "loss", *files, "--top-k", 7, "--per-token", "t.safetensors").json
    z = problem["hidden"].astype(np.float64) @ problem["weight"].astype(np.float64).T
    expected = np.argsort(-z, axis=1, kind="stable")[:, :7]
    tokens, valid = load_file(tmp_path / "t.safetensors"), problem["targets"] != -100
    np.testing.assert_array_equal(tokens["top_ids"], np.where(valid[:, None], expected, -1))
    lse = np.log(np.exp(z).sum(axis=1, keepdims=True))
    log_probs = np.where(valid[:, None], np.take_along_axis(z, expected, 1) - lse, 0)
    np.testing.assert_allclose(tokens["top_log_probs"], log_probs, atol=2.0**-18)
    assert tokens["top_log_probs"].dtype == np.float32
    hits = (expected == problem["targets"][:, None]).any(axis=1)[valid]
    assert report["top_k"] == 7 and report["top_k_accuracy"] == pytest.approx(hits.mean())
    assert "top k accuracy: " in ok("loss", *files, "--top-k", 7).out
    refused(2, "--top-k", "loss", *files, "--top-k", 65)
    refused(
        2, "--top-k: expected 0 in a pass with gradients", "loss", *files, "--top-k", 2, "--gradients", "g.safetensors"
    )
    refused(2, "--per-token", "loss", *files, "--top-k", 2, "--per-token", "t.npy")


def test_num_samples(ok, refused, tmp_path, problem, random):
    problem["targets"] = np.where(random.random(N) < 0.2, -100, problem["targets"])
    files = write_npy(tmp_path, problem)

    def sampled(seed):
        ok("loss", *files, "--num-samples", 5, "--seed", seed, "--per-token", "t.safetensors")
        tokens = load_file(tmp_path / "t.safetensors")
        return tokens["sampled_ids"], tokens["sampled_log_probs"]

    ids, log_probs = sampled(3)
    valid = problem["targets"] != -100
    z = problem["hidden"].astype(np.float64) @ problem["weight"].astype(np.float64).T
    lse = np.log(np.exp(z).sum(axis=1, keepdims=True))
    assert ids.shape == (N, 5) and (ids[~valid] == -1).all()
    expected = np.where(valid[:, None], np.take_along_axis(z, np.maximum(ids, 0), 1) - lse, 0)
    np.testing.assert_allclose(log_probs, expected, atol=2.0**-18)
    np.testing.assert_array_equal(sampled(3)[0], ids)
    assert (sampled(4)[0] != ids).any()
    refused(2, "--num-samples", "loss", *files, "--num-samples", 65)
    refused(2, "--num-samples", "loss", *files, "--num-samples", 2, "--top-k", 3)
    refused(2, "--per-token", "loss", *files, "--num-samples", 2, "--per-token", "t.npy")
