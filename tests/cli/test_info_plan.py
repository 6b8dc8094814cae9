import re

import pytest


def test_info(ok):
    facts = ok("--json", "info").json
    assert facts["version"]
    assert {backend["name"] for backend in facts["backends"]} >= {"reference"}
    for backend in facts["backends"]:
        assert backend["usable"] == (backend["why_unavailable"] == "")
        assert backend["description"]
    assert facts["chosen"]["float64"]["backend"] == "reference"
    for dtype, choice in facts["chosen"].items():
        assert choice["backend"] and choice["engine"] and choice["reason"], dtype
    assert facts["device"]["processors_usable"] >= 1
    assert facts["device"]["memory_bytes"] > 0
    text = ok("info").out
    assert facts["device"]["processor"] in text
    assert facts["chosen"]["bfloat16"]["reason"] in text


def test_info_shows_every_cuda_device_or_why_there_is_none(ok):
    facts = ok("--json", "info").json
    result = ok("info")
    assert result.err == ""
    if not facts["cuda_devices"]:
        assert facts["why_no_cuda_devices"]
        assert f"why no cuda devices: {facts['why_no_cuda_devices']}\n" in result.out
        return
    assert facts["why_no_cuda_devices"] == ""
    for ordinal, device in enumerate(facts["cuda_devices"]):
        assert device["device"] == f"cuda:{ordinal}" and device["name"] in result.out
        assert device["multiprocessors"] > 0 and device["memory_bytes"] > 0
        assert device["usable"] == (device["why_unavailable"] == "")
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            choice = device["chosen"][dtype]
            assert choice["reason"] and device["usable"] == (choice["backend"] == "cuda")


def test_info_of_a_machine_without_a_cuda_device(with_environment):
    process = with_environment(["info"], CUDA_VISIBLE_DEVICES="")
    assert process.stderr == ""
    assert "\nwhy no cuda devices: " in process.stdout and "\ncuda devices" not in process.stdout


def test_plan_json(ok):
    result = ok("--json", "plan", "-N", 1024, "-V", 32768, "-D", 256, "--dtype", "f32", "--budget", "256MiB").json
    assert result["f_flop"] == 2 * 1024 * 32768 * 256
    assert result["materialized"]["logits_bytes"] == 4 * 1024 * 32768
    assert result["problem"]["budget_bytes"] == 256 * 2**20
    assert result["chosen"]["workspace_bytes"] <= 256 * 2**20
    assert result["smallest_budget_bytes"] == min(plan["workspace_bytes"] for plan in result["plans"])
    assert sum(plan["chosen"] for plan in result["plans"]) == 1
    for plan in result["plans"]:
        assert plan["fits"] == (plan["workspace_bytes"] <= 256 * 2**20)
        assert plan["cost_matmuls"] > 0 and plan["predicted_seconds"] > 0
        assert 0 <= plan["cached_columns"] <= 32768 and 0 < plan["vocab_window"] <= 32768
    kept = {plan["plan"]: plan["cached_columns"] for plan in result["plans"]}
    assert kept["whole"] == 32768


@pytest.mark.parametrize("budget", ["40MiB", "150MiB", "350MiB", "1500MiB"])
@pytest.mark.parametrize("sizes", [(8192, 256000, 2304), (16384, 128000, 2048), (32768, 50304, 768)], ids=str)
def test_plans_show_time_against_memory(ok, sizes, budget):
    problem = [word for pair in zip(["-N", "-V", "-D"], sizes, strict=True) for word in pair]
    result = ok("--json", "plan", *problem, "--device", "h200", "--budget", budget).json
    plans = result["plans"]
    (chosen,) = (plan for plan in plans if plan["chosen"])
    assert chosen["workspace_bytes"] == result["chosen"]["workspace_bytes"] <= result["problem"]["budget_bytes"]
    least = float("inf")
    for plan in plans:
        size = plan["workspace_bytes"]
        assert plan["chosen"] or size <= 0.9 * least or size == result["smallest_budget_bytes"] < least
        least = min(least, size)
    assert least == result["smallest_budget_bytes"]
    seconds = [plan["predicted_seconds"] for plan in plans]
    assert seconds == sorted(seconds) and len(plans) >= 4


