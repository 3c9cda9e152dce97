"""A headless Chromium, spoken to through a pipe: what a page looks like once it is laid out."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_SECONDS = 60


def find() -> str | None:
    """Return the path of a browser, or None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser; use as a context manager.

    The browser reads commands from its file descriptor 3 and answers on 4, one JSON object ended by
    a zero byte each.
    """

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # No sandbox: containers of CI jobs seldom allow one, and the page is our own.
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage"
        start = (
            f'exec "$0" {flags} --remote-debugging-pipe --user-data-dir="$1" about:blank '
            f"3<&{theirs_in} 4>&{theirs_out}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", start, program, str(profile)],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(_SECONDS)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events on the way are kept."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], _SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._in, 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def show(self, path: Path, *, width: int, scheme: str) -> None:
        """Load a page in a window of ``width`` pixels, "light" or "dark"."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=path.as_uri())
        wanted = ["complete", path.as_uri()]
        deadline = time.monotonic() + _SECONDS
        while self.ask("[document.readyState, location.href]") != wanted:
            assert time.monotonic() < deadline, "the page does not load"

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")
