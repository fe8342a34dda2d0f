"""One notebook in its kernel: every ending has its sentence, and nothing of a kernel stays
behind.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import small_notebooks
from small_notebooks import run_one, sentence_of, write

from nblib import files
from nbworkbook import execute, jobs, leftover_processes, runner, runs


@pytest.fixture
def workbook(tmp_path, monkeypatch):
    return small_notebooks.steady_workbook(tmp_path, monkeypatch)


@pytest.fixture
def sockets(monkeypatch):
    """A folder of this test alone, here and in what it starts: other tests start kernels at the
    same time.
    """
    folder = Path(tempfile.mkdtemp(prefix="nb-"))  # pytest's own path is too long for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.kernel
def test_progress_that_updates_in_place_still_reaches_the_console(workbook, capfd):
    """A display with an id leaves no line in any log, so the runner passes on what the progress
    says of itself.
    """
    write(
        "00_long",
        "import time\nfrom nbworkbook import show\nprogress = show.Progress('long')\n"
        "for step in range(1, 41):\n    progress({'step': step, 'of': 40, 'loss': 1.0})\n    time.sleep(0.02)",
        "print('after')",
    )
    assert run_one("00_long").status == "done"
    said = capfd.readouterr().out
    assert said.count("long: step 40 of 40, loss 1.0000\n") == 1, (
        "once, by the progress or by the picture that stays"
    )
    # while the cell was running
    assert said.index("[00_long] long: step 1 of 40") < said.index("after")


SHOWS = """from nbworkbook import show
from IPython.display import HTML, display
show.displayed(show.Table([{'name': 'a', 'loss': 1.5}], caption='Two words'))
print('printed')
display(HTML('<p>no table</p>'), {'no': 'table'})
show.curves({'loss': [(1, 2), (2, 1)]}, x='step', y='loss', summary='The loss falls.')"""


@pytest.mark.slow
@pytest.mark.kernel
def test_headings_tables_and_sentences_reach_the_console_in_order(workbook, capfd):
    path = write(
        "00_a",
        SHOWS,
        "import time; time.sleep(2.6)",
        "show.Table([{'n': n} for n in range(100)])",
        "1",
    )
    document = json.loads(path.read_text())
    text = {
        "cell_type": "markdown",
        "id": "words",
        "metadata": {},
        "source": "# No\n## The table\nwords\n### no",
    }
    document["cells"].insert(2, text)
    path.write_text(json.dumps(document))
    assert run_one("00_a").status == "done"
    lines = capfd.readouterr().out.splitlines()
    at = lines.index("[00_a] ## The table")
    expected = [
        "printed",
        "    Two words",
        "    name  loss",
        "    ----------",
        "    a     1.5",
        "    The loss falls.",
    ]
    assert [line for line in lines[at + 1 :] if "] cell 2" not in line][:6] == expected
    slow = [line.partition(";")[0] for line in lines if "] cell" in line]
    assert "[00_a] cell 3/5" in slow and "[00_a] cell 5/5" not in slow, (
        "only a slow cell has a line"
    )
    last = lines.index("    37")
    assert lines[last + 1] == "    ... and 62 lines more" and "    38" not in lines
    assert "No" not in "".join(lines) and "no table" not in "".join(lines) and "### no" not in lines

    run_one("00_a", force=True, detail="little")
    lines = capfd.readouterr().out.splitlines()
    assert "printed" in lines and not any(line.startswith("    ") for line in lines)
    run_one("00_a", force=True, detail="all")
    lines = capfd.readouterr().out.splitlines()
    cells = [line.partition(";")[0] for line in lines if "] cell" in line]
    assert cells == [f"[00_a] cell {n}/5" for n in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    "source, options, said",
    [
        (
            "import os; os._exit(9)",
            {},
            "the kernel died in cell 2 (`import os; os._exit(9)`), exit code 9",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            {},
            "killed by SIGKILL, most likely for lack of memory",
        ),
        ("import time; time.sleep(60)", {"timeout": 1}, "took longer than the timeout of 1 s"),
        (
            "import sys; sys.exit(0)",
            {},
            "cell 2 (`import sys; sys.exit(0)`) ended the kernel's run (sys.exit?)",
        ),
        ("import sys; sys.exit(3)", {}, "cell 2 (`import sys; sys.exit(3)`) raised SystemExit: 3"),
    ],
)
@pytest.mark.kernel
def test_every_other_ending_is_one_sentence_too(workbook, sockets, source, options, said):
    write("00_a", source, "print('never')")
    assert said in sentence_of(run_one("00_a", **options))
    assert not list(sockets.glob("nblib-kernel-*"))


@pytest.mark.kernel
def test_the_kernel_named_in_the_file_need_not_exist(workbook):
    write("00_a", "1", kernelspec={"name": "of_another_machine", "display_name": "x"})
    write("01_b", "1", kernelspec={})
    planned = jobs.plan(["00", "01"], overrides=["steps=2"])
    assert [outcome.status for outcome in runner.run(planned)] == ["done", "done"]


@pytest.mark.kernel
def test_no_kernel_at_all_is_said(workbook, monkeypatch, tmp_path):
    write("00_a", "1")
    blind = "import jupyter_client.kernelspec as k; k.KernelSpecManager._find_spec_directory = lambda *_: None"
    (tmp_path / "sitecustomize.py").write_text(blind)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "no Jupyter kernel named python3" in sentence_of(run_one("00_a"))


@pytest.mark.kernel
def test_the_kernel_knows_where_it_is(workbook, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "somebody sits here")
    names = "NBLIB_RUN_DIR NBLIB_HEADLESS JUPYTER_PREFER_ENV_PATH PYTHONUNBUFFERED JPY_SESSION_NAME".split()
    write(
        "00_a", f"import os, json\nprint(json.dumps([os.getcwd(), *map(os.environ.get, {names})]))"
    )
    outcome = run_one("00_a")
    cells = json.loads((outcome.folder / "notebook.ipynb").read_text())["cells"]
    seen = json.loads("".join(cells[-1]["outputs"][0]["text"]))
    assert seen == [str(workbook / "notebooks"), str(outcome.folder), "1", "1", "1", None]


def test_sockets_left_by_a_kill_are_swept_once_nobody_holds_them(sockets):
    left, held, new = (sockets / f"nblib-kernel-{name}" for name in ("left", "held", "new"))
    for folder in (left, held, new):
        folder.mkdir()
        os.utime(folder, (0, 0)) if folder is not new else None
    lock = files.claim(held)
    mine, in_use = execute.socket_folder()
    assert {path.name for path in sockets.iterdir()} == {held.name, new.name, mine.name}
    os.close(lock), os.close(in_use)


@pytest.mark.kernel
def test_text_that_looks_like_control_is_text(workbook, capfd):
    """Control characters, an outcome as we would write it, half a character, bytes that are no
    text.
    """
    write(
        "00_a",
        'import os\nprint(\'a\\x1eb\\x1fc\\x00d\')\nprint(\'{"outcome": {"status": "failed"}}\')',
        "print('before \\ud800 after')",
        "os.write(1, bytes([255, 254]) + b' raw\\n')\nprint('no end of line', end='')",
    )
    write("01_b", "print('the next')")
    outcomes = runner.run(jobs.plan(["00", "01"]), detail="all")
    assert [outcome.status for outcome in outcomes] == ["done", "done"]
    printed = capfd.readouterr()
    for line in (
        "a\x1eb\x1fc\x00d",
        '{"outcome": {"status": "failed"}}',
        "before \\ud800 after",
        "no end of line",
    ):
        # the kernel's end may follow it
        assert any(seen.startswith(line) for seen in printed.out.split("\n")), line
    assert r"\xff\xfe raw" in printed.out and "Traceback" not in printed.out + printed.err
    assert r"before \ud800 after" in (outcomes[0].folder / "notebook.ipynb").read_text(), (
        "not as JSON spells it"
    )


# Three ways to stay behind: in the kernel's group, in a session of its own, and as a daemon whose
# parent is gone.
LEAVES = """import os, subprocess, time
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(600)
    os._exit(0)