def test_plans_explain_their_words(ok):
    problem = ["plan", "--model", "gemma-2-2b", "-N", 8192, "--device", "h200", "--budget", "100MiB"]
    kernels = ("rows in d_hidden", "sm90 ping-pong", "d_weight rounded")
    text, verbose = ok(*problem).out, ok(*problem, "-v").out
    assert "\nvocab_chunks: " in text and "\nsparsified: " not in text
    for word in kernels:
        assert f"\n{word}: " not in text and f"\n{word}: " in verbose
    for plan in ok("--json", *problem).json["plans"]:
        assert plan["config"] not in text and f"\n    {plan['config']}\n" in verbose


@pytest.mark.parametrize("device", ["cpu", "h200", "a100"])
@pytest.mark.parametrize("options", [["--model", "gemma-2-2b", "-N", 8192], ["--model", "gemma-3-4b", "-N", "1Mi"],
                                     ["-N", 7, "-V", 33, "-D", 5, "--dtype", "f32"]], ids=str)  # fmt: skip
@pytest.mark.parametrize("more", [[], ["--no-grad"], ["--gradient", "sparsified", "-v"], ["--budget", "1B"]], ids=str)
def test_plans_fit_a_terminal(run, device, options, more):
    text = run("plan", *options, "--device", device, *more).out
    assert max(map(len, text.splitlines())) <= 100
    table = text.split("\n\n")[2].splitlines()
    assert table[0].split() == ["plan", "workspace", "cost", "time", "fits", "tokens", "columns", "kept"]
    assert max(len(row) for row in table if row[2:3].strip()) <= 80


def test_the_chosen_plan_comes_first(ok, run):
    problem = ["plan", "-N", 512, "-V", 8000, "-D", 64, "--budget", "4MiB"]
    chosen = ok("--json", *problem).json["chosen"]
    sentence = ok(*problem).out.split("\n\n")[1]
    assert sentence.startswith(f"The chosen plan (*) is {chosen['plan']}: ")
    size = re.search(r": ([\d.]+ [KM]iB) of workspace", sentence)[1]
    assert ok("--json", *problem[:-1], size).json["chosen"]["plan"] == chosen["plan"]
    assert run(*problem[:-1], "9B").out.split("\n\n")[1] == "No plan fits the budget of 9 B."


def test_plans_say_which_kernels_and_why(ok, run):
    problem = ["plan", "-N", 64, "-V", 512, "-D", 32]
    chosen = ok("--json", *problem, "--backend", "cpu").json["chosen"]
    assert chosen["engine"] and chosen["reason"]
    asked = ok("--json", *problem, "--backend", f"cpu:{chosen['engine']}").json["chosen"]
    assert asked == chosen | {"reason": "requested"}
    assert f"kernels: cpu, {chosen['engine']} ({chosen['reason']})" in ok(*problem, "--backend", "cpu").out
    wide = ok("--json", *problem, "--dtype", "f64", "--backend", "reference").json["chosen"]
    assert wide["reason"] == "float64 operands"
    assert "kernels: " in run(*problem, "--budget", "1B").out


def test_verbose_shows_every_plan_made_and_why(with_environment):
    for value, shown in (("1", True), ("0", False)):
        said = with_environment(["plan", "-N", "64", "-V", "512", "-D", "32"], LOGITLESS_VERBOSE=value).stderr
        assert ("because: " in said and "N 64, V 512, D 32" in said) == shown


LOSS = ["loss", "--hidden", "h.npy", "--weight", "c.npy", "--targets", "y.npy"]


@pytest.mark.parametrize("command", [["plan", "--model", "gpt2"], ["bench"], ["check"], LOSS], ids=lambda x: x[0])
def test_a_device_that_is_not_here_is_refused_before_anything_is_read(refused, command):
    refused(1, "--device: expected a usable CUDA device, got cuda:999: th", *command, "--device", "cuda:999")
    known = "cpu, cuda:N or a model" if command[0] == "plan" else "cpu or cuda:N"
    refused(2, f"--device: expected {known}, got 'gpu'", *command, "--device", "gpu")


