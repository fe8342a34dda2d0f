"""Kill any process of the workbook at any time, go on with the same command, and compare what comes
out.

    make torture KILLS=200 SEED=0
    or: python tests/torture.py --kills 200 [--only NAME | --only 'chain 17']

A chain is one command in a world of its own (notebooks, outputs, store, temporary folder). It is
killed several times with SIGKILL and given again each time, until it ends; then everything it made
is held against a run that nobody killed: results, metrics, the weights of the last checkpoints,
adapters, caches, sweep tables, base models, and the names of all files. What the straight run has
not got was left behind. Every choice is drawn from the seed and the chain's number, so a chain that
fails can be repeated alone.

The notebooks run with short parameters and without their pitfalls and demonstrations, which have no
state to lose. A kill falls at any time, or in a cell that trains, or while a file is being written;
it hits the runner, the process that executes, the kernel, one at random, or all at once. One that
finds the command ended does not count.

Footgun: what a kill leaves in the temporary folder is swept when it is a minute old, so that nobody
sweeps what another process is about to use. The campaign makes it look old, as it is when a person
comes back.
"""

import argparse
import compileall
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SOURCES = ("nblib", "notebooks", "doctor", "tests")
JOBS, NBLIB = "tests/torture_jobs.py", [sys.executable, "-m", "nbworkbook.cli"]
MARK = "NBLIB_TORTURE"  # an environment variable, by which every process of a chain is known
PATIENCE = 30  # seconds that a process may outlive its chain
RUN = "[0-9]*-[0-9]*-*"
RUN_NAME = r"\d{8}-\d{6}-[0-9a-f]{6}"
PROGRAMS = {"execute": "nbworkbook.execute", "kernel": "ipykernel"}
FAULTS = ("not equal", "cannot go on", "left behind", "orphan")
VICTIMS = ("runner", "runner", "execute", "kernel", "any", "all")
AIMS = ("time", "cell", "work", "work", "write")
VARIES = {
    "seconds",
    "cpu_seconds",
    "started",
    "finished",
    "tokens_per_s",
    "eta_s",
    "memory_gib",
    "environment",
}
VARIES |= {"flop_per_s", "mfu", "hfu", "card_gib", "card_busy", "card_watts"}
VARIES |= {"stopped"}  # the mark of a step after which somebody asked to end
VARIES |= {
    "copies_of_logits",
    "peak_mib",
    "peak_mib_chunked",
    "peak_bytes",
    "step_bytes",
    "worst_prediction",
}
# measured seconds and bytes
VARIES |= {"prepare_seconds", "fronts", "order_changes", "ddp_speed_up", "peak_mb"}
VARIES |= {"lead_at_equal_seconds", "lead_at_equal_bytes", "fsdp_peak_share"}
# and hashes of shards, whose words have no order: see _bytes
PREFIXES = ("compile_gain", "training-0")
# whose hashes a manifest holds, and which hold times themselves
VARIES |= {"base.json", "training.pt", "meta.json"}

# Targets in turn, each with the kills of one chain: a notebook by its number, or what else is
# killed.
CYCLE = """
    14:4 adamw:6 cache:6 records:6 muon:3 base:2 sweep:3 records:8 muon:6
    13:4 12:4 10:5 11:5 00:4 refresh:4 01:3 cache:6 02:3 03:3 refresh:5 04:3 sweep:4 05:3 base:4
    12:5 13:5 adamw:6 10:5 sweep:5 11:5 refresh:6 cache:6 base:5 15:5 records:8 12:5
    00:4 cache:6 10:4 adamw:6 11:4 sweep:5 base:4 14:4 refresh:5
"""