os.system('setsid sleep 600 & echo $! > ../daemon')  # C starts this one, and not Python
daemon = open('../daemon').read().strip()
with open('../pids.partial', 'w') as file:
    print(os.getpid(), child, daemon, subprocess.Popen(['sleep', '600']).pid, file=file)
os.rename('../pids.partial', '../pids')"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(workbook: Path) -> list[int]:
    """The kernel of LEAVES, and the three processes that it started."""
    return list(map(int, (workbook / "pids").read_text().split()))


def wait_until(fact, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.05)


ENDINGS = {"done": "1", "failed": "1 / 0", "killed": "os.kill(os.getpid(), 9)"}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.kernel
def test_what_a_notebook_starts_ends_with_its_run(workbook, how):
    """However the run ends; and neither the runner nor the lock on the run waits for what was
    started.
    """
    each = "for pid in open('../pids').read().split():\n    os.kill(int(pid), 0)  # raises where it is gone"
    write("00_a", LEAVES, each, ENDINGS[how])
    began = time.monotonic()
    outcome = run_one("00_a")
    assert outcome.status == ("done" if how == "done" else "failed"), outcome.sentence
    assert (ENDINGS[how] in outcome.sentence) == (how != "done")
    assert not any(map(alive, started(workbook))) and time.monotonic() - began < 60
    lock = files.claim(outcome.folder)
    assert lock is not None, "something holds the lock"
    os.close(lock)