def test_plans_for_a_model_of_device(ok, refused):
    problem = ["--json", "plan", "--model", "llama-3-8b", "--device"]
    chosen = ok(*problem, "h200").json["chosen"]
    assert (chosen["backend"], chosen["engine"]) == ("cuda", "sm90")
    assert ok(*problem, "h200", "--dtype", "f32").json["chosen"]["engine"] == "portable"
    assert ok(*problem, "h200", "--backend", "cuda:portable").json["chosen"]["reason"] == "requested"
    assert ok(*problem, "h200", "--budget", "160MiB").json["chosen"]["workspace_bytes"] <= 160 * 2**20
    for device in ("a100", "a10", "l40s", "rtx-4090", "rtx-5090"):
        assert ok(*problem, device).json["chosen"]["engine"] == "mma"
        assert ok(*problem, device, "--dtype", "f32").json["chosen"]["engine"] == "portable"
    chosen = ok(*problem, "b200").json["chosen"]
    assert chosen["engine"] == "portable"
    assert "9.0, not 10.0; mma: chosen on compute capability 8.0, 8.6, 8.9 and 12.0, not on 10.0" in chosen["reason"]
    for device in ("a10", "b200"):
        asked = ok(*problem, device, "--backend", "cuda:mma").json["chosen"]
        assert (asked["engine"], asked["reason"]) == ("mma", "requested")
    refused(1, "mma needs both operands in bf16", *problem[1:], "a10", "--dtype", "f32", "--backend", "cuda:mma")
    refused(2, "rtx-4090, rtx-5090, h100, h200, b200, got h9000", *problem[1:], "h9000")


@pytest.mark.gpu
def test_plans_for_the_device_that_is_here(cuda_device, ok):
    chosen = ok("--json", "plan", "--model", "llama-3-8b", "--device", cuda_device).json["chosen"]
    assert chosen["backend"] == "cuda" and chosen["reason"]


def test_smallest_budget_works_and_one_byte_less_does_not(ok, run):
    problem = ["plan", "-N", 1000, "-V", 5000, "-D", 128, "--dtype", "bf16"]
    smallest = ok("--json", *problem).json["smallest_budget_bytes"]
    assert ok("--json", *problem, "--budget", smallest).json["chosen"]["workspace_bytes"] == smallest
    refusal = run("--json", *problem, "--budget", smallest - 1)
    assert refusal.code == 1
    assert str(smallest) in refusal.err
    assert refusal.json["chosen"] is None and refusal.json["plans"]


def test_no_gradient_needs_less(ok):
    problem = ["--json", "plan", "--model", "gpt2", "--tokens", "1k"]
    assert ok(*problem, "--no-grad").json["chosen"]["cost_matmuls"] <= 1
    assert ok(*problem, "--no-grad").json["problem"]["gradients"] is False
    assert ok(*problem).json["chosen"]["cost_matmuls"] > 1


def test_models_have_sources(ok):
    models = ok("--json", "plan", "--list-models").json
    assert ok("plan", "--list-models", "--json").json == models
    assert len(models) >= 12
    for model in models:
        assert model["vocab"] > 1000 and model["hidden"] >= 512 and "/" in model["weights"] and model["source"]
    assert len({model["name"] for model in models}) == len(models)


@pytest.mark.parametrize("name", ["gemma-2-2b", "Gemma_2_2B", "google/gemma-2-2b"])
def test_model_sets_shape_and_softcap(ok, name):
    problem = ok("--json", "plan", "--model", name).json["problem"]
    assert (problem["vocab"], problem["hidden"], problem["softcap"]) == (256000, 2304, 30)


def test_options_win_over_the_model(ok):
    problem = ok("--json", "plan", "--model", "gemma-2-2b", "--softcap", 0, "--vocab", "1Ki").json["problem"]
    assert (problem["vocab"], problem["softcap"]) == (1024, 0)


SIZES = [("256MiB", 2**28), ("1GB", 10**9), ("1.5GiB", 3 * 2**29), ("64m", 64 * 10**6)]
SIZES += [(".5GiB", 2**29), ("64 kib", 2**16), ("1048576", 2**20), ("2097152B", 2**21)]


