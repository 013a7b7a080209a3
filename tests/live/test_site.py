"""The pages in a real browser with the network cut off: what they load, what they say, how they are used by keyboard, how they look.

The reports are made up (test_publish) but for one, whose notebooks are the golden ones: real tables and charts without a walk of half a minute.
"""

import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import browser
import pytest

from fieldbook import export, files, publish, site

pytestmark = [pytest.mark.live, pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")]
ROOT = Path(__file__).resolve().parents[2]
AXE_WHEEL, AXE_FOLDER = "axe-playwright-python==0.1.8", ROOT / "data" / "models" / "cache" / "axe"
AXE_SHA256 = "fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8"
NO_NETWORK = re.compile(r"connection|timed? ?out|resol|unreachable|retrying|proxy|ssl|offline", re.I)
PAGES = ("report", "stopped", "index", "exported")
WATCH = "addEventListener('securitypolicyviolation', e => (window.violations ||= []).push(e.violatedDirective + ' ' + e.blockedURI))"


def module_at(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made_up, screenshots = module_at(ROOT / "tests" / "unit" / "test_publish.py"), module_at(ROOT / "tools" / "screenshots.py")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of the four pages: a whole report, one that stopped, the index over three runs, and the stopped one exported, alone in its folder."""
    folder = tmp_path_factory.mktemp("site") / "reports"
    flagged = {"05_server_launch": {"pool_tokens": (46592, "tokens", "recorded", "the report", "KV pool, boot log", True, "47 104 tokens from its own blocks")}}
    report = made_up.fake_run(folder / "cpu-smollm2-replay" / "walked", box="cpu-smollm2-replay", kind="recorded", figures=made_up.FIGURES | flagged)
    for notebook in (ROOT / "tests" / "golden" / "cpu-smollm2-replay").glob("*.ipynb"):
        shutil.copy(notebook, report)
    stopped = made_up.fake_run(folder / "cpu-smollm2" / "stopped", publish.STATIONS[:3], fail=publish.STATIONS[2], hostile=True, day=28)
    made_up.fake_run(folder / "a100-x8" / "older", box="a100-x8", gpus=[("NVIDIA A100-SXM4-80GB", "Ampere")] * 8, day=20)
    alone = Path(export.export(stopped, str(folder.parent / "alone" / "exported.html"))["html"])
    return {
        "report": publish.write_report(report).as_uri(),
        "stopped": publish.write_report(stopped).as_uri(),
        "index": site.write_index(folder).as_uri(),
        "exported": alone.as_uri(),
    }


@pytest.fixture(scope="module")
def page():
    """One tab for all tests, offline from its first request on; what it hears is in `events`."""
    with browser.open_page("about:blank") as tab:
        tab.listen(offline=True)
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        yield tab


def told(page) -> dict[str, list[str]]:
    """What the tab has asked for beyond its own files, and what the console said, since the events were last cleared."""
    asked = [event["request"]["url"] for method, event in page.events if method == "Network.requestWillBeSent"]
    said = [f"{event['type']}: {event['args']}" for method, event in page.events if method == "Runtime.consoleAPICalled"]
    said += [f"{e['entry']['level']}: {e['entry']['text']}" for method, e in page.events if method == "Log.entryAdded"]
    thrown = [event["exceptionDetails"]["text"] for method, event in page.events if method == "Runtime.exceptionThrown"]
    return {
        "asked": [url for url in asked if not url.startswith(("file:", "data:"))],
        "said": [text for text in said if text.startswith(("error", "warning"))] + thrown,
        "refused": page.evaluate("window.violations || []"),
    }


def opened(page, url: str, width_px: int = 1280, scheme: str = "light", media: str = ""):
    page.events.clear()
    page.size(width_px, scheme=scheme, media=media)
    page.visit(url)
    return page


def test_what_a_page_loads_and_says_is_heard(page, tmp_path):
    bad = tmp_path / "bad.html"
    policy = "default-src 'none'; img-src http:"
    head = f'<!doctype html><html><head><title>bad</title><meta http-equiv="Content-Security-Policy" content="{policy}"></head>'
    bad.write_text(f'{head}<body><img src="http://elsewhere.example/a.png"><script>document.title = "ran"</script></body></html>')
    opened(page, bad.as_uri())
    page.evaluate("console.warn('a word')")
    heard = told(page)
    assert heard["asked"] == ["http://elsewhere.example/a.png"] and heard["refused"] == ["script-src-elem inline"]
    assert [text for text in heard["said"] if "a word" in text] != [] and [text for text in heard["said"] if "Content Security Policy" in text] != []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_network_and_without_a_word(page, pages, name):
    opened(page, pages[name])
    assert told(page) == {"asked": [], "said": [], "refused": []}
    assert page.evaluate("document.querySelectorAll('main h2').length") >= 4


@pytest.mark.parametrize(("name", "width_px"), [("report", 1280), ("stopped", 375), ("index", 375)])
def test_every_contents_link_leads_to_its_place(page, pages, name, width_px):
    opened(page, pages[name], width_px)
    page.evaluate("document.querySelectorAll('nav details').forEach(one => one.open = true)")
    links = json.loads(
        page.evaluate(
            """(async () => {
              const found = [], frame = () => new Promise(resolve => requestAnimationFrame(resolve))
              for (const link of [...document.querySelectorAll('nav a')].filter(one => one.checkVisibility())) {
                scrollTo(0, 0); link.click(); await frame()
                const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))
                const at = target?.getBoundingClientRect()
                found.push([link.getAttribute('href'), location.hash, !!at && at.top > -2 && at.top < innerHeight])
              }
              return JSON.stringify(found)
            })()"""
        )
    )
    assert len(links) >= {"report": 60, "stopped": 12, "index": 8}[name]
    assert [link for link in links if link[0] != link[1] or not link[2]] == []


@pytest.mark.parametrize("name", PAGES)
def test_headings_are_in_the_language_that_is_chosen(page, pages, name):
    looked_at = "main h2, main h3.section, .contents h2, nav a"
    headings = f"JSON.stringify([...document.querySelectorAll('{looked_at}')].filter(one => one.checkVisibility()).map(one => one.innerText.trim()))"
    opened(page, pages[name], scheme="dark")
    english = page.evaluate(headings)
    page.evaluate("document.getElementById('lang-en').focus()")
    page.key("ArrowRight", 39)
    chinese = page.evaluate(headings)
    assert not re.search(r"[\u4e00-\u9fff]", english) and "Evidence labels" in english
    assert "证据标签" in chinese and "Evidence labels" not in chinese
    assert page.evaluate("getComputedStyle(document.querySelector('#evidence-title .en')).display") == "none"
    page.key("ArrowLeft", 37)
    assert page.evaluate(headings) == english


SHOWN = """JSON.stringify([...document.querySelectorAll('.compare thead th, .compare tbody tr')].filter(e => e.checkVisibility())
  .map(e => e.innerText.replace(/\\s+/g, ' ').trim()))"""


def test_the_comparison_shows_the_two_runs_that_are_chosen(page, pages):
    opened(page, pages["index"])
    before = json.loads(page.evaluate(SHOWN))
    assert before[:4] == ["Figure", "Left run cpu-smollm2-replay walked", "Right run cpu-smollm2 stopped", "left / right"]
    assert "Family of box CPU CPU" in before and "KV pool, predicted 46 592 tokens computed 46 592 tokens computed x1" in before
    assert not [row for row in before if row.startswith("Start to ready")]  # neither of the two has told it
    page.evaluate("document.getElementById('right-1').focus()")
    page.key("ArrowDown", 40)
    after = json.loads(page.evaluate(SHOWN))
    assert after[2] == "Right run a100-x8 older" and "Family of box CPU Ampere: 8 x A100" in after
    decode = next(row for row in after if row.startswith("Decode"))
    assert decode == "Decode 23.46 tok/s measured 23.46 tok/s measured x1"
    pool = next(row for row in after if row.startswith("KV pool, boot log"))
    assert "DISAGREES: 47 104 tokens from its own blocks" in pool
    page.size(794, media="print")
    printed = json.loads(page.evaluate(SHOWN))
    assert printed[1:3] == after[1:3] and len(printed) == len(after)
    assert not page.evaluate("document.querySelector('.chooser').checkVisibility()")


@pytest.mark.parametrize(("name", "radios"), [("report", ["lang-en"]), ("index", ["lang-en", "left-0", "right-1"]), ("exported", ["lang-en"])])
def test_the_keyboard_reaches_the_skip_link_and_every_choice_with_a_visible_focus(page, pages, name, radios):
    opened(page, pages[name])
    seen = []
    for _ in range(60):
        page.key("Tab", 9)
        focus = """(() => { const e = document.activeElement, r = e.getBoundingClientRect(), s = getComputedStyle(e)
          return [e.id || e.className || e.tagName, r.left >= 0 && r.top >= -1 && r.top < innerHeight, s.outlineStyle, parseFloat(s.outlineWidth)] })()"""
        seen.append(page.evaluate(focus))
        if radios[-1] in (one[0] for one in seen):
            break
    assert seen[0][0] == "skip"
    assert [radio for radio in radios if radio not in [one[0] for one in seen]] == []
    assert [one for one in seen if not one[1] or one[2] == "none" or one[3] < 2] == []


@pytest.mark.parametrize("width_px", [375, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_wider_than_its_screen(page, pages, name, width_px):
    opened(page, pages[name], width_px)
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width_px


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """The text of axe-core, out of a wheel that is fetched once and kept. Skips where there is no network; any other way of lacking it is an error."""
    kept = list(AXE_FOLDER.glob("*.whl"))
    if not kept:
        scratch = tmp_path_factory.mktemp("axe")
        command = [sys.executable, "-m", "pip", "download", "-q", "--retries", "1", "--timeout", "15", "--no-deps", "--dest", str(scratch), AXE_WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{AXE_WHEEL} cannot be fetched here: no answer")
        if done.returncode and NO_NETWORK.search(done.stderr):
            pytest.skip(f"{AXE_WHEEL} cannot be fetched here: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        wheel = next(scratch.glob("*.whl"))
        kept = [files.write_whole(AXE_FOLDER / wheel.name, wheel.read_bytes())]
    assert files.sha256_of(kept[0]) == AXE_SHA256, f"{kept[0]}: not the wheel that was looked at; remove it"
    with zipfile.ZipFile(kept[0]) as archive:
        return archive.read("axe_playwright_python/axe.min.js").decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES[:3])
def test_axe_finds_nothing_serious(page, pages, axe, name, scheme):
    opened(page, pages[name], 1280 if scheme == "light" else 375, scheme)
    # All code of the walked report, opened too, would take ten seconds a look: its colours are those of the stopped one's.
    page.evaluate(f"document.querySelectorAll('{'.figures' if name == 'report' else 'details'}').forEach(one => one.open = true)")
    page.evaluate(f"{axe}; true")
    # In the dark only the colours are others, and one station of each kind has them all.
    part = "{exclude: ['01', '03', '04', '07'].map(n => ['#s' + n])}" if (name, scheme) == ("report", "dark") else "document"
    told = "r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html).slice(0, 5)])"
    found = json.loads(page.evaluate(f"axe.run({part}, {{resultTypes: ['violations'], selectors: false}}).then(r => JSON.stringify({told}))"))
    assert [violation for violation in found if violation[0] in ("serious", "critical")] == []


def test_pictures_are_taken_of_phone_and_desktop_in_light_and_dark(page, pages, tmp_path, monkeypatch):
    monkeypatch.setattr(browser, "PICTURE_PX", 4000)
    pictures = screenshots.take(page, Path(pages["index"].removeprefix("file://")), tmp_path / "pictures")
    sizes = {file.name: struct.unpack(">II", file.read_bytes()[16:24]) for file in pictures}
    firsts = {name: width for name, (width, _) in sizes.items() if not name.endswith("-2.png")}
    assert firsts == {
        "reports-phone-light.png": 375, "reports-phone-dark.png": 375, "reports-desktop-light.png": 1280, "reports-desktop-dark.png": 1280,
    }  # fmt: skip
    # A phone shows the same in more than one piece, each no higher than it may be.
    assert sizes["reports-phone-light.png"] == (375, 4000) and 0 < sizes["reports-phone-light-2.png"][1] <= 4000
    assert 2000 < sizes["reports-desktop-light.png"][1] <= 4000