@pytest.mark.parametrize("who", ["the process that executes it", "the runner"])
@pytest.mark.kernel
@pytest.mark.slow
def test_a_kill_from_outside_leaves_no_process_and_the_run_goes_on(workbook, who):
    first = "import os\nif os.path.exists('../pids'):\n    os._exit(3)"
    write("00_a", first, LEAVES, "time.sleep(600)")
    process = small_notebooks.start("run", "00")
    try:
        wait_until((workbook / "pids").exists)
        pids = started(workbook)
        executes = parent(pids[0])
        assert all(map(alive, pids)) and parent(executes) == process.pid
        os.kill(executes if who != "the runner" else process.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, [*pids, executes])))
    finally:
        process.kill()
        process.communicate()
    (folder,) = (path.parent for path in (workbook / "outputs/00_a").glob("*/run.json"))
    assert runs.status(folder) in ("failed", "killed", "stopped")
    again = run_one("00_a")
    assert again.folder == folder and runs.record(folder)["attempts"] == 2


@pytest.mark.kernel
def test_processes_that_a_killed_attempt_left_are_known_by_their_environment(tmp_path):
    """Ours alone: another run's process goes on."""
    left, other = (
        subprocess.Popen(["sleep", "600"], env=os.environ | {"NBLIB_RUN_DIR": str(tmp_path / name)})
        for name in ("ours", "theirs")
    )
    try:
        leftover_processes.end_processes_of(tmp_path / "ours")
        assert left.wait(10) == -signal.SIGKILL and other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.kernel
def test_what_nobody_foresaw_is_a_sentence_and_a_file(workbook, monkeypatch, tmp_path, capfd):
    write("00_a", "1")
    (tmp_path / "sitecustomize.py").write_text(
        "import jupyter_client.manager as m; del m.AsyncKernelManager"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    outcome = run_one("00_a")
    assert (
        "internal error ImportError" in sentence_of(outcome) and "please report" in outcome.sentence
    )
    assert "Traceback" in (outcome.folder / "internal-error.txt").read_text()
    assert "Traceback" not in "".join(capfd.readouterr())


# Every write below $FULL_ROOT counts, in all processes together; from number $FULL_FROM on the disk
# is full.
FULL_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int full(int fd, const char *path) {
    static int *count;
    const char *root = getenv("FULL_ROOT");
    char link[64], name[4096];
    int saved = errno;
    if (!root) return 0;
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, name, sizeof name - 1);
        errno = saved;
        if (n < 0) return 0;
        name[n] = 0, path = name;
    }
    if (strncmp(path, root, strlen(root))) return 0;
    if (!count) {
        int file = ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open"))(getenv("FULL_COUNT"), O_RDWR);
        count = mmap(0, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    if (__sync_fetch_and_add(count, 1) < atoi(getenv("FULL_FROM"))) return 0;
    errno = ENOSPC;
    return 1;
}
#define REAL(name, ...) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))(__VA_ARGS__)
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
    return (flags & O_CREAT) && full(0, path) ? -1 : REAL(name, path, flags, mode); }
