import pathlib
import re
import subprocess

import pytest

COMMANDS = ["info", "plan", "loss", "check", "bench"]
LOSS = ["loss", "--hidden", "h.npy", "--weight", "c.npy", "--targets", "y.npy"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_each_command_which_has_help_with_examples(ok, command):
    assert f"  {command} " in (every := ok("--help").out) and "Examples:" in every
    assert "Examples:" in (text := ok(command, "--help").out) and f"logitless {command}" in text.replace("--json ", "")


def test_version(ok):
    assert ok("--version").out.startswith("logitless ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["--nonsense"],
        ["info", "--nonsense"],
        ["info", "extra"],
        ["--threads", "-1", "info"],
        ["--threads", "many", "info"],
        ["--backend", "nonsense", "plan", "--model", "gpt2"],
        ["--backend", "nonsense", "info"],
        ["plan"],
        ["plan", "--vocab", "10"],
        ["plan", "--model", "no-such-model"],
        ["plan", "--model", "gpt2", "--tokens", "-5"],
        ["plan", "--model", "gpt2", "--tokens", "1.5"],
        ["plan", "--vocab", "0", "--hidden", "4"],
        ["plan", "--model", "gpt2", "--budget", "lots"],
        ["plan", "--model", "gpt2", "--budget", "-1MB"],
        ["plan", "--model", "gpt2", "--budget", "1e400"],
        ["plan", "--model", "gpt2", "--dtype", "int8"],
        ["plan", "--model", "gpt2", "--softcap", "-1"],
        ["plan", "--model", "gpt2", "--label-smoothing", "2"],
        ["plan", "--model", "gpt2", "--freeze-hidden", "--freeze-weight"],
        ["plan", "--model", "gpt2", "--device", "gpu"],
        ["plan", "--model", "gpt2", "--device", "cuda"],
        ["plan", "--model", "gpt2", "--device", "cuda:"],
        ["plan", "--model", "gpt2", "--device", "cuda:-1"],
        ["plan", "--model", "gpt2", "--device", "cuda:99999999999"],
        ["--backend", "cpu", "plan", "--model", "gpt2", "--device", "cuda:0"],
        ["loss"],
        ["loss", "--hidden", "h.npy", "--weight", "c.npy"],
        [*LOSS, "--reduction", "max"],
        [*LOSS, "--shift", "-1"],
        [*LOSS, "--per-token", "x.txt"],
        [*LOSS, "--gradients", "x.npy"],
        [*LOSS, "--gradients-of", "hidden"],
        ["bench", "--shape", "1,2"],
        ["bench", "--shape", "0,2,3"],
        ["bench", "--dtype", "f64"],
        ["bench", "--repeat", "0"],
    ],
)
def test_wrong_usage_is_exit_code_2(run, arguments):
    result = run(*arguments)
    assert result.code == 2, result.err
    assert result.err.strip()
    assert result.out == ""


@pytest.mark.parametrize(
    "option, arguments",
    [(option, LOSS) for option in
     ["--bias", "--class-weight", "--token-weight", "--per-token", "--gradients", "--gradients-of", "--budget"]]
    + [("--weight-dtype", ["plan", "--model", "gpt2"]), ("--model", ["plan", "--vocab", 100, "--hidden", 8]),
       ("--dtype", ["bench"]), ("--backend", ["info"])],
)  # fmt: skip
def test_an_empty_value_is_refused_and_not_ignored(refused, option, arguments):
    refused(2, f"{option}: expected a value, got ''", *arguments, option, "")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--temperature", "0", "a finite number > 0, got '0'"),
        ("--temperature", "inf", "a finite number > 0, got 'inf'"),
        ("--softcap", "-2", "a finite number >= 0, got '-2'"),
        ("--z-loss", "much", "a finite number >= 0, got 'much'"),
        ("--budget", "0", "more than 0 bytes, got '0'"),
        ("--budget", "many", "a size such as 256MiB or 1GB, got 'many'"),
    ],
)
def test_numbers_that_are_refused(refused, option, value, expected):
    refused(2, f"{option}: expected {expected}", "plan", "--model", "gpt2", option, value)


def test_wrong_usage_names_what_is_wrong_and_where_help_is(run):
    assert "no command 'nonsense'" in run("nonsense").err
    assert "no option --nonsense" in run("--nonsense").err
    assert "--targets is required" in (result := run("loss", "--hidden", "h.npy", "--weight", "c.npy")).err
    assert "logitless loss --help" in result.err


def test_the_command_of_the_python_package_is_named_as_such(refused):
    for arguments in ([], ["--help"], ["--config", "config.json"]):
        refused(2, "model: expected the Python package's logitless", "model", *arguments)


def test_a_small_budget_is_refused_under_the_name_that_the_user_typed(run):
    error = run("plan", "--model", "gpt2", "--budget", "1KiB").err
    assert "error: --budget: expected at least" in error and "max_workspace_bytes" not in error


def test_global_options_stand_on_either_side(ok):
    before = ok("--json", "plan", "--model", "gpt2").json
    behind = ok("plan", "--model", "gpt2", "--json").json
    assert before["problem"] == behind["problem"]


def test_full_stdout_is_a_failure(binary):
    with open("/dev/full", "w") as full:
        process = subprocess.run([binary, "info"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert process.returncode == 1
    assert "stdout" in process.stderr


def test_every_option_of_the_head_is_an_option_of_loss(ok):
    lines = (pathlib.Path(__file__).parents[2] / "include/logitless/options.def").read_text().splitlines()
    group, names = "", {}
    for line in lines:
        if match := re.match(r"LOGITLESS_OPTION_(GROUP|INTEGER|REAL|FLAG|CHOICE)\((\w+),", line):
            if match[1] == "GROUP":
                group = match[2]
            else:
                names.setdefault(group, []).append(match[2])
    assert set(names) == {"SIZES", "LOGITS", "LOSS", "TARGETS", "COMPUTATION", "SPARSIFIED", "RANKS"}
    helps = {command: ok(command, "--help").out for command in ("loss", "plan")}
    for group, options in names.items():
        for option in options:
            flag = "--budget" if option == "max_workspace_bytes" else "--" + option.replace("_", "-")
            own = group not in ("SIZES", "RANKS")
            for command, text in helps.items():
                offered = bool(re.search(rf"(?m)^  {flag}( |$)", text))
                assert not own or offered == (command == "loss" or group != "TARGETS"), (command, option)
