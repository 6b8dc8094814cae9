"""Every command of the documentation runs unchanged, runs at a smaller size, or is listed here with a reason."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import blocks
import numpy
import pytest

# Commands that run smaller; all others run unchanged.
SMALLER = {
    "logitless bench": "logitless bench --shape 64,1000,32 --quiet",
    "logitless bench --shape 1024,32768,512": "logitless bench --shape 64,1000,32 --quiet",
    "logitless check": "logitless check --help",  # it also checks
}
# Keys are the beginnings of commands.
NOT_RUN = {
    "logitless bench --device cuda:0": "needs a GPU",
    "logitless tune": "needs a GPU",
    "pip install": "stage wheel of ./scripts/test installs a wheel",
    "./scripts/": "a stage of ./scripts/test, or that script itself",
    "cmake": "stage cpp of ./scripts/test builds with a compiler alone; presets are compared with CMake below",
    "ctest": "runs in stage cpp of ./scripts/test",
    ".venv/bin/python -m pytest": "runs in stage python of ./scripts/test",
    "python examples/": "runs in tests/python/test_example_clients.py",
    "python experiments/": "needs a GPU; experiments/convergence has tests of its own",
    "python hub/make.py": "runs in tests/install/test_hub.py",
    "kernel-builder": "publishes the package",
    "vllm serve": "needs a GPU; tests/python/test_vllm.py runs an engine on a CPU",
    "python bench/": "measures for minutes, or needs a GPU: its script and its options are checked below",
    "python -m pytest": "runs in stage python of ./scripts/test",
}
MODEL = {  # the configuration of a tiny model
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "num_attention_heads": 4,
}
COMMAND = re.compile(r"^    ((?:OMP_WAIT_POLICY=passive )?(?:python|logitless|\./scripts)\b.*)$", re.MULTILINE)


def commands(text):
    joined = text.replace("\\\n", " ")
    stripped = (re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


FENCED = [(blocks.name(block), line) for block in blocks.of("sh") for line in commands(block.text)]
INDENTED = [
    (str(page.relative_to(blocks.ROOT)), match[1])
    for page in blocks.PAGES
    for match in COMMAND.finditer(page.read_text())
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Makes a folder with a head in files, and `logitless` on its path."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("commands")
    (folder / "bin").mkdir()
    (folder / "bin" / "logitless").symlink_to(shutil.which(os.environ["LOGITLESS_CLI"]))
    random = numpy.random.default_rng(0)
    (folder / "my-model").mkdir()
    (folder / "my-model" / "config.json").write_text(json.dumps(MODEL))
    numpy.save(folder / "h.npy", random.standard_normal((12, 8), dtype="f4"))
    weight = random.standard_normal((50, 8), dtype="f4")
    numpy.save(folder / "w.npy", weight)
    save_file({"lm_head.weight": weight}, folder / "model.safetensors")
    numpy.save(folder / "y.npy", random.integers(0, 50, 12))
    numpy.save(folder / "ids.npy", random.integers(0, 50, (12, 4)))
    numpy.save(folder / "probs.npy", random.random((12, 4), dtype="f4"))
    return folder


@pytest.mark.parametrize("where, command", FENCED, ids=[f"{where} {command[:40]}" for where, command in FENCED])
def test_command(where, command, place):
    if any(command.startswith(beginning) for beginning in NOT_RUN):
        pytest.skip(next(reason for beginning, reason in NOT_RUN.items() if command.startswith(beginning)))
    path = [str(place / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    environment = dict(os.environ, PATH=os.pathsep.join(path), PYTHONPATH=str(blocks.ROOT / "python"))
    program = ["bash", "-ec", SMALLER.get(command, command)]
    done = subprocess.run(program, cwd=place, env=environment, capture_output=True, text=True)
    if "expected one of cpu, reference, got cuda" in done.stderr:
        pytest.skip("this build has no CUDA backend")
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout}{done.stderr}"


SHOWN = [block for block in blocks.of("text") if block.text.startswith("logitless plan ")]


@pytest.mark.parametrize("block", SHOWN, ids=[blocks.name(block) for block in SHOWN])
def test_the_plans_shown_are_those_printed(block):
    """Checks a command and a part of its output."""
    command, _, shown = block.text.partition("\n\n")
    done = subprocess.run([os.environ["LOGITLESS_CLI"], *command.split()[1:]], capture_output=True, text=True)
    assert shown in done.stdout, done.stdout + done.stderr


def test_nothing_is_excused_that_is_not_there():
    lines = [command for _, command in FENCED + INDENTED]
    for beginning in [*NOT_RUN, *SMALLER]:
        assert any(line.startswith(beginning) for line in lines), beginning


def scripts():
    """Returns scripts that pages name, some with a command, and all options that pages give them."""
    options_of = {}
    for where, command in FENCED + INDENTED:
        words = [word for word in shlex.split(command, comments=True) if "=" not in word or word.startswith("--")]
        if words[0] == "python" and words[1].endswith(".py"):
            of = words[2:3] if words[1].endswith("convergence/run.py") else []
            options = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
            options_of.setdefault((words[1], *of), {}).setdefault(where, set()).update(options)
    return options_of


@pytest.mark.parametrize("script", sorted(scripts()), ids=" ".join)
def test_a_measurement_can_be_asked_for_so(script):
    environment = dict(os.environ, PYTHONPATH=str(blocks.ROOT / "python"))
    asked = [sys.executable, *script, "--help"]
    said = subprocess.run(asked, capture_output=True, text=True, cwd=blocks.ROOT, env=environment, check=True).stdout
    for where, options in scripts()[script].items():
        missing = [option for option in options if not re.search(rf"{option}\b", said)]
        assert not missing, f"{where}: {' '.join(script)} has no {', '.join(missing)}"


def test_presets():
    done = subprocess.run(["cmake", "--list-presets=all"], cwd=blocks.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = {word for _, line in FENCED for word in re.findall(r"--preset (\w+)", line)}
    assert named and all(f'"{preset}"' in done.stdout for preset in named), (named, done.stdout)
