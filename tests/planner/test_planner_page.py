import os
import pathlib
import random
import re

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

WIDE, PHONE = 1280, 360  # pixels
PLAN_KEYS = (
    "workspace_bytes cost_matmuls predicted_seconds fits token_chunk cached_columns vocab_window chosen config".split()
)


def usable_cpu_kernels(native):
    facts, _ = native("--json", "info")
    (cpu,) = (backend for backend in facts["backends"] if backend["name"] == "cpu")
    return re.search(r"runs ([^;]*);", cpu["description"])[1].split(", ")


def random_states(native, count):
    """Yields problems of all kinds: odd sizes, dtypes, devices, budgets, gradients; sizes of tens to a million."""
    draw = random.Random(21)
    models = [model["name"] for model in native("plan", "--list-models", "--json")[0]]
    kernels = [name for name in usable_cpu_kernels(native) if name != "portable"]  # its width is not fixed

    def size(least, most):
        return int(least * (most / least) ** draw.random())

    for i in range(count):
        state = {"tokens": size(1, 1 << 18), "dtype": draw.choice(["bf16", "bf16", "bf16", "f16", "f32", "f64"])}
        if i % 3 == 0:
            state["model"] = draw.choice(models)
        else:
            state |= {"model": "", "vocab": size(1, 1 << 19), "hidden": size(1, 1 << 13)}
            if i % 3 == 1:
                state["hidden"] = max(state["hidden"] // 64 * 64, 64)
        cuda = draw.choice(["h200", "h200", "h100", "a100", "a10", "l40s", "rtx-4090", "rtx-5090", "b200"])
        state["device"] = draw.choice([cuda] * 4 + [*(f"cpu:{name}" for name in kernels)])
        state["threads"] = draw.choice([1, 2, 7, 16, 64])
        state["pass"] = draw.choice(["gradients", "gradients", "gradients", "loss"])
        state["gradient"] = draw.choice(["exact", "exact", "sparsified", "always-sparsified"])
        state["threshold"] = f"2^-{draw.randint(6, 13)}"
        budgets = ["", "1MiB", f"{size(1, 4000)}MiB", f"{size(1, 4000)}MB", f"{size(1 << 20, 1 << 36)}", "1.5GiB"]
        yield state | {"budget": draw.choice(budgets)}


def show(page, state):
    page.go(page.run("return hashOfState({...defaults, ...arguments[0]})", state))


def check_against(native, page):
    expected, message = native(*page.arguments(), "--json")
    refusal = page.at("refusal")
    assert refusal.text == message and refusal.is_displayed() == bool(message)
    assert page.result() == expected
    if expected is None:
        return
    assert [row["plan"] for row in page.rows()] == [plan["plan"] for plan in expected["plans"]]
    for shown, plan in zip(page.rows(), expected["plans"], strict=True):
        assert [shown[key] for key in PLAN_KEYS] == [plan[key] for key in PLAN_KEYS]
    assert page.texts("#words > *") == [text for entry in expected["words"] for text in entry.values()]
    assert page.texts("#notes > li") == expected["notes"]
    assert page.texts("#kernels")[0].endswith(f"Times: {expected['times']['basis']}.")
    gradients = expected["problem"]["gradients"]
    logits = expected["materialized"]["logits_and_gradient_bytes" if gradients else "logits_bytes"]
    assert page.bar("materialized") == logits
    assert page.bar("chosen") == (expected["chosen"]["workspace_bytes"] if expected["chosen"] else None)


def test_numbers_are_those_of_the_command_line_for_random_problems(page, native):
    kinds, refused, beyond_32_bits = set(), 0, 0
    for state in random_states(native, 70):
        show(page, state)
        check_against(native, page)
        result = page.result()
        kinds |= {plan["plan"] for plan in result["plans"]} if result else set()
        refused += result is None or result["chosen"] is None
        beyond_32_bits += result is not None and max(plan["workspace_bytes"] for plan in result["plans"]) >= 1 << 32
    # The random states cover every kind.
    assert kinds == {"forward", "whole", "token_chunks", "vocab_chunks", "sparsified"}
    assert 5 <= refused <= 30 and beyond_32_bits >= 2


def test_the_devices_are_those_of_the_library(page, native):
    """The page lists all models of CUDA devices, and marks those whose times are predictions only."""
    _, message = native("plan", "--model", "gpt2", "--device", "h9000")
    listed = page.run("return choices.device")
    known = [device for device in listed if ":" not in device]
    assert all(f" {device}," in message for device in known)
    assert message.count(",") == len(known) + 2  # "cpu, cuda:N or a model, got ...": no other devices
    for device, name in listed.items():
        if ":" not in device:
            measured = native("--json", "plan", "--model", "gpt2", "--device", device)[0]["times"]["measured"]
            assert name.endswith(", not measured") != measured, device


def test_budgets_that_are_shown_are_enough(page, native):
    for state in random_states(native, 12):
        show(page, state)
        if page.result() is None:
            continue
        for plan in page.result()["plans"]:
            text = page.run("return formatWorkspace(arguments[0])", plan["workspace_bytes"])
            number, unit = text.split(" ")
            shown = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
            assert plan["workspace_bytes"] <= shown <= 1.01 * plan["workspace_bytes"] + 1, text


def test_a_page_has_no_files(page):
    """A model's name is never taken for a file's, whatever ran before."""
    answers = page.run(
        """
        const answers = new Set();
        for (let i = 0; i < 1000; i++) {
          const size = String(1 + i * 7919 % 1000003), device = ["h200", "a100"][i % 2];
          planner.library.run(["plan", "--tokens", "9".repeat(i % 200 + 1), "--vocab", "7", "--hidden", "8"]);
          const model = ["plan", "--model", "tests", "--tokens", size, "--device", device];
          answers.add(planner.library.run([...model, ...(i % 5 ? ["--budget", `${size}KiB`] : [])]).err);
        }
        return [...answers];"""
    )
    assert len(answers) == 1 and "--model: no model 'tests' in the table" in answers[0]


def test_the_state_is_in_the_address_and_comes_back(page, native):
    for state in random_states(native, 6):
        show(page, state)
        hash, shown, rows = page.hash(), page.run("return planner.state"), page.rows()
        if page.result() is None:
            rows = []  # these belong to the problem before and are hidden
        page.open(hash)
        assert page.hash() == hash and page.run("return planner.state") == shown and page.rows() == rows
    page.open("tokens=0&vocab=-3&device=abacus&dtype=bf17&nonsense=1&model=unknown&step=x")
    assert page.run("return planner.state") == page.run("return {...defaults, model: ''}")


def test_sliders_are_dragged(page, native):
    for key in ("tokens", "vocab", "hidden", "budget"):
        before = page.run(f"return planner.state.{key}")
        slider = page.at(f"{key}-slider")
        page.run("arguments[0].scrollIntoView({block: 'center'})", slider)
        width = slider.size["width"]
        position = page.run("return arguments[0].valueAsNumber / arguments[0].max", slider)
        drag = ActionChains(page.driver).move_to_element_with_offset(slider, int((position - 0.5) * (width - 16)), 0)
        drag.click_and_hold().move_by_offset(-width // 6, 0).move_by_offset(-4, 0).release().perform()
        after = page.run(f"return planner.state.{key}")
        assert after != before and f"{key}=" in page.hash()
        assert page.at(key).get_attribute("value").replace(",", "") == str(after)
        check_against(native, page)
    # These sizes belong to no model.
    assert page.run("return planner.state.model") == ""
    assert Select(page.at("model")).first_selected_option.text == "custom sizes"


def test_the_keyboard_is_enough(page, native):
    page.at("tokens-slider").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.run("return planner.state.tokens") > 8192
    page.at("budget-slider").send_keys(Keys.END)
    assert page.run("return planner.state.budget") == "" and page.at("budget").get_attribute("value") == "none"
    page.at("budget").send_keys(Keys.CONTROL, "a", Keys.NULL, "321 MiB", Keys.TAB)
    assert page.result()["problem"]["budget_bytes"] == 321 << 20
    page.at("device").send_keys("CPU, AVX2")
    check_against(native, page)
    page.at("step").send_keys(Keys.ARROW_RIGHT)
    assert page.run("return planner.state.step") == 1
    page.at("step-on").send_keys(Keys.ENTER)
    assert page.run("return planner.state.step") == 2
    page.at("tokens").send_keys(Keys.CONTROL, "a", Keys.NULL, "many", Keys.TAB)
    assert page.at("tokens").get_attribute("aria-invalid") == "true" and "tokens=many" not in page.hash()
    # Tab reaches every control, in the order of the page.
    page.run("document.activeElement.blur(); scrollTo(0, 0)")
    reached = []
    for _ in range(60):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("return document.activeElement.id"))
    assert {"model", "tokens-slider", "budget", "device", "chunk", "copy", "loop-plain", "step", "play"} <= set(reached)


def test_an_unknown_budget_is_refused_in_the_librarys_words(page, native):
    page.go("budget=lots")
    assert "--budget: expected a size such as 256MiB" in page.text("refusal")
    check_against(native, page)
    page.go("budget=1MiB")
    assert "expected at least 9957568" in page.text("refusal") and "9.50 MiB" in page.text("headline")


BLOGS_BARS = "model=&vocab=128000&hidden=4096&budget=1000MiB&loop=plain&step=2"
BLOGS_LOOP = "model=&tokens=32&vocab=128000&hidden=4096&chunk=4&budget=none&loop=plain&step=2"


def test_the_blogs_bars(page):
    page.go(BLOGS_BARS)
    assert page.bar("materialized") == 2 * 4 * 8192 * 128000 and "7.81 GiB" in page.text("bar-materialized")
    assert page.bar("plain") == 2 * 4 * 1024 * 128000 and "1000 MiB" in page.text("bar-plain")
    assert "87.5% less" in page.text("counted")
    for name, width in (("materialized", "100%"), ("plain", "12.5%")):
        assert page.run(f"return document.querySelector('.fill.{name}').style.width") == width


def test_the_blogs_loop(page):
    page.open(BLOGS_LOOP)
    assert "Chunk 3 of 8 · tokens processed 8 of 32" in page.text("step-text")
    page.at("step").send_keys(Keys.END)
    assert "Chunk 8 of 8 · tokens processed 28 of 32" in page.text("step-text")
    assert "4 × 128,000" in page.text("resident")


def test_steps_cover_the_problem_and_end_with_it(page, native):
    for state in random_states(native, 40):
        show(page, state)
        if page.result() is None:
            continue
        problems = page.run(
            """const {problem, plans} = planner.result, wrong = [];
            const loops = [...plans.map(plan => stepsOfPlan(planner.result, plan)), stepsOfPlainLoop(problem, 1000)];
            for (const steps of loops) {
              let rows = 0, area = 0;
              const stride = Math.max(Math.floor(steps.count / 3000), 1);
              for (let i = 0; i < steps.count; i += stride) {
                const {made, held} = steps.at(i);
                for (const [r0, r1, c0, c1] of [made, ...held.map(h => h.area)].filter(Boolean)) {
                  const inside = r1 <= problem.tokens && c1 <= problem.vocab;
                  if (!(0 <= r0 && r0 < r1 && 0 <= c0 && c0 < c1 && inside)) wrong.push(['area', i]);
                }
                if (made && made[2] === 0 && made[3] === problem.vocab) area += made[1] - made[0];
              }
              if (stride === 1 && area < problem.tokens) wrong.push(['tokens without logits', area]);
              const last = steps.at(steps.count - 1);
              const gradients = last.hiddenDone === problem.tokens && last.weightDone === problem.vocab;
              const done = problem.gradients ? gradients && !last.partial : last.made[1] === problem.tokens;
              if (!done) wrong.push(['end', last]);
            }
            return wrong"""
        )
        assert problems == [], state


def test_the_curve_never_rises_and_meets_the_chosen_plan(page):
    page.wait("return planner.points.length > 3")
    points, result = page.run("return planner.points"), page.result()
    best = [min(p["seconds"] for p in points if p["bytes"] <= q["bytes"]) for q in points]
    assert best == sorted(best, reverse=True)
    assert points[0]["bytes"] == result["smallest_budget_bytes"]
    assert page.driver.find_elements(By.CSS_SELECTOR, ".chart .mark.chosen")


def test_measured_points_are_shown_where_there_are_any(page):
    assert "torch.compile" in page.text("measured") and "41.3 ms" in page.text("measured")
    assert "H200" in page.text("measured-sources")
    page.go("device=a100")
    assert "Nothing was measured at these sizes" in page.text("measured-note")
    assert not page.at("measured").is_displayed()


@pytest.mark.parametrize(
    "hash", ["", "device=cpu:avx2&dtype=f32", "budget=1MiB", "gradient=sparsified&budget=", "budget=lots"]
)
def test_a_phone_is_wide_enough(page, hash):
    page.screen(PHONE)
    page.open(hash)
    assert page.run("return document.documentElement.scrollWidth") == PHONE
    outside = page.run(
        """return [...document.querySelectorAll('body *')]
             .filter(e => !e.closest('.scroll > *, #plans thead') && e.getClientRects().length)
             .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert outside == []


def luminance(color):
    numbers = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
    linear = [n / 12.92 if n <= 0.04045 else ((n + 0.055) / 1.055) ** 2.4 for n in numbers]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_in_light_and_dark(page, dark):
    page.screen(WIDE, dark=dark)

    def color(selector, what="color"):
        script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
        return luminance(page.run(script, selector, what))

    paper = color("section", "backgroundColor")
    assert (paper < 0.1) == dark
    for selector in ("h2", ".note", "th.own", ".chart .tick", ".chart .label"):
        ink = color(selector, "fill" if "chart" in selector else "color")
        lighter, darker = sorted((ink, paper), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, selector


def test_controls_have_names_and_nothing_is_fetched(page):
    page.go("device=cpu:avx2&gradient=sparsified")  # shows all of them
    for width in (WIDE, PHONE):
        page.screen(width)
        for control in page.driver.find_elements(By.CSS_SELECTOR, "input, select, button"):
            hidden = width == WIDE and control.get_attribute("id") == "pinned-open"
            assert hidden or control.accessible_name.strip(), control.get_attribute("outerHTML")
    addresses = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(address.startswith(("file:", "data:")) for address in addresses)


def test_screenshots(page):
    """Takes screenshots for people into LOGITLESS_PLANNER/../screenshots."""
    folder = pathlib.Path(os.environ["LOGITLESS_PLANNER"]).resolve().parent / "screenshots"
    folder.mkdir(exist_ok=True)
    for name, width, dark, hash in (
        ("wide-light", WIDE, False, ""),
        ("wide-dark", WIDE, True, "gradient=sparsified&budget="),
        ("phone-light", PHONE, False, BLOGS_BARS),
        ("phone-dark", PHONE, True, "device=cpu:avx2&tokens=2048&step=4"),
    ):
        page.screen(width, dark=dark)
        page.open(hash)
        page.wait("return document.documentElement.dataset.curve !== undefined")
        page.screen(width, page.run("return document.documentElement.scrollHeight"), dark)
        assert page.driver.save_screenshot(str(folder / f"{name}.png"))