# Parameters, and the cells that are cut: those that hold one of the texts. Facts that must not
# change are among them, because they are about what was cut.
SHORT = {
    "00_setup": (
        "steps=4 live_steps=40 rows=2 length=64",
        ("overfit(", "overfitted", "verdicts = []", "sizes = []"),
    ),
    "01_freeze_and_adapters": (
        "steps=5 qlora_steps=30 rows=2 length=64",
        ("zeroed(", "four_bit.ways", "traps", "choose("),
    ),
    "02_compile_and_checkpointing": (
        "vocabulary=8192 length=256 attention_length=64",
        ("eager_and_compiled", "recompiles(", "step_memory.draw"),
    ),
    "03_precision_and_optimizers": (
        "rate=0.001 rounds=5",
        (
            "ways = (",
            "resumed_scaler",
            "muon_run",
            "split_run",
            "teacher_speed",
            '"P34"',
            "logging_nan_inf_filter",
        ),
    ),
    "04_loop_and_recovery": (
        "overfit_steps=60 stop_at=2 resume_steps=4 item_ms=0.5 workers=1",
        (
            "data.ends(",
            "loop.trained(",
            '"P39"',
            "nan_in_mid_run",
            "on_disk()",
            "resume_mixture",
            "damaged_folder",
        ),
    ),
    "05_doctor": (
        "steps=3 rates=1e-4,1e-2 shadow_steps=4 learned_steps=2",
        ("watched", "known", "unseen", "peers.missing"),
    ),
    "10_lrc": (
        "steps=40 rows=2 length=32 short_steps=2 eval_rows=8 quick_rows=4",
        (
            "same_gradients",
            'changes = {"eager"',
            "phase_diagram",
            "lrc_spreads.",
            "lrc_comparison.",
            "ternary_product.",
            "memory.estimate(",
            "memory.Account(",
        ),
    ),
    "11_ard_lora": (
        "steps=30 rows=2 length=32 small_tokens=600 small_steps=8 prior_rows=4 prior_updates=2 samples=1 eval_rows=8",
        (),
    ),
    "12_moe_muon": (
        "steps=60 hidden=32 width=32 rows=2 length=32 suspect_steps=8 race_steps=4 balance_steps=4 rival=true "
        "eval_rows=8",
        ("muon_update.response(", "theirs_of"),
    ),
    "13_distillation": (
        "steps=40 hidden=32 rows=2 length=32 eval_rows=8 eval_every=10 k=8",
        ("drawn_target", "told.items()", "for again in", "models_of = {"),
    ),
    "15_spiking_student": (
        "steps=40 hidden=32 rows=2 length=32 eval_rows=8 eval_every=10 k=8",
        (
            "spike(inputs",
            "rate(layer)",
            "cost_rows(",
            "goose_energy.",
            "goose_context.",
            "training_rules.rows()",
        ),
    ),
    "14_sparse_depth": (
        "steps=60 hidden=32 width=32 rows=2 length=32 short_steps=4 eval_rows=8",
        ("draw.", "heads_equal ="),
    ),
}
TRIALS = """
class Facts(dict):
    def __missing__(self, key):
        return Facts() if isinstance(key, tuple) else 0.0
class Trials:
    def __init__(self):
        self.facts, self.shows = Facts(), Facts()
    def __call__(self, *_):
        pass
trial = Trials()
"""
INSTEAD = {"trial = trials.Trials()": TRIALS, "config_of(16384)": "config_of(1024)"}
INSTEAD |= {f'verdicts[{n}]["true next-token loss"]': "0.0" for n in (0, 1)}
TINY = (
    "lr: float = 0.01  # rate [0 .. 1]\nsize: int = 32  # width [8 .. 64]",
    "from nblib import models, runtime, text, train\nfrom nbworkbook import runs\nimport torch\n"
    'run = runs.begin("tiny", globals())\nruntime.seed_all(0)\nmachine = runtime.pick("cpu", "fp32")',
    "stream = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(1)).cumsum(0) % 256\n"
    "model = models.tiny(256, hidden=size, layers=2, heads=2)\n"
    "options = dict(total=60, machine=machine, watch=train.Watch(log=run.log), checkpoints=train.Checkpoints(run.checkpoints, every=5))\n"
    "records = train.fit(model, text.Batches(stream, rows=4, length=32), train.adamw(model, lr=lr), **options)",
    'loss = train.evaluate(model, stream[:2048].view(-1, 32), machine=machine)["loss"]\n'
    "run.result(loss=loss, steps=len(records))\nrun.finish()\nprint(loss)",
)

NOTHING = (
    "x: int = 0  # a number [0 .. 1]",
    'from nbworkbook import runs\nrun = runs.begin("nothing", globals())\nrun.finish()',
)