@pytest.mark.parametrize("text, size", SIZES)
def test_sizes(run, text, size):
    # Whether the budget is enough depends on the backend; the plans are shown in either case.
    result = run("--json", "plan", "--model", "gpt2", "-N", 1, "--no-grad", "--budget", text)
    assert result.json["problem"]["budget_bytes"] == size


@pytest.mark.parametrize("text", ["1e9", "-1MiB", ".", "0x10", "inf", "nan", "MiB", "1 2", "1MiBB"])
def test_what_is_no_size(refused, text):
    refused(2, "--budget: expected a size", "plan", "--model", "gpt2", f"--budget={text}")


def test_plan_of_sparsified_gradients(ok):
    problem = ["plan", "-N", 1024, "-V", 32768, "-D", 256, "--dtype", "f32", "--gradient", "sparsified"]
    assert ok("--json", *problem).json["problem"]["threshold"] == 2.0**-9
    result = ok("--json", *problem, "--threshold", "2^-9").json
    assert result["problem"]["gradient"] == "sparsified" and result["problem"]["threshold"] == 2.0**-9
    assert {plan["plan"] for plan in result["plans"]} == {"sparsified"}
    assert "loss and sparsified gradients" in ok(*problem).out


def printed_budgets(text):
    """Returns the table's workspaces and the smallest budget as a person would type them."""
    (smallest,) = re.findall(r"smallest that works: ([\d.]+ (?:[KMG]i)?B)", text)
    return [smallest, *re.findall(r"(?m)^[* ] [a-z_]+ +([\d.]+ (?:[KMG]i)?B) ", text)]


@pytest.mark.parametrize("device", ["cpu", "h200", "a100"])
@pytest.mark.parametrize("sizes", [(8192, 256000, 2304), (1000, 5000, 128), (777, 32003, 1111)], ids=str)
def test_what_is_printed_is_enough_as_a_budget(ok, sizes, device):
    problem = ["plan", *(word for pair in zip(["-N", "-V", "-D"], sizes, strict=True) for word in pair)]
    problem += ["--device", device]
    plans = ok("--json", *problem).json["plans"]
    budgets = printed_budgets(ok(*problem).out)
    assert len(budgets) == len(plans) + 1
    sizes = [min(plan["workspace_bytes"] for plan in plans), *(plan["workspace_bytes"] for plan in plans)]
    for text, size in zip(budgets, sizes, strict=True):
        given = ok("--json", *problem, "--budget", text).json
        assert given["chosen"] and size <= given["problem"]["budget_bytes"] <= 1.01 * size + 1


@pytest.mark.parametrize("model", ["gpt2", "gemma-2-2b", "llama-3-8b"])
@pytest.mark.parametrize("device", ["a100", "b200", "h200", "cpu"])
def test_no_two_plans_look_alike(ok, device, model):
    for budget in ([], ["--budget", "300MiB"], ["--budget", "40MiB"]):
        plans = ok("--json", "plan", "--model", model, "--device", device, *budget).json["plans"]
        shown = [tuple(plan[key] for key in ("plan", "token_chunk", "vocab_window", "cached_columns", "config"))
                 for plan in plans]  # fmt: skip
        assert len(set(shown)) == len(shown)


