"""The site that scripts/site has built, in a headless Chromium: no block of code is cut off."""

import shutil

import blocks
import pytest

SITE = blocks.ROOT / "build" / "site"
PAGES = sorted(path for path in SITE.rglob("*.html") if "planner" not in path.relative_to(SITE).parts)
CUT_OFF = """const words = part => {
  const boxes = [], texts = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {  // spaces at the end of a line hang over
    for (const word of texts.currentNode.data.matchAll(/\\S+/g)) {
      const range = new Range();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      boxes.push(...range.getClientRects());
    }
  }
  return boxes;
};
return [...document.querySelectorAll('pre')].filter(block => {
  const right = Math.min(block.getBoundingClientRect().right, innerWidth);
  return words(block).some(box => box.right > right + 0.5);
}).map(block => block.innerText.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    if not PAGES or not shutil.which("chromium"):
        pytest.skip("./scripts/site builds the site, and Chromium shows it")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def test_no_block_of_code_is_cut_off(browser):
    cut, blocks_seen = {}, 0
    for page in PAGES:
        browser.get(page.as_uri())
        blocks_seen += browser.execute_script("return document.querySelectorAll('pre').length")
        for width in (1280, 360):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            cut_off = browser.execute_script(CUT_OFF)
            if cut_off:
                cut[f"{page.relative_to(SITE)}, {width} wide"] = cut_off
    assert blocks_seen > 100 and cut == {}
