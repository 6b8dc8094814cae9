"""Fields, presets and figures of the planner page, on screens of all widths."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys


def test_a_size_is_typed_as_on_the_command_line(page, native):
    """The field takes and refuses the same counts as the command line, with the same message; addresses do too."""
    for text in ("8k|8Ki|1.5k|16 Ki|8,192|0.5|1.15k|8kB|8e3|many|-3|2Ti|" + "9" * 20 + "|").split("|"):
        page.open()
        for key in ("tokens", "vocab", "hidden"):
            field = page.at(key)
            field.send_keys(Keys.CONTROL, "a", Keys.NULL, text or Keys.DELETE, Keys.TAB)
            given = text.replace(",", "")
            sizes = {"tokens": "1", "vocab": "1", "hidden": "1"} | {key: given}
            words = [word for name, size in sizes.items() for word in (f"--{name}", size)]
            expected, message = native("plan", *words, "--json") if given else (None, "")
            if message.startswith(f"--{key}: expected a whole number") or not given:
                assert field.get_attribute("aria-invalid") == "true" and field.get_attribute("value") == text
                expected = "expected a whole number such as 4096 or 128Ki, got ''"
                assert page.text(f"{key}-message") == (message.removeprefix(f"--{key}: ") or expected)
                assert page.run(f"return planner.state.{key} === defaults.{key}")
                page.go(f"{key}={given}")
                assert page.run(f"return planner.state.{key} === defaults.{key}")
                continue
            assert not page.at(f"{key}-message").is_displayed() and not field.get_attribute("aria-invalid")
            shown = page.run(f"return planner.state.{key}")
            if expected:
                assert shown == expected["problem"][key]
    page.open("tokens=8Ki&budget=none")
    assert page.run("return [planner.state.tokens, planner.state.budget]") == [8192, ""]
    assert page.at("budget").get_attribute("value") == "none" and not page.at("refusal").is_displayed()
    assert page.at("tokens").get_attribute("value") == "8,192"


def test_the_same_bytes_read_the_same_everywhere(page):
    """A plan's workspace is the same in the headline, the bars, the table, the list of memory and the chart."""
    for hash in ("budget=160MiB", "", "budget=none", "model=llama-3-8b&budget=700MiB", "gradient=sparsified"):
        page.go(hash)
        chosen = page.result()["chosen"]["workspace_bytes"]
        text = page.run("return formatWorkspace(arguments[0])", chosen)
        shown = page.run(
            """return [...document.querySelectorAll('[data-value]')]
                 .filter(e => e.dataset.value === String(arguments[0])).map(e => e.textContent)""",
            chosen,
        )
        assert len(shown) >= 3 and set(shown) == {text}
        assert page.text("headline").startswith(text) and f"{text}, " in page.texts(".chart .mark.chosen title")[0]


@pytest.mark.parametrize("size", [(1280, 720), (1000, 640), (800, 900), (360, 740)])
def test_the_fields_are_at_hand_wherever_one_is(page, size):
    """Fields stand beside the results, or one click away behind a line with the result."""
    page.screen(*size)
    page.open("device=cpu:avx2&gradient=sparsified")  # shows all of them
    in_view = """const box = document.getElementById(arguments[0]).getBoundingClientRect();
      return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth"""
    for place in ("plans-title", "chart", "stage"):
        page.run("document.getElementById(arguments[0]).scrollIntoView({block: 'start'})", place)
        if size[0] < 960:
            pinned = page.run("return pinnedText(memoryOf(planner.state, planner.result), planner.result)")
            assert page.run(in_view, "pinned") and page.text("pinned-text") == pinned
            assert page.at("pinned-open").accessible_name == "Change"
            page.at("pinned-open").click()
            assert page.at("pinned-open").get_attribute("aria-expanded") == "true"
        assert page.run(in_view, "tokens-slider") and page.run(in_view, "tokens")
        before = page.run("return planner.state.tokens")
        page.at("tokens-slider").send_keys(Keys.ARROW_RIGHT)
        assert page.run("return planner.state.tokens") > before
        page.run("document.getElementById('threshold').scrollIntoView({block: 'nearest'})")
        assert page.run(in_view, "threshold")
        if size[0] < 960:
            page.at("pinned-open").click()
            assert page.at("pinned-open").accessible_name == "Change"


def test_presets_show_what_it_is_for(page):
    """Each preset has a plan with much less memory than the logits, and no warning."""
    presets = page.driver.find_elements(By.CSS_SELECTOR, "#presets button")
    assert len(presets) >= 4
    for preset in presets:
        preset.click()
        result = page.result()
        assert result["chosen"] and result["chosen"]["workspace_bytes"] * 8 < page.bar("materialized"), page.hash()
        (chosen,) = (plan for plan in result["plans"] if plan["chosen"])
        assert not chosen["slow"] and not page.at("refusal").is_displayed()
