"""JupyterLab as a person meets it: a real server, a real Chromium, notebook 00 by Run All, a slider, the Stop button.

The browser test asserts what the page shows, not what the kernel holds: the progress line while the live cell trains,
the rate that the slider asked for, the word of the button, pictures that are drawn, no error, no foreign host. The
other test needs no browser: `make lab` on a port that is taken.

Footgun: Run All that is pressed before the kernel is connected opens a dialog in place of a run, and nothing on the
page says that the kernel is ready. So the server is asked first, and every wait is for a fact, never for a time.
"""

import json
import math
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib import request
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
 --disable-component-update --disable-sync""".split()
TOTAL = 100_000  # steps of the live cell: more than anyone waits for, so only Stop ends it
LIVE = re.compile(rf"live: step (\d+) of {TOTAL}, loss \d")
ENDED = re.compile(rf"ended at step (\d+) of {TOTAL}, rate (\S+)")
RATE = 3e-4  # what the live cell asks for, before the slider
PRESSES = 5  # of the left arrow: 10 ** -0.5 of the rate
SOON, BASE_MODEL = 60_000, 600_000  # milliseconds: an answer on a busy machine; a base model that has to be made first

# Ends the server when the pipe to this test closes, which it does however the test ends, SIGKILL included.
GUARD = """import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
server.terminate()
try:
    server.wait(15)
except subprocess.TimeoutExpired:
    server.kill()
"""


@pytest.mark.slow
@pytest.mark.browser
def test_run_all_slider_and_stop_in_jupyterlab(tmp_path):
    chromium = _chromium()
    notebook = _copy_of_notebook(tmp_path / "notebooks")
    with _lab(tmp_path) as (url, token), _page(chromium, tmp_path) as (page, seen):
        page.goto(f"{url}/lab/tree/{notebook.name}?token={token}")
        page.get_by_role("heading", name="00 Set-up").wait_for()
        _wait_for_kernel(page, url, token)
        _run_all(page)

        (first,) = _shown(page, LIVE, timeout=BASE_MODEL)
        _picture(page, tmp_path, "1-live")
        scale = _move_slider(page)
        _wait_for_rate(page, tmp_path / "outputs", RATE * scale)
        _picture(page, tmp_path, "2-slider")
        _button(page).click()

        stopped, rate = _shown(page, ENDED)
        assert int(first) < int(stopped) < TOTAL
        assert rate == f"{RATE * scale:.2e}" != f"{RATE:.2e}"
        _shown(page, re.compile(rf"live: step {stopped} of {TOTAL}, .*stopped by Stop"))
        assert _button(page).count() == 0  # controls of a finished cell would do nothing

        _shown(page, re.compile("resume bit-equal: True"))
        running = page.locator(".jp-InputPrompt", has_text="[*]")
        _until(lambda: running.count() == 0, lambda: f"{running.count()} cells still run", page.wait_for_timeout)
        assert _errors(page).count() == 0
        _check_pictures(page)
        _check_saved(page, notebook)
    assert seen == {"hosts": {"127.0.0.1"}, "errors": []}


def test_make_lab_on_a_port_in_use(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("needs make on the PATH")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # -o env: the environment is the one that runs this test, never one that make sets up now
        command = ["make", "-C", ROOT, "--no-print-directory", "-o", "env", "lab", f"BIN={Path(sys.executable).parent}"]
        done = subprocess.run([*command, f"PORT={port}"], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if not re.match(r"make(\[\d+\])?: \*\*\*", line)]
    assert done.returncode == 2 and done.stdout == ""
    assert len(said) == 1 and f"port {port} is in use" in said[0] and "choose another" in said[0]


def _chromium() -> str:
    pytest.importorskip("playwright", reason="needs playwright (pip install -e .[test])")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs Chromium on the PATH (Debian: apt-get install chromium); looked for {', '.join(BROWSERS)}")
    return found


def _copy_of_notebook(folder: Path) -> Path:
    """Notebook 00 with its stored outputs taken out, so that what the page shows was made now, and a long live cell."""
    notebook = json.loads((ROOT / "notebooks" / "00_setup.ipynb").read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
        if "parameters" in cell["metadata"].get("tags", []):
            source, changed = re.subn(r"(?m)^(live_steps: int =) \d+", rf"\1 {TOTAL}", "".join(cell["source"]))
            assert changed == 1
            cell["source"] = source
    folder.mkdir()
    path = folder / "00_setup.ipynb"
    path.write_text(json.dumps(notebook))
    return path


@contextmanager
def _lab(folder: Path):
    """A JupyterLab that knows nothing of this user's settings, on a port of its own; yields its address and token."""
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += ["--ServerApp.port=0", f"--ServerApp.root_dir={folder}/notebooks", f"--IdentityProvider.token={token}"]
    with (folder / "server.log").open("w") as log:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            yield _address(folder, token), token
        finally:
            guard.stdin.close()
            guard.wait(30)


def _environment(folder: Path) -> dict[str, str]:
    ours = {f"JUPYTER_{name}_DIR": str(folder / f"jupyter-{name.lower()}") for name in ("CONFIG", "DATA", "RUNTIME")}
    ours |= {f"JUPYTERLAB_{name}_DIR": str(folder / f"lab-{name.lower()}") for name in ("SETTINGS", "WORKSPACES")}
    # the question whether to fetch news would lie over the notebook
    news = folder / "lab-settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false"}')
    ours |= {"JUPYTER_PREFER_ENV_PATH": "1", "IPYTHONDIR": str(folder / "ipython")}
    # one thread: beside another busy process two that wait for each other are ten times slower, alone hardly faster
    ours |= {"OMP_NUM_THREADS": "1"}
    ours |= {"NBLIB_OUTPUTS": str(folder / "outputs")}  # NBLIB_BASE is set for all tests
    headless = ("NBLIB_HEADLESS", "NBLIB_RUN_DIR")  # a person sits at this kernel
    return {name: value for name, value in os.environ.items() if name not in headless} | ours


