"""A page in a real headless Chromium, driven over its DevTools socket. Just enough to open JupyterLab and look at what it shows."""

import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--remote-debugging-address=127.0.0.1", "--remote-debugging-port=0", "--window-size=1400,1000"),
]


class Page:
    """One tab: evaluate JavaScript in it, wait until an expression is true, take a picture."""

    def __init__(self, socket):
        self._socket, self._numbers = socket, itertools.count(1)

    def call(self, method: str, **parameters):
        """One DevTools command; events that arrive meanwhile are dropped."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

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
