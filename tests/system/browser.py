"""A real Chromium without a screen, told what to do over a pipe (the Chrome DevTools Protocol)."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_SECONDS = 60.0
_FREE_FD = 10
"""Above those that the browser wants to find: it reads from 3 and writes to 4."""


def find_chromium() -> str | None:
    """The path of an installed browser."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    """One tab. Keeps what it asked the network for and what it complained about."""

    def __init__(self, browser: "Browser", session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.requested_urls: list[str] = []
        self.complaints: list[str] = []
        self.is_loaded = False

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def look(self, *, width: int, height: int = 900, dark: bool = False, still: bool = False) -> None:
        """As on a screen of this size, of somebody who wants it dark, or without motion."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.is_loaded = False
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while not self.is_loaded:
            self._browser.heed_one(deadline, f"the loading of {url}")

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def close(self) -> None:
        self._browser.call("Target.closeTarget", {"targetId": self._target})

    def screenshot(self, path: Path) -> None:
        """The whole page, as long as it is."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def heed(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested_urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Page.loadEventFired":
            self.is_loaded = True
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])


class Browser:
    """A process of its own. Methods fail after `ANSWER_TIMEOUT_SECONDS` without an answer."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._pages: dict[str, Page] = {}
        self._unread = b""

    def new_page(self) -> Page:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        self._pages[session] = Page(self, session, target)
        return self._pages[session]

    def call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS
        while True:
            heard = self.heed_one(deadline, method)
            if heard.get("id") == number:
                if "error" in heard:
                    raise AssertionError(f"{method}: {heard['error']}")
                return dict(heard["result"])

    def heed_one(self, deadline: float, during: str) -> dict[str, Any]:
        """The next message; events go to their pages."""
        heard = self._read(deadline, during)
        if page := self._pages.get(heard.get("sessionId", "")):
            page.heed(heard.get("method", ""), heard.get("params", {}))
        return heard

    def _read(self, deadline: float, during: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(self._from, 1 << 20) if ready else b""
            if not got:
                raise AssertionError(f"the browser {'ended' if ready else 'is silent'} during {during}")
            self._unread += got
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def running_browser(executable: str, profile: Path) -> Iterator[Browser]:
    """Its output goes to a file in `profile`."""
    browser_in, to_browser = (_moved(fd) for fd in os.pipe())
    from_browser, browser_out = (_moved(fd) for fd in os.pipe())
    output = os.open(profile / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    flags = ["--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
    flags += [
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-quic",
        "--disable-sync",
    ]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's own sandbox refuses root
    pid = os.posix_spawn(
        executable,
        [executable, *flags],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, browser_in, 3),
            (os.POSIX_SPAWN_DUP2, browser_out, 4),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ],
    )
    for fd in (browser_in, browser_out, output):
        os.close(fd)
    browser = Browser(to_browser, from_browser)
    try:
        yield browser
        browser.call("Browser.close", {})
    finally:
        os.close(to_browser)
        os.close(from_browser)
        _wait_ended(pid)


def _moved(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE_FD)
    os.close(fd)
    return moved


def _wait_ended(pid: int, patience_seconds: float = 10.0) -> None:
    deadline = time.monotonic() + patience_seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.02)
