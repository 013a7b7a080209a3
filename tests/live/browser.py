"""A page in a real headless Chromium, driven over its DevTools socket. Just enough to open a page, look at what it shows, and hear what it does."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURE_PX = 16000  # Chromium draws no surface higher than 16384
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *(
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--remote-debugging-address=127.0.0.1",
        "--remote-debugging-port=0",
        "--window-size=1400,1000",
    ),
]


class Page:
    """One tab: evaluate JavaScript in it, wait until an expression is true, take a picture.

    `events` is what the browser told meanwhile, in order: (method, parameters) of every domain that was enabled.
    """

    def __init__(self, socket):
        self._socket, self._numbers = socket, itertools.count(1)
        self.events: list[tuple[str, dict]] = []

    def call(self, method: str, **parameters):
        """One DevTools command; events that arrive meanwhile are kept in `events`."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            if "method" in answer:
                self.events.append((answer["method"], answer["params"]))

    def evaluate(self, expression: str):
        """Value of a JavaScript expression; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float):
        """Wait until the expression is true; returns its value."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                value = self.evaluate(expression)
                if value:
                    return value
            time.sleep(0.3)
        raise AssertionError(f"not true within {timeout_s:.0f} s: {expression}")

    def listen(self, *, offline: bool = False):
        """Hear requests, console messages and log entries (CSP violations among them) from now on; cut the network off where asked."""
        for domain in ("Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        if offline:
            self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def visit(self, url: str, timeout_s: float = 30):
        """Go to an address and wait until it is loaded whole."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.split('#')[0] == {json.dumps(url.split('#')[0])} && document.readyState == 'complete'", timeout_s)

    def size(self, width_px: int, height_px: int = 900, scheme: str = "light", media: str = ""):
        """Be a screen of this width in a light or dark scheme, or paper (media 'print')."""
        self.call("Emulation.setDeviceMetricsOverride", width=width_px, height=height_px, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])

    def pictures(self, stem: Path) -> list[Path]:
        """Write the whole page as PNG files: stem.png, and what lies beyond its PICTURE_PX as stem-2.png and so on."""
        size, written = self.call("Page.getLayoutMetrics")["cssContentSize"], []
        for top_px in range(0, int(size["height"]), PICTURE_PX):
            clip = {"x": 0, "y": top_px, "width": size["width"], "height": min(size["height"] - top_px, PICTURE_PX), "scale": 1}
            answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
            file = stem.with_name(stem.name + (f"-{len(written) + 1}" if written else "") + ".png")
            file.write_bytes(base64.b64decode(answer["data"]))
            written.append(file)
        return written

    def key(self, name: str, code: int = 0, text: str = ""):
        """Press and release one key: Tab, ArrowDown, or Space with its code and text."""
        for kind in ("keyDown", "keyUp"):
            words = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **words)


@contextlib.contextmanager
def open_page(url: str):
    """Start Chromium with an empty profile, open the address, and end the whole browser afterwards."""
    import websocket

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen([CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True)
        try:
            line = next(line for line in browser.stderr if "DevTools listening on" in line)
            base = line.split("ws://")[1].split("/")[0]
            tabs = json.load(urllib.request.urlopen(f"http://{base}/json", timeout=30))
            target = next(tab for tab in tabs if tab["type"] == "page")
            socket = websocket.create_connection(target["webSocketDebuggerUrl"], timeout=600, suppress_origin=True)
            page = Page(socket)
            page.call("Page.enable")
            page.call("Page.navigate", url=url)
            yield page
            socket.close()
        finally:
            browser.terminate()
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