def _address(folder: Path, token: str) -> str:
    """Where the server listens, once it answers."""
    found = []

    def answers() -> bool:
        for record in (folder / "jupyter-runtime").glob("jpserver-*.json"):
            try:
                found.append(f"http://127.0.0.1:{json.loads(record.read_text())['port']}")
                return bool(_ask(found[-1], token, "status"))
            except (json.JSONDecodeError, OSError):  # half written; not listening yet
                pass
        return False

    _until(answers, (folder / "server.log").read_text, lambda ms: time.sleep(ms / 1000))
    return found[-1]


def _until(fact, instead, pause) -> None:
    """Wait for a fact. The pause takes milliseconds; beside a page it is the page's own, which lets events through."""
    end = time.monotonic() + SOON / 1000
    while not fact():
        assert time.monotonic() < end, instead()
        pause(100)


def _ask(url: str, token: str, what: str):
    asked = request.Request(f"{url}/api/{what}", headers={"Authorization": f"token {token}"})
    with request.build_opener(request.ProxyHandler({})).open(asked, timeout=30) as answer:
        return json.load(answer)


@contextmanager
def _page(chromium: str, folder: Path):
    """A page that notes every host asked and every error. Tall, because cells far outside the view are not drawn."""
    from playwright.sync_api import sync_playwright

    seen = {"hosts": set(), "errors": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 12_000})
        page.set_default_timeout(SOON)
        page.on("request", lambda r: seen["hosts"].add(urlsplit(r.url).hostname or "127.0.0.1"))  # data: has no host
        page.on("websocket", lambda s: seen["hosts"].add(urlsplit(s.url).hostname))
        page.on("console", lambda m: seen["errors"].append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: seen["errors"].append(str(error)))
        try:
            yield page, seen
        finally:
            _picture(page, folder, "3-last")  # the end, or where it failed
            browser.close()


def _wait_for_kernel(page, url: str, token: str) -> None:
    """Until the server says that the page is connected to the kernel and the kernel waits."""

    def ready() -> bool:
        kernels = [session["kernel"] for session in _ask(url, token, "sessions")]
        return bool(kernels) and all(k["execution_state"] == "idle" and k["connections"] for k in kernels)

    _until(ready, lambda: f"no idle kernel with a connection: {_ask(url, token, 'sessions')}", page.wait_for_timeout)


def _run_all(page) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    assert page.get_by_role("dialog").count() == 0


def _shown(page, pattern: re.Pattern, timeout: int = SOON) -> tuple[str, ...]:
    """The groups of a pattern in a cell's output, once it is there; a cell that fails first ends the wait."""
    wanted, error = page.locator(".jp-OutputArea-output").get_by_text(pattern), _errors(page)
    wanted.or_(error).first.wait_for(timeout=timeout)
    assert error.count() == 0, error.first.inner_text()
    return pattern.search(wanted.inner_text()).groups()


def _errors(page):
    """Outputs of failed cells. The page marks them as it marks stderr; only a traceback comes with red in it."""
    red = page.locator(".ansi-red-fg")
    return page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]', has=red)


def _button(page):
    return page.locator(".jp-OutputArea").get_by_role("button", name="Stop")


def _slider(page):
    return page.locator(".jp-OutputArea").get_by_role("slider")


def _move_slider(page) -> float:
    """Press the left arrow a few times; what the slider now says, unrounded."""
    _slider(page).focus()
    for _ in range(PRESSES):
        page.keyboard.press("ArrowLeft")
    scale = 10 ** (-0.1 * PRESSES)
    page.locator(".jp-OutputArea .widget-readout", has_text=f"{scale:.2f}").wait_for()
    return scale


def _wait_for_rate(page, outputs: Path, rate: float) -> None:
    """Until the run's own metrics carry the rate and the page a later step: the slider acts while the cell runs."""
    (shown,) = _shown(page, LIVE)

    def rates() -> list[float]:
        lines = [line for file in outputs.rglob("metrics.jsonl") for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line)["lr"] for line in lines if line.endswith("\n")]

    _until(
        lambda: any(math.isclose(seen, rate, rel_tol=1e-6) for seen in rates()),
        lambda: f"the slider says {rate}, the run's last rates are {rates()[-3:]}",
        page.wait_for_timeout,
    )
    _until(lambda: int(_shown(page, LIVE)[0]) > int(shown), lambda: f"step {shown} stays", page.wait_for_timeout)


def _check_pictures(page) -> None:
    """Every image that a cell made is drawn."""
    images = page.locator(".jp-OutputArea img").all()
    assert images
    for image in images:
        image.scroll_into_view_if_needed()
        assert image.evaluate("image => image.complete && image.naturalWidth") > 0


def _check_saved(page, notebook: Path) -> None:
    """Save as a person does; in the file every cell has run, in order, and none failed."""
    page.keyboard.press("Control+s")

    def cells() -> list[dict]:
        return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]

    def counts() -> list[int | None]:
        return [cell["execution_count"] for cell in cells()]

    _until(lambda: all(counts()), lambda: f"saved with the numbers {counts()}", page.wait_for_timeout)
    assert counts() == list(range(1, len(counts()) + 1))
    assert "error" not in {output["output_type"] for cell in cells() for output in cell["outputs"]}


def _picture(page, folder: Path, name: str) -> None:
    """The whole page, for a person to look at; NBLIB_SCREENSHOTS names a folder that outlives the test."""
    kept = Path(os.environ.get("NBLIB_SCREENSHOTS") or folder)
    kept.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=kept / f"{name}.png")