class Kill(NamedTuple):
    """Drawn before the chain starts, so that it hangs on the seed alone."""

    # what decides when: a time or a cell of the straight run, or the files that are written
    aim: str
    at: float  # which of these times or cells, from 0 to 1
    within: float  # how far into that cell, from 0 to 1
    write: int  # at which of the writes that are seen
    victim: str
    which: float  # if it is any of the processes
    hurry: bool  # the command is given again before the others have noticed


class Stage(NamedTuple):
    """A cell of the straight run, or what comes before the first."""

    name: str
    seconds: float
    works: bool  # it wrote checkpoints or a cache


class Straight(NamedTuple):
    seconds: float
    stages: list[Stage]
    facts: dict[str, Any]


class Fault(Exception):
    """What a chain shows to be wrong: the kind, one of FAULTS, and a sentence."""


class Ended(Exception):
    """Somebody pressed Ctrl-C."""


@dataclass
class Result:
    chain: int
    target: str
    kills: int = 0
    seconds: float = 0.0
    story: list[str] = field(default_factory=list)  # the kills, as they fell
    faults: list[tuple[str, str]] = field(default_factory=list)


class World:
    """The folders and the processes of one chain."""

    def __init__(self, folder: Path, target: str, store: Path | None, stop: threading.Event):
        self.folder, self.target, self.stop, self.source = (
            folder,
            target,
            stop,
            folder.parent / "source",
        )
        for name in ("notebooks", "parameters", "outputs", "tmp"):
            (folder / name).mkdir(parents=True)
        if store and target != "base":
            shutil.copytree(store, folder / "store")
        if (notebook := self.source / "notebooks" / f"{target}.ipynb").exists():
            write_short(notebook, folder / "notebooks")
        else:
            write_notebook(folder / "notebooks" / "tiny.ipynb", TINY)
            (folder / "parameters" / "tiny.sweep.yaml").write_text("lr: [0.01, 0.02]\nsize: 16\n")
        self.command = self._command()

    def _command(self) -> list[str]:
        if self.target in ("sweep", "refresh"):
            # a line for every cell
            return [*NBLIB, self.target, *["--verbose"] * (self.target == "sweep"), "tiny"]
        if not (notebook := self.folder / "notebooks" / f"{self.target}.ipynb").exists():
            return [
                sys.executable,
                str(self.source / JOBS),
                self.target,
                str(self.folder / "outputs" / "job"),
            ]
        words = SHORT.get(self.target, ("", ()))[0].split()
        words += ["precision=fp32"] if "precision: str" in notebook.read_text() else []
        return [
            *NBLIB,
            "run",
            "--verbose",
            self.target,
            *(part for word in words for part in ("-p", word)),
        ]

    def notebooks(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.folder)): _fact(path)
            for path in (self.folder / "notebooks").glob("*.ipynb")
        }

    def start(self, command: list[str] | None = None) -> "Attempt":
        folders = {
            f"NBLIB_{name.upper()}": str(self.folder / name)
            for name in ("notebooks", "parameters", "outputs")
        }
        folders |= {"NBLIB_BASE": str(self.folder / "store"), "TMPDIR": str(self.folder / "tmp")}
        threads = {
            "OMP_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        python = {
            "PYTHONPATH": os.pathsep.join(
                str(self.source / name) for name in ("", "notebooks", "doctor")
            )
        }
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("NBLIB_")
        }
        environment = inherited | folders | threads | offline | python | {MARK: str(self.folder)}
        return Attempt(self, command or self.command, environment)

    def pause(self, seconds: float) -> None:
        if self.stop.is_set():
            raise Ended
        time.sleep(seconds)

    def processes(self) -> dict[int, str]:
        """The living ones, with their command lines."""
        mark, living = f"{MARK}={self.folder}\0".encode(), {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended, or is not ours
                if mark in (place / "environ").read_bytes():
                    living[int(place.name)] = (
                        (place / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    )
        return living

    def refuse_orphans(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while living := self.processes():
            if time.monotonic() > deadline:
                raise Fault(
                    "orphan",
                    f"after {seconds:.0f} s still there: {'; '.join(living.values())}"[:300],
                )
            self.pause(0.1)

    def kill_all(self) -> None:
        while living := self.processes():
            for pid in living:
                kill(pid)
            time.sleep(0.02)

    def partials(self) -> Iterator[str]:
        """What is being written at this moment."""
        folders = [str(self.folder / name) for name in ("outputs", "notebooks", "store")]
        while folders:
            with contextlib.suppress(OSError):
                for entry in os.scandir(folders.pop()):
                    if entry.name.endswith(".partial"):
                        yield entry.path
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)

    def grow_old(self) -> None:
        """As if a while had passed since the last kill."""
        old = [
            *(self.folder / "tmp").glob("nblib-*"),
            *(self.folder / "outputs").glob("refresh-*"),
            *self.partials(),
        ]
        for leftover in old:
            with contextlib.suppress(OSError):
                os.utime(leftover, (time.time() - 3600,) * 2)

    def sweep(self) -> None:
        """Give the command once more, and run a notebook: what is swept then was not left
        behind.
        """
        self.grow_old()
        before = set(self.folder.rglob("*"))
        write_notebook(self.folder / "notebooks" / "nothing.ipynb", NOTHING)
        for command in (self.command, [*NBLIB, "run", "nothing"]):
            if (attempt := self.start(command)).ended(300):
                raise Fault(
                    "cannot go on", f"after its end, {' '.join(command[2:])}: {attempt.last_words}"
                )
        for path in set(self.folder.rglob("*")) - before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                missing_ok=True
            )

    def facts(self) -> dict[str, Any]:
        """Everything that the commands made, under names that are the same in every world."""
        facts: dict[str, Any] = {
            "run folders": len(list((self.folder / "outputs").glob(f"*/{RUN}")))
        }
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if (not name.startswith("tmp/") or "nblib-" in name) and not _superseded(path):
                facts |= {_plain(path, name): fact} if (fact := _fact(path)) is not None else {}
        return facts


class Attempt:
    """One time that the command is given. A thread reads what it prints."""

    def __init__(self, world: World, command: list[str], environment: dict[str, str]):
        self.world, self.began = world, time.monotonic()
        self.lines: list[str] = []
        self.stages: list[tuple[str, float]] = [("start", 0.0)]  # and when they began
        self.working: set[str] = set()  # stages in which a checkpoint or a shard was written
        self.writes: set[str] = set()
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        # there, because `python -m` looks in its folder first, and somebody may be editing what we
        # were started in
        options = dict(
            cwd=world.source if world.source.exists() else None,
            env=environment,
            start_new_session=True,
        )
        self.process = subprocess.Popen(command, **pipes, **options)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        label = ""
        for raw in self.process.stdout:
            self.lines.append(line := raw.decode("utf-8", "replace").rstrip())
            if combination := re.search(r"\] (\d+ of \d+): ", line):  # of a sweep
                label = f"{combination[1]}, "
            if cell := re.search(r"(?:^|\] )(cell \d+/\d+)(?:;.*)?$", line):
                self.stages.append((label + cell[1], time.monotonic() - self.began))

    def look(self) -> None:
        for path in self.world.partials():
            self.writes.add(path)
            if re.search(r"/(checkpoints|cache|store|job|20200101-.*)/", path):
                self.working.add(self.stages[-1][0])

    def ended(self, seconds: float) -> int:
        """The exit code, when it has ended by itself."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise Fault(
                    "cannot go on",
                    f"hangs: no end after {seconds:.0f} s; last words: {self.last_words}",
                )
            self.world.pause(0.02)
        self.reader.join(1)  # an orphan may hold the pipe
        return self.process.returncode

    @property
    def last_words(self) -> str:
        said = [line for line in self.lines if line.strip()]
        ours = [line for line in said if line.startswith("nblib: ")]
        return (ours or said or ["nothing"])[-1][:500]


class Campaign:
    def __init__(self, folder: Path, seed: int):
        self.folder, self.seed, self.store = folder, seed, None
        self.stop, self.guard = threading.Event(), threading.Lock()
        self.locks: dict[str, threading.Lock] = {}
        self.straights: dict[str, Straight | Fault] = {}

    def prepare(self) -> None:
        """A copy of the sources, because somebody may be editing them, and of the store that every
        world begins with: corpora and a small base model. Bytecode is written here: a process might
        not, or be killed before it does.
        """
        for name in SOURCES:
            # with bytecode, where that is newest
            shutil.copytree(ROOT / name, self.folder / "source" / name)
            compileall.compile_dir(self.folder / "source" / name, quiet=2)
        # decides which packages a key sees
        shutil.copy2(ROOT / "requirements.lock", self.folder / "source")
        shutil.copytree(
            ROOT / "outputs" / "published", self.folder / "source" / "outputs" / "published"
        )
        world = World(self.folder / "made", "store", None, self.stop)
        attempt = world.start()
        try:
            if attempt.ended(900):
                raise SystemExit(f"torture: the store could not be made: {attempt.last_words}")
        finally:
            world.kill_all()
        self.store = world.folder / "store"

    def world(self, name: str, target: str) -> World:
        return World(self.folder / name, target, self.store, self.stop)

    def straight(self, target: str) -> Straight:
        """The run that nobody kills; made by the first chain that needs it."""
        with self.guard:
            lock = self.locks.setdefault(target, threading.Lock())
        with lock:
            if target not in self.straights:
                self.straights[target] = self._straight(target)
        if isinstance(self.straights[target], Fault):
            raise self.straights[target]
        return self.straights[target]

    def _straight(self, target: str) -> Straight | Fault:
        world = self.world(f"s-{target[:10]}", target)  # short: the kernel's sockets lie in it
        attempt = world.start()
        try:
            while attempt.process.poll() is None:
                attempt.look()
                world.pause(0.002)
        finally:
            world.kill_all()
        seconds = time.monotonic() - attempt.began
        if attempt.ended(10):
            return Fault(
                "cannot go on", f"not even a run that nobody kills ends well: {attempt.last_words}"
            )
        times = [began for _, began in attempt.stages] + [seconds]
        lasted = [after - before for before, after in itertools.pairwise(times)]
        stages = [
            Stage(name, s, name in attempt.working) for (name, _), s in zip(attempt.stages, lasted)
        ]
        return Straight(seconds, stages, world.facts())

    def chain(self, number: int) -> Result:
        """Kill, go on, compare.

        What is left of the kills when the command has ended falls into a new world.
        """
        target, left = plan(self.seed, number)
        result, began = Result(number, target), time.monotonic()
        try:
            straight = self.straight(target)
            for again in itertools.count():
                world = self.world(f"{number}-{again}", target)
                try:
                    self._kill_and_go_on(world, straight, left, result)
                    world.refuse_orphans(PATIENCE)
                    result.faults += self._compare(world, straight, result.kills)
                finally:
                    world.kill_all()
                if not result.faults:
                    shutil.rmtree(world.folder)
                if result.faults or not left:
                    break
        except Fault as fault:
            result.faults.append(fault.args)
        result.seconds = time.monotonic() - began
        return result

    def _kill_and_go_on(
        self, world: World, straight: Straight, left: list[Kill], result: Result
    ) -> None:
        """Until the command has ended well."""
        old, new = (
            world.notebooks(),
            {n: f for n, f in straight.facts.items() if n.startswith("notebooks/")},
        )
        while True:
            world.grow_old()
            attempt, kill = world.start(), left.pop(0) if left else None
            where = strike(attempt, straight, kill) if kill else None
            result.story += [where] if where else []
            code = attempt.ended(5 * straight.seconds + 120)
            if world.notebooks() not in (old, new):
                raise Fault(
                    "not equal",
                    f"the stored notebook is neither the old one nor the new, after {where}",
                )
            if code == 0:
                result.story[-1:] = [f"{where}, too late to count"] if where else result.story[-1:]
                return
            if not where:
                raise Fault(
                    "cannot go on", f"after {result.kills} kills, code {code}: {attempt.last_words}"
                )
            result.kills += 1
            if not kill.hurry:
                world.refuse_orphans(90)

    def _compare(self, world: World, straight: Straight, kills: int) -> list[tuple[str, str]]:
        facts, faults = world.facts(), []
        if facts.keys() - straight.facts.keys():
            world.sweep()
            facts = world.facts()
        if left := sorted(facts.keys() - straight.facts.keys()):
            faults.append(("left behind", ", ".join(left)[:500]))
        for name, value in straight.facts.items():
            if (
                name.endswith("metrics.jsonl")
                and isinstance(facts.get(name), dict)
                and isinstance(value, dict)
            ):
                # a kernel whose runner was killed stops, and logs its last step, which the straight
                # run may pass over
                more = facts[name].keys() - value.keys()
                if len(more) <= kills:
                    facts[name] = {
                        line: fact for line, fact in facts[name].items() if line not in more
                    }
        differ = [name for name, value in straight.facts.items() if facts.get(name) != value]
        if differ:
            worst = differ[-1] if differ[0] == "run folders" and left else differ[0]
            faults.append(
                ("not equal", f"{worst}: {_difference(straight.facts[worst], facts.get(worst))}")
            )
        return faults


def plan(seed: int, number: int) -> tuple[str, list[Kill]]:
    """What the chain of this number kills, and how."""
    target, kills = cycle()[number % len(cycle())]
    draw = random.Random(f"{seed} {number}")
    u, aim, victim = (
        draw.random,
        functools.partial(draw.choice, AIMS),
        functools.partial(draw.choice, VICTIMS),
    )
    return target, [
        Kill(aim(), u(), u(), draw.randint(1, 20), victim(), u(), u() < 0.5) for _ in range(kills)
    ]


@functools.cache
def cycle() -> list[tuple[str, int]]:
    """The targets of the chains in turn, with the kills of each."""
    known = {path.stem[:2]: path.stem for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))}
    chains = [
        (known.get(name, name), int(kills)) for name, kills in re.findall(r"(\w+):(\d+)", CYCLE)
    ]
    return chains + [(stem, 3) for stem in known.values() if stem not in dict(chains)]


def strike(attempt: Attempt, straight: Straight, plan: Kill) -> str | None:
    """Wait for the moment and kill; where that was, or None when the command ended before."""
    moment, names = _moment(straight, plan), [stage.name for stage in straight.stages]
    while attempt.process.poll() is None:
        name, began = attempt.stages[-1]
        if plan.aim == "write":
            attempt.look()
            due = len(attempt.writes) >= plan.write
        else:  # what was done before a kill is passed over quickly, so time alone would fall behind
            at = names.index(name) if name in names else len(names)
            due = (at, time.monotonic() - attempt.began - began) >= moment
        if due:
            after = time.monotonic() - attempt.began - began
            writing = [
                re.sub(r"\.\d+(@[^.]+)?\.partial$", "", Path(path).name)
                for path in attempt.world.partials()
            ]
            victim = _hit(attempt, plan)
            return (
                f"{victim} in {name} +{after:.1f} s{', writing ' + writing[0] if writing else ''}"
            )
        attempt.world.pause(0.002)
    return None


def _moment(straight: Straight, plan: Kill) -> tuple[int, float]:
    """The stage, and the seconds into it."""
    every = range(len(straight.stages))
    among = [n for n in every if straight.stages[n].works or plan.aim != "work"] or list(every)
    if plan.aim == "cell":
        stage = among[int(plan.at * len(among))]
        return stage, plan.within * straight.stages[stage].seconds
    left = plan.at * sum(straight.stages[n].seconds for n in among)
    for stage in among:
        if left < straight.stages[stage].seconds:
            break
        left -= straight.stages[stage].seconds
    return stage, left


def _hit(attempt: Attempt, plan: Kill) -> str:
    living = attempt.world.processes()
    roles = {"runner": attempt.process.pid}
    for pid, command in sorted(living.items()):
        roles |= {role: pid for role, part in PROGRAMS.items() if part in command}
    if plan.victim == "all":
        attempt.process.kill()
        attempt.world.kill_all()
        return "all"
    if plan.victim == "any" and living:
        pid = sorted(living)[int(plan.which * len(living))]
    else:
        pid = roles.get(plan.victim, attempt.process.pid)
    kill(pid)
    return next((role for role, number in roles.items() if number == pid), "another process")


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def write_short(notebook: Path, folder: Path) -> None:
    """The notebook without its demonstrations."""
    sources: list[str] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and not demonstrates(notebook.stem, cell):
            for text, other in INSTEAD.items():
                source = source.replace(text, other)
            # drawings may stand above them
            sources.insert(0 if "parameters" in tags else len(sources), source)
    write_notebook(folder / notebook.name, sources)


def demonstrates(name: str, cell: dict[str, Any]) -> bool:
    """The cell is one of those that are cut, or checks what may have been cut."""
    source, cut = "".join(cell["source"]), SHORT.get(name, ("", ()))[1]
    return "nbval-check-output" in cell["metadata"].get("tags", []) or any(
        text in source for text in cut
    )


def write_notebook(path: Path, sources: Sequence[str]) -> None:
    """A notebook of code cells, of which the first holds the parameters."""
    tags = [{"tags": ["parameters"]}] + [{}] * len(sources)
    cells = [
        {
            "cell_type": "code",
            "id": f"{n}",
            "metadata": tag,
            "source": s,
            "outputs": [],
            "execution_count": None,
        }
        for n, (s, tag) in enumerate(zip(sources, tags))
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
    )


def _superseded(path: Path) -> bool:
    """Part of a checkpoint that is not the newest: which of the others are kept hangs on where a
    run resumed.
    """
    for step in [
        folder for folder in (path, *path.parents) if re.fullmatch(r"step-\d{8}", folder.name)
    ]:
        return step.name < max(each.name for each in step.parent.glob("step-*"))
    return False


def _plain(path: Path, name: str) -> str:
    """The name without times and numbers of processes; a run folder is known by its parameters."""
    if run := re.search(RUN_NAME, name):
        folder = Path(str(path)[: str(path).index(run[0]) + len(run[0])])
        parameters = folder / "parameters.yaml"
        which = (
            hashlib.sha256(parameters.read_bytes()).hexdigest()[:6]
            if parameters.exists()
            else "nothing"
        )
        name = name.replace(run[0], f"run of {which}")
    name = re.sub(r"sweep-\d{8}-\d{6}(-\d+)?", "sweep", name)
    return re.sub(r"/events/.*", "/events", name)


def _fact(path: Path) -> Any:
    """What must be the same about a file, or about an empty folder; None for a folder that holds
    something.
    """
    if path.is_dir() and "nblib-" not in path.name:
        return None if any(path.iterdir()) else "an empty folder"
    try:
        if path.name == "run.json":
            return json.loads(path.read_text()).get("status")
        if path.name == "metrics.jsonl":  # of a step that comes twice, the later line counts
            lines = [_lasting(json.loads(line)) for line in path.read_text().splitlines()]
            return {f"{line.get('run', '')} {line.get('step', '')}": line for line in lines}
        if path.match("sweep-*.json"):
            rows = json.loads(path.read_text())["rows"]
            return [
                {name: row[name] for name in ("parameters", "status", "results")} for row in rows
            ]
        if path.name in ("result.json", "base.json", "manifest.json"):
            return _lasting(json.loads(path.read_text()))
    except (ValueError, AttributeError, KeyError) as error:
        return f"unreadable: {error!r}"
    exact = path.suffix in (".safetensors", ".ipynb", ".yaml") or {"cache", "store"} & set(
        path.parts
    )
    if exact and path.is_file() and path.name != "notebook.ipynb":
        return hashlib.sha256(_bytes(path)).hexdigest()
    return "a file"


def _bytes(path: Path) -> bytes:
    """What is in the file. safetensors writes the words about its tensors in an order that changes
    by process; a notebook says how long it took.
    """
    content = path.read_bytes()
    if path.suffix == ".ipynb":
        with contextlib.suppress(ValueError):  # a broken one is compared as it is
            notebook = json.loads(content)
            notebook["metadata"].pop("nblib", None)
            content = json.dumps(notebook).encode()
    if path.suffix == ".safetensors":
        header = 8 + int.from_bytes(content[:8], "little")
        content = (
            json.dumps(json.loads(content[8:header]), sort_keys=True).encode() + content[header:]
        )
    return content


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        lasting = [name for name in value if name not in VARIES and not name.startswith(PREFIXES)]
        return {name: _lasting(value[name]) for name in lasting}
    return value


def _difference(straight: Any, here: Any) -> str:
    if isinstance(straight, dict) and isinstance(here, dict):
        name = next(name for name in [*straight, *here] if straight.get(name) != here.get(name))
        return f"{name}: {_difference(straight.get(name), here.get(name))}"
    return f"{json.dumps(here)[:200]}, in the straight run {json.dumps(straight)[:200]}"


def run(campaign: Campaign, kills: int, only: str, at_once: int, results: list[Result]) -> None:
    """Chains side by side until so many kills have fallen, or somebody asks to stop."""
    wanted = (n for n in itertools.count() if chosen(n, only))
    numbers = iter([int(only.split()[1])]) if only.startswith("chain ") else wanted
    flying: dict[Future, int] = {}
    with ThreadPoolExecutor(at_once) as pool:
        while True:
            # one that failed has spent what was planned: a command that never runs must not be
            # tried for ever
            spent = [
                len(plan(campaign.seed, r.chain)[1]) if r.faults else max(r.kills, 1)
                for r in results
            ]
            spent += [len(plan(campaign.seed, number)[1]) for number in flying.values()]
            more = sum(spent) < kills and len(flying) < at_once and not campaign.stop.is_set()
            if more and (number := next(numbers, None)) is not None:
                flying[pool.submit(campaign.chain, number)] = number
                continue
            if not flying:
                return
            for future in wait(flying, timeout=1, return_when=FIRST_COMPLETED).done:
                del flying[future]
                with contextlib.suppress(Ended):
                    results.append(future.result())
                    tell(results[-1])


def chosen(number: int, only: str) -> bool:
    return cycle()[number % len(cycle())][0].startswith(only)


def tell(result: Result) -> None:
    verdict = (
        "; ".join(f"{kind.upper()}: {sentence}" for kind, sentence in result.faults) or "equal"
    )
    print(
        f"chain {result.chain:3d}  {result.target}: {result.kills} kills, {result.seconds:.0f} s, {verdict}\n"
        f"           {'; '.join(result.story) or 'nothing was hit'}",
        flush=True,
    )


def table(results: Sequence[Result]) -> list[list[str]]:
    """A line for each target and one for all: kills by how their chain ended."""
    rows = [["target", "chains", "kills", "equal", *FAULTS, "seconds"]]
    for target in [*dict.fromkeys(cycle_target for cycle_target, _ in cycle()), "all"]:
        chains = [result for result in results if target in (result.target, "all")]
        kinds = [fault[0] for result in chains for fault in result.faults]
        equal = sum(result.kills for result in chains if not result.faults)
        counts = [
            len(chains),
            sum(result.kills for result in chains),
            equal,
            *map(kinds.count, FAULTS),
        ]
        if chains:
            rows.append(
                [target, *map(str, counts), f"{sum(result.seconds for result in chains):.0f}"]
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="a notebook or another target, or 'chain 17'"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="chains side by side (default 2)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came out here, too")
    parser.add_argument(
        "--keep", action="store_true", help="leave the worlds that differ, to look at"
    )
    options = parser.parse_args()
    if not options.only.startswith("chain ") and not any(
        chosen(n, options.only) for n in range(len(cycle()))
    ):
        parser.error(
            f"--only {options.only}: there are {', '.join(dict.fromkeys(name for name, _ in cycle()))}"
        )
    # the kernels' sockets lie in it, and their names may not be long
    place = Path(
        tempfile.mkdtemp(
            prefix="nblib-torture-", dir="/tmp" if len(tempfile.gettempdir()) > 20 else None
        )
    )
    began, campaign, results = time.monotonic(), Campaign(place, options.seed), []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: campaign.stop.set())
    print(f"torture: {options.kills} kills, seed {options.seed}, in {place}", flush=True)
    try:
        with contextlib.suppress(Ended):
            campaign.prepare()
            run(campaign, options.kills, options.only, options.jobs, results)
    finally:
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)
    if campaign.stop.is_set():
        print("torture: stopped; this is what is known")
    rows, faults = (
        table(results),
        [(r.chain, r.target, *fault) for r in results for fault in r.faults],
    )
    widths = [max(map(len, column)) for column in zip(*rows)]
    print(
        "\n"
        + "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(row, widths)) for row in rows
        )
    )
    for number, target, kind, sentence in faults:
        print(f"chain {number}, {target}, {kind}: {sentence}")
    minutes = (time.monotonic() - began) / 60
    kills, equal = rows[-1][2:4] if results else ("0", "0")
    print(f"{equal} of {kills} kills equal, {len(faults)} faults, {minutes:.1f} minutes")
    if options.json:
        facts = {
            "seed": options.seed,
            "minutes": minutes,
            "table": rows,
            "chains": [vars(r) for r in results],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1))
    return 130 if campaign.stop.is_set() else 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