def test_a_faster_plan_that_is_not_chosen_says_why(ok):
    problem = ["plan", "--model", "gemma-2-2b", "-N", 8192, "--device"]
    explained = 0
    for device, budget in (("h200", "160MiB"), ("h100", "160MiB"), ("h200", "2000MiB"), ("a100", "300MiB")):
        result = ok("--json", *problem, device, "--budget", budget).json
        (chosen,) = (plan for plan in result["plans"] if plan["chosen"])
        for plan in result["plans"]:
            faster = plan["fits"] and plan["predicted_seconds"] < chosen["predicted_seconds"]
            assert bool(plan["why_not"]) == faster
            if not faster:
                continue
            explained += 1
            if "rounds" in plan["why_not"]:
                chunks = -(-8192 // plan["token_chunk"])
                assert plan["predicted_seconds"] * (1 + 0.04 * (chunks - 1)) >= chosen["predicted_seconds"]
            else:
                given = int(re.search(r"--budget (\d+)", plan["why_not"])[1])
                retried = ok("--json", *problem, device, "--budget", given).json["chosen"]
                assert retried["predicted_seconds"] <= plan["predicted_seconds"]
            assert any(plan["why_not"] in note for note in result["notes"])
    assert explained >= 3


def test_the_default_is_small_and_nearly_the_fastest(ok):
    heads = [("gemma-2-2b", "h200"), ("gemma-2-2b", "h100"), ("gpt2", "cpu"), ("gpt2", "h200"), ("llama-3-8b", "h200")]
    for model, device in heads:
        problem = ["plan", "--model", model, "-N", 8192, "--device", device]
        default, fastest = ok("--json", *problem).json, ok("--json", *problem, "--budget", "fastest").json
        assert (default["problem"]["fastest"], fastest["problem"]["fastest"]) == (False, True)
        chosen, fast = default["chosen"], fastest["chosen"]
        assert fast["choice"] == "the fastest" and "%" in chosen["choice"]
        assert chosen["workspace_bytes"] <= fast["workspace_bytes"]
        assert chosen["predicted_seconds"] <= 1.06 * fast["predicted_seconds"]
        assert fastest["plans"][0]["chosen"] and fastest["problem"]["budget_bytes"] == 0
        (row,) = (plan for plan in default["plans"] if plan["chosen"])
        assert row["choice"] == chosen["choice"] and any(chosen["choice"] in note for note in default["notes"])
        for plan in default["plans"]:
            assert bool(plan["why_not"]) == (plan["predicted_seconds"] < row["predicted_seconds"])
        if model == "gemma-2-2b":
            assert chosen["workspace_bytes"] <= 2.1 * 2**30
            assert "--budget fastest takes whole of 4.02 GiB" in ok(*problem).out
    example = ok("--json", "--threads", 2, "plan", "-N", 1024, "-V", 32768, "-D", 512, "--dtype", "f32").json
    assert example["chosen"]["workspace_bytes"] < example["materialized"]["logits_bytes"]


def test_plans_that_are_slow_are_marked(ok):
    problem = ["plan", "--model", "gemma-2-2b", "-N", 8192, "--device", "h200"]
    result = ok("--json", *problem).json
    fastest = result["plans"][0]["predicted_seconds"]
    assert [plan["slow"] for plan in result["plans"]] == [
        plan["predicted_seconds"] > 10 * fastest for plan in result["plans"]
    ]
    assert result["plans"][-1]["slow"] and not any("warning" in note for note in result["notes"])
    text = ok(*problem, "--budget", result["smallest_budget_bytes"]).out
    assert re.search(r"(?m)^\* vocab_chunks .* s !", text)
    assert re.search(
        r"(?m)^warning: the chosen plan is one of these; vocab_chunks of [\d.]+ MiB would\s+take [\d.]+ ms", text
    )


def test_times_say_what_they_are_of(ok):
    def times(*options):
        return ok("--json", "plan", "--model", "llama-3-8b", *options).json["times"]

    assert times("--device", "h200")["measured"] and "on an H200" in times("--device", "h200")["basis"]
    for device in ("h100", "a100", "b200", "rtx-4090", "cpu"):
        assert times("--device", device)["measured"] is False
        assert "\ntimes: unmeasured predictions" in ok("plan", "--model", "gpt2", "--device", device).out


def test_words_of_the_legend_have_no_stray_blanks(ok):
    for options in (["--device", "cpu"], ["--device", "a100"], ["--device", "b200", "--backend", "cuda:mma"]):
        result = ok("--json", "plan", "--model", "gpt2", "--budget", "64MiB", *options).json
        words = [entry["word"] for entry in result["words"]]
        assert all(word == word.strip(" ,") for word in words) and len(set(words)) == len(words)
    assert "mma 256x192" in words


def test_sparsified_plans_explain_exact_ones_and_say_when_not_to_use_them(ok):
    for gradient in ("exact", "sparsified", "always-sparsified"):
        notes = ok("--json", "plan", "--model", "gemma-2-2b", "--device", "h200", "--gradient", gradient).json["notes"]
        assert any("make exact gradients" in note for note in notes) == (gradient == "sparsified")
        assert any("fine-tuning" in note for note in notes) == (gradient != "exact")
