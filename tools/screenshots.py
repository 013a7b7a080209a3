"""Pictures of a report as a phone and a desktop show it, light and dark: `python tools/screenshots.py RUN_OR_PAGE [OUT_DIR]`.

RUN is a run folder: its pictures go to RUN/screenshots/, which `fieldbook export --zip` takes along. A page (an .html file) needs an OUT_DIR.
Prints the path of each picture. Needs Chromium.
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests" / "live"
WIDTHS_PX = {"phone": 375, "desktop": 1280}


def take(page, source: Path, folder: Path) -> list[Path]:
    """Pictures of an HTML file in an open browser page, whole, for each width and scheme; a very long page takes several."""
    folder.mkdir(parents=True, exist_ok=True)
    name, pictures = source.parent.name if source.stem == "index" else source.stem, []
    page.visit(source.resolve().as_uri())
    for device, width_px in WIDTHS_PX.items():
        for scheme in ("light", "dark"):
            page.size(width_px, scheme=scheme)
            pictures += page.pictures(folder / f"{name}-{device}-{scheme}")
    return pictures


def main(arguments: list[str]) -> int:
    """Take the pictures of one report; exit status 2 and one line where there is nothing to take."""
    sys.path.insert(0, str(TESTS))
    import browser

    if not 1 <= len(arguments) <= 2:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    given = Path(arguments[0])
    source = given / "index.html" if given.is_dir() else given
    problem = "no such page" if not source.is_file() else "" if len(arguments) == 2 or given.is_dir() else "is a page: say where its pictures go"
    problem = problem or ("" if browser.CHROMIUM else "there is no Chromium on this machine")
    if problem:
        print(f"screenshots: {source}: {problem}", file=sys.stderr)
        return 2
    with browser.open_page("about:blank") as page:
        pictures = take(page, source, Path(arguments[1]) if len(arguments) == 2 else given / "screenshots")
    print(*pictures, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
