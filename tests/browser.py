"""A notebook as a person meets it: a real JupyterLab, a real Chromium, and a page with few words to
say what is done.

    with lab.open("mine", notebook) as page:
        page.run_all()
        page.finished()

`lab` is a fixture: a server of its own for each test, or a skip where there is no Chromium. `open`
ends with what holds for every page: no cell failed, every picture is drawn, nothing was asked of a
foreign host, the console is clean.

Footgun: Run All that is pressed before the kernel is connected opens a dialog in place of a run,
and nothing on the page says that the kernel is ready. So the server is asked first, and every wait
is for a fact, never for a time.
"""

import json
import os
import secrets
import shutil
import subprocess
import symtable
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib import request
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# ipywidgets' own: a view that is made after its output was replaced has no place. The page shows
# nothing of it.
LATE_VIEW = "Cannot read properties of null (reading 'addWidget')"
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
 --disable-component-update --disable-sync""".split()
# seconds: an answer on a busy machine; imports, or a base model that has to be made first
SOON, LONG = 120, 600

# Ends the server when the pipe to this test closes, which it does however the test ends, SIGKILL
# included.
GUARD = """import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
server.terminate()
try:
    server.wait(15)
except subprocess.TimeoutExpired:
    server.kill()
"""


@pytest.fixture
def lab(tmp_path) -> "Iterator[Lab]":
    """A JupyterLab that knows nothing of this user's settings, on a port of its own."""
    chromium = _chromium()
    (tmp_path / "notebooks").mkdir()
    token = secrets.token_hex(16)
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
    ]
    command += [
        "--ServerApp.port=0",
        f"--ServerApp.root_dir={tmp_path}/notebooks",
        f"--IdentityProvider.token={token}",
    ]
    with (tmp_path / "server.log").open("w") as log:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(tmp_path),
            start_new_session=True,
        )
        try:
            yield Lab(tmp_path, chromium, _address(tmp_path, token), token)
        finally:
            guard.stdin.close()
            guard.wait(30)


class Lab(NamedTuple):
    """A running server: its folder with `notebooks` and `outputs` in it, and what it takes to open
    a page.
    """

    folder: Path
    chromium: str
    url: str
    token: str

    def ask(self, what: str):
        return _ask(self.url, self.token, what)

    @contextmanager
    def open(self, name: str, notebook: dict) -> "Iterator[Page]":
        """The notebook in a page, its kernel waiting; at the end what holds for every page is
        checked.
        """
        from playwright.sync_api import sync_playwright

        path = self.folder / "notebooks" / f"{name}.ipynb"
        path.write_text(json.dumps(notebook))
        # one per test: its event loop would be in the way of other tests'
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=self.chromium, args=FLAGS)
            # tall, because cells far outside the view are not drawn
            page = Page(self, path, browser.new_page(viewport={"width": 1280, "height": 12_000}))
            try:
                page.goto()
                yield page
                page.check()
            finally:
                page.snapshot("last")  # the end, or where it failed
                browser.close()
        assert page.hosts == {"127.0.0.1"} and page.complaints == []


class Page:
    """A notebook's page; `on_page` is playwright's, for what is not said here."""

    def __init__(self, lab: Lab, path: Path, on_page):
        self.lab, self.path, self.on_page = lab, path, on_page
        self.hosts, self.complaints = set(), []
        on_page.set_default_timeout(1000 * SOON)
        # data: has no host
        on_page.on("request", lambda r: self.hosts.add(urlsplit(r.url).hostname or "127.0.0.1"))
        on_page.on(
            "console", lambda m: self.complaints.append(m.text) if m.type == "error" else None
        )
        on_page.on(
            "pageerror", lambda error: str(error) == LATE_VIEW or self.complaints.append(str(error))
        )
        on_page.on("websocket", lambda socket: self.hosts.add(urlsplit(socket.url).hostname))

    def goto(self) -> None:
        """Open the notebook; wait until the server says that the page is connected and the kernel
        waits.
        """
        self.on_page.goto(f"{self.lab.url}/lab/tree/{self.path.name}?token={self.lab.token}")
        self.on_page.locator(".jp-Notebook .jp-MarkdownOutput h1").first.wait_for()

        def ready() -> bool:
            kernels = [session["kernel"] for session in self.lab.ask("sessions")]
            return bool(kernels) and all(
                k["execution_state"] == "idle" and k["connections"] for k in kernels
            )

        self.until(ready, lambda: f"no idle kernel with a connection: {self.lab.ask('sessions')}")

    def run_all(self) -> None:
        self.on_page.get_by_role("menuitem", name="Run", exact=True).click()
        self.on_page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        assert self.on_page.get_by_role("dialog").count() == 0

    def until(
        self, fact: Callable[[], object], instead: Callable[[], object], seconds: float = SOON
    ) -> None:
        """Wait for a fact.

        A cell that fails ends the wait, and so does the deadline, saying what is there instead.
        """
        end = time.monotonic() + seconds
        while not fact():
            assert not self.errors(), self.errors()[0]
            assert time.monotonic() < end, instead()
            # lets the page's events through, where sleep would not
            self.on_page.wait_for_timeout(100)

    @property
    def running(self):
        """The prompts of the cells that run or wait."""
        return self.on_page.locator(".jp-InputPrompt", has_text="[*]")

    def finished(self) -> None:
        """Wait until no cell runs."""
        self.until(
            lambda: self.running.count() == 0, lambda: f"{self.running.count()} cells still run"
        )

    def errors(self) -> list[str]:
        """Outputs of failed cells.

        The page marks them as it marks stderr; only a traceback comes with red in it.
        """
        red = self.on_page.locator(".ansi-red-fg")
        stderr = self.on_page.locator(
            '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]'
        )
        return stderr.filter(has=red).all_inner_texts()

    @property
    def images(self):
        return self.on_page.locator(".jp-OutputArea img")

    def check(self) -> None:
        """No cell failed, and every image that a cell made is drawn."""
        assert self.errors() == []
        images = self.images.all()
        assert images
        for image in images:
            image.scroll_into_view_if_needed()
            assert image.evaluate("image => image.complete && image.naturalWidth") > 0

    def snapshot(self, name: str) -> None:
        """The whole page, for a person to look at; NBLIB_SCREENSHOTS names a folder that outlives
        the test.
        """
        kept = Path(os.environ.get("NBLIB_SCREENSHOTS") or self.lab.folder)
        kept.mkdir(parents=True, exist_ok=True)
        self.on_page.screenshot(path=kept / f"{self.path.stem}-{name}.png")


