import pytest


def test_bench_measures(ok):
    report = ok("--json", "bench", "--shape", "64,512,32", "--budgets", "16MiB,0", "--repeat", 2).json
    (shape,) = report["shapes"]
    assert (shape["tokens"], shape["vocab"], shape["hidden"]) == (64, 512, 32)
    losses = {round(result["loss"], 4) for result in shape["results"]}
    assert len(losses) == 1, losses  # every method computes the same loss
    for result in shape["results"]:
        assert result["refusal"] is None and len(result["seconds"]) == 2 and result["median_seconds"] > 0
        if result["budget_bytes"]:
            assert result["workspace_bytes"] <= result["budget_bytes"]


def test_without_onednn_all_but_the_comparison_works(with_environment, tmp_path):
    for version in (1, 2, 3):
        (tmp_path / f"libdnnl.so.{version}").touch()
    process = with_environment(["bench", "--shape", "8,16,8", "--repeat", "1"], LD_LIBRARY_PATH=str(tmp_path))
    assert "materialized: not measured, oneDNN, which multiplies the matrices, cannot be opened" in process.stdout
    assert "logitless, no budget" in process.stdout


def test_bench_shows_a_refused_budget(ok):
    report = ok("--json", "bench", "--shape", "64,512,32", "--budgets", "1B", "--repeat", 1).json
    refused = [result for result in report["shapes"][0]["results"] if result["budget_bytes"] == 1]
    assert refused and all("expected at least" in result["refusal"] for result in refused)
    assert "refused" in ok("bench", "--shape", "64,512,32", "--budgets", "1B", "--repeat", 1).out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_bench_on_a_device(cuda_device, ok, dtype):
    problem = ["--shape", "300,4000,64", "--budgets", "0,1B", "--dtype", dtype, "--repeat", 3]
    report = ok("--json", "bench", "--device", cuda_device, *problem).json
    assert report["device"] == cuda_device and report["why_not_materialized"]
    host = ok("--json", "bench", *problem).json["shapes"][0]["results"]
    (loss,) = {round(result["loss"], 3) for result in host if not result["refusal"]}
    for result in report["shapes"][0]["results"]:
        if result["budget_bytes"] == 1:
            assert "expected at least" in result["refusal"]
            continue
        assert len(result["seconds"]) == 3 and result["gflop_per_second"] > 0
        assert abs(result["loss"] - loss) < 2e-3 and result["peak_extra_bytes"] is None
        assert "cuda" in result["detail"]
    assert "gflop per second" in ok("bench", "--device", cuda_device, *problem).out


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_bench_of_16_bit_operands(ok, dtype):
    report = ok("--json", "bench", "--shape", "32,256,16", "--dtype", dtype, "--budgets", "0", "--repeat", 1).json
    losses = [result["loss"] for result in report["shapes"][0]["results"]]
    assert max(losses) - min(losses) < 1e-4


def test_bench_of_sparsified_gradients(ok, refused):
    arguments = ["bench", "--shape", "64,512,32", "--budgets", "0", "--repeat", 1, "--sparsified"]
    results = ok("--json", *arguments, "2^-4,0.1").json["shapes"][0]["results"]
    sparsified = [result for result in results if result["threshold"] is not None]
    assert [result["threshold"] for result in sparsified] == [2.0**-4, 0.1]
    assert all(result["gradients"] and result["detail"].startswith("sparsified,") for result in sparsified)
    assert len({round(result["loss"], 4) for result in results}) == 1
    refused(2, "--sparsified: expected a number in [1.1754943508222875e-38, 1]", *arguments, "2")


def test_check_passes_on_this_machine(ok):
    report = ok("--json", "check", timeout=600).json
    assert report["passed"] and report["failed"] == 0 and report["runs"] == len(report["cases"]) > 300
    for case in report["cases"]:
        assert set(case["outputs"]) >= {"loss", "lse", "nll", "entropy", "argmax"}
        assert all(output["error"] <= output["bound"] for output in case["outputs"].values())


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True])
def test_check_passes_where_there_is_a_device(cuda_device, ok, on_device):
    report = ok("--json", "check", "--device", cuda_device if on_device else "cpu", timeout=600).json
    assert report["passed"] and report["failed"] == 0 and report["runs"] > 300
    assert {case["backend"].startswith("cuda") for case in report["cases"]} == {on_device}
