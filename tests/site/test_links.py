"""The site that scripts/site has built: every internal link leads somewhere, external ones are well-formed."""

import html.parser
import pathlib
import re
import urllib.parse

import blocks
import pytest

SITE = blocks.ROOT / "build" / "site"


class Page(html.parser.HTMLParser):
    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.images_without_text: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        self.links += [given[key] for key in ("href", "src") if given.get(key)]
        if tag == "img" and not given.get("alt"):
            self.images_without_text.append(given.get("src", ""))


@pytest.fixture(scope="module")
def pages():
    if not (SITE / "index.html").exists():
        pytest.skip("./scripts/site builds the site")
    return {path: Page(path) for path in SITE.rglob("*.html") if "planner" not in path.parts}


def test_links_inside(pages):
    missing = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlparse(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(target)
            anchor = urllib.parse.unquote(parts.fragment)
            if not target.exists() or (known and anchor and anchor not in known.anchors and anchor != "__skip"):
                missing.append(f"{path.relative_to(SITE)}: {link}")
    assert not missing, "\n".join(missing)


def test_links_of_a_clone():
    """The target of a page's link exists without the site, as on a hub of repositories."""
    missing = []
    for page in blocks.PAGES:
        prose = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            parts = urllib.parse.urlparse(link)
            if not parts.scheme and parts.path and not (page.parent / parts.path).exists():
                missing.append(f"{page.relative_to(blocks.ROOT)}: {link}")
    assert not missing, "\n".join(missing)


def test_links_outside(pages):
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlparse(link)
            if parts.scheme and parts.scheme not in ("data", "javascript"):
                assert parts.scheme == "https" and "." in parts.netloc, f"{path.relative_to(SITE)}: {link}"


def test_images_say_what_they_show(pages):
    assert not [name for page in pages.values() for name in page.images_without_text]


def test_nothing_is_loaded_from_elsewhere(pages):
    """The site opens from a folder without a network."""
    for path in pages:
        text = path.read_text()
        assert 'src="http' not in text and 'rel="stylesheet" href="http' not in text, path


def test_the_headers_reference_has_every_function(pages):
    shown = "".join(path.read_text() for path in (SITE / "reference" / "headers").glob("*.html"))
    headers = (blocks.ROOT / "include" / "logitless").glob("*.h")
    names = {name for path in headers for name in re.findall(r"^LOGITLESS_API[^;(]*?(\w+)\(", path.read_text(), re.M)}
    assert len(names) > 20 and not {name for name in names if f">{name} <" not in shown and f">{name}<" not in shown}
    assert "p_ij &gt;= threshold" in shown and "doxygen-awesome.css" in shown  # an opening comment, and the theme


def test_boxes_say_one_thing_on_every_page():
    texts: dict[str, dict[str, str]] = {}
    for path in (blocks.ROOT / "docs").rglob("*.md"):
        for title, text in re.findall(r'^!!! \w+ "([^"]+)"\n((?:    .*\n)+)', path.read_text(), re.M):
            texts.setdefault(title, {})[path.name] = text
    assert len(texts["Which budget?"]) >= 5 and len(texts["Should I use sparsified gradients?"]) >= 5
    for title, by_page in texts.items():
        assert len(set(by_page.values())) == 1, f"{title}: {sorted(by_page)}"