def stored(name: str) -> dict:
    """A notebook of the workbook with its outputs taken out, so that what the page shows was made
    now.
    """
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return notebook


def only(notebook: dict, text: str) -> dict:
    """The notebook's title, its one code cell with this text, and the cells before that make the
    names it needs.
    """
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (last,) = [i for i, cell in enumerate(codes) if text in "".join(cell["source"])]
    kept, wanted = [], set()
    for cell in reversed(codes[: last + 1]):
        needs, makes = _names("".join(cell["source"]))
        if not kept or wanted & makes:
            kept, wanted = [cell, *kept], wanted - makes | needs
    return notebook | {"cells": [notebook["cells"][0], *kept]}


def _names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell looks up in the kernel, at its top or inside functions, and those that
    it leaves there.
    """
    top = symtable.symtable(source, "cell", "exec")
    needs, makes, tables = set(), set(), [top]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                needs.add(symbol.get_name())
            if table is top and (symbol.is_assigned() or symbol.is_imported()):
                makes.add(symbol.get_name())
    return needs, makes


def _chromium() -> str:
    pytest.importorskip("playwright", reason="needs playwright (pip install -e .[test])")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(
            f"needs Chromium on the PATH (Debian: apt-get install chromium); looked for {', '.join(BROWSERS)}"
        )
    return found


def _environment(folder: Path) -> dict[str, str]:
    ours = {
        f"JUPYTER_{name}_DIR": str(folder / f"jupyter-{name.lower()}")
        for name in ("CONFIG", "DATA", "RUNTIME")
    }
    ours |= {
        f"JUPYTERLAB_{name}_DIR": str(folder / f"lab-{name.lower()}")
        for name in ("SETTINGS", "WORKSPACES")
    }
    # the question whether to fetch news would lie over the notebook
    news = (
        folder
        / "lab-settings"
        / "@jupyterlab"
        / "apputils-extension"
        / "notification.jupyterlab-settings"
    )
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}')
    ours |= {"JUPYTER_PREFER_ENV_PATH": "1", "IPYTHONDIR": str(folder / "ipython")}
    # one thread: beside another busy process two that wait for each other are ten times slower,
    # alone hardly faster
    ours |= {"OMP_NUM_THREADS": "1"}
    ours |= {"NBLIB_OUTPUTS": str(folder / "outputs")}  # NBLIB_BASE is set for all tests
    headless = ("NBLIB_HEADLESS", "NBLIB_RUN_DIR")  # a person sits at this kernel
    return {name: value for name, value in os.environ.items() if name not in headless} | ours


def _address(folder: Path, token: str) -> str:
    """Where the server listens, once it answers."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        for record in (folder / "jupyter-runtime").glob("jpserver-*.json"):
            try:
                url = f"http://127.0.0.1:{json.loads(record.read_text())['port']}"
                if _ask(url, token, "status"):
                    return url
            except (json.JSONDecodeError, OSError):  # half written; not listening yet
                pass
        time.sleep(0.1)
    pytest.fail("JupyterLab did not start: " + (folder / "server.log").read_text())


def _ask(url: str, token: str, what: str):
    asked = request.Request(f"{url}/api/{what}", headers={"Authorization": f"token {token}"})
    with request.build_opener(request.ProxyHandler({})).open(asked, timeout=30) as answer:
        return json.load(answer)