OPEN(open)
OPEN(open64)
ssize_t write(int fd, const void *data, size_t n) { return full(fd, 0) ? -1 : REAL(write, fd, data, n); }
int fsync(int fd) { return full(fd, 0) ? -1 : REAL(fsync, fd); }
int mkdir(const char *path, mode_t mode) { return full(0, path) ? -1 : REAL(mkdir, path, mode); }
int rename(const char *from, const char *to) { return full(0, to) ? -1 : REAL(rename, from, to); }
"""
RUN = """import sys
from nblib import files
from nbworkbook import jobs, runner
try:
    outcomes = runner.run(jobs.plan(['00_a'], overrides=[sys.argv[1]]))
except files.Unwritable:  # before anything was started: the command line makes a 2 of it
    sys.exit(2)
print(runner.summary(outcomes))
sys.exit(runner.exit_code(outcomes))"""


@pytest.mark.slow
@pytest.mark.kernel
def test_a_full_disk_at_any_write_of_a_run(tmp_path, monkeypatch):
    """An earlier attempt failed.

    The disk fills up at some write of the next one, and is empty again for the third.
    """
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is here to build the full disk with")
    workbook = small_notebooks.move_workbook(tmp_path, monkeypatch)
    (tmp_path / "full.c").write_text(FULL_DISK)
    shim, count = tmp_path / "full.so", tmp_path / "count"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, tmp_path / "full.c", "-ldl"], check=True)
    write(
        "00_a",
        "import os, pathlib\nfrom nbworkbook import runs\nrun = runs.begin('00_a', globals())",
        "run.log({'step': 1, 'loss': 2.0})\nrun.result(loss=2.0)",
        "assert pathlib.Path('../go').exists(), 'the real failure'\nrun.log({'step': 2, 'loss': 1.0})",
        "run.result(steps=steps)\nrun.finish()",
    )
    outputs, kept = workbook / "outputs", tmp_path / "kept"

    def attempt(full_from: int = 10**6, steps: int = 5) -> tuple[int, str]:
        count.write_bytes(bytes(4))
        full = {"LD_PRELOAD": str(shim), "FULL_ROOT": str(outputs), "FULL_COUNT": str(count)}
        environment = os.environ | full | {"FULL_FROM": str(full_from)}
        command = [sys.executable, "-c", RUN, f"steps={steps}"]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        return process.returncode, process.stdout + process.stderr

    assert attempt(steps=6)[0] == attempt()[0] == 1
    other, folder = sorted((outputs / "00_a").iterdir())
    shutil.copytree(outputs, kept)
    (workbook / "go").touch()
    code, said = attempt()
    expected, total = (
        files.read_json(folder / "result.json"),
        int.from_bytes(count.read_bytes(), sys.byteorder),
    )
    assert code == 0 and runs.is_done(folder) and total > 40, said
    codes = {}
    for point in range(total) if "FULL_DISK_ALL" in os.environ else range(3, total, 9):
        shutil.rmtree(outputs)
        shutil.copytree(kept, outputs)
        codes[point], said = attempt(point)
        # a run on a quicker day writes its notebook less often, and has ended before
        if codes[point] == 0:
            assert int.from_bytes(count.read_bytes(), sys.byteorder) <= point and point > 40
            continue
        assert codes[point] in (1, 2, 74) and "Traceback" not in said and "internal" not in said, (
            point,
            codes,
            said,
        )
        assert "No space left" in said or codes[point] == 2, (point, said)
        assert small_notebooks.files(other) == small_notebooks.files(kept / "00_a" / other.name), (
            point
        )
        cells, state = (
            json.loads((folder / "notebook.ipynb").read_text())["cells"],
            runs.status(folder),
        )
        assert len(cells) >= 7 and runs.problem(folder) is None, point
        assert (state == "done") == runs.is_done(folder) and state in (
            "failed",
            "killed",
            "done",
        ), (point, state)
        if state == "failed":
            assert (
                "the real failure" in str(cells)
                or "No space left" in runs.record(folder)["sentence"]
            ), point
        assert runs.Run(folder, {}).history()[0] == {"step": 1, "loss": 2.0}, point
        assert (
            attempt()[0] == 0
            and runs.is_done(folder)
            and files.read_json(folder / "result.json") == expected
        ), point
    assert 74 in codes.values(), codes
    print(f"{len(codes)} of {total} writes, exit codes {codes}")
