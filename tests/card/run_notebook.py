"""Run the code cells of a notebook on a card of values (card_values.py), with small parameters.

    python tests/card/run_notebook.py 13_distillation [--pitfalls] [--times]

In order, in one process, as a kernel would; the first error ends it with the number and the lines
of its cell. What is left out, and why, stands in SKIPPED and INSTEAD; and pitfalls are, because
they train on the CPU whatever the device.
"""

import argparse
import ast
import asyncio
import contextlib
import json
import linecache
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Parameters: small, so that a notebook takes seconds.
SMALL = {
    "00_setup": dict(steps=4, live_steps=2, rows=2, length=32, overfit_steps=40),
    "01_freeze_and_adapters": dict(steps=5, qlora_steps=2, rows=2, length=32),
    "02_compile_and_checkpointing": dict(vocabulary=1024, length=32, attention_length=64),
    "03_precision_and_optimizers": dict(rounds=5),
    "04_loop_and_recovery": dict(item_ms=0.5, workers=1),
    "05_doctor": dict(steps=3),
    "10_lrc": dict(
        steps=10,
        rounds=1,
        rows=2,
        length=32,
        short_steps=2,
        eval_rows=8,
        quick_rows=4,
        percent=25.0,
    ),
    "11_ard_lora": dict(
        steps=12,
        rows=2,
        length=32,
        small_steps=8,
        small_tokens=600,
        samples=1,
        eval_rows=8,
        kept=[0.5],
    ),
    "12_moe_muon": dict(
        steps=12,
        suspect_steps=8,
        race_steps=4,
        balance_steps=4,
        rival=True,
        rows=2,
        length=32,
        eval_rows=8,
        hidden=32,
        width=16,
    ),
    "13_distillation": dict(steps=12, eval_every=4, rows=2, length=32, hidden=32, eval_rows=8),
    "14_sparse_depth": dict(
        steps=12, short_steps=4, rows=2, length=32, eval_rows=8, hidden=32, width=16
    ),
    "15_spiking_student": dict(steps=12, eval_every=4, rows=2, length=32, hidden=32, eval_rows=8),
}
TRIAL = "a pitfall, which trains on the CPU whatever the device: tests/lessons/test_pitfalls.py proves it"
CPU_ONLY = "it computes on the CPU, whatever the device: tests/lessons has it"
FOUR_BIT = "the kernels of bitsandbytes take the address of a card's memory"
MEMORY = "it compares bytes of the card's allocator, which are all 0 here"
PROCESS = "it starts a process, which has no card"

# Cells that are left out: those that hold the text. And lines that become others, where a whole
# cell would be too much.
ABOUT = "it is about what was left out"
SKIPPED: dict[str, list[tuple[str, str]]] = {
    "01_freeze_and_adapters": [
        ("gradient_flow.matrix()", CPU_ONLY),
        ("falling = {", CPU_ONLY),
        ("four_bit.nf4()", FOUR_BIT),
        ("skipped = four_bit.ask(", FOUR_BIT),
        ("four_bit.messages()", FOUR_BIT),
        ("four_bit.ways()", FOUR_BIT),
        ("four_bit.one_evaluation(", FOUR_BIT),
        ("gradient_flow.zeroed(", CPU_ONLY),
        ("orders = {", CPU_ONLY),
        ("learner = bench.lora(", CPU_ONLY),
        ("trainer = tf.Trainer(", CPU_ONLY),
        ("canary_after", CPU_ONLY),
        ("mine = [pitfall(", ABOUT),
        ("matrix_raised=", ABOUT),
    ],
    "02_compile_and_checkpointing": [
        ("kept_and_flops", CPU_ONLY),
        ("step_memory.compared(", CPU_ONLY),
        ("choose(step_memory.draw", CPU_ONLY),
        ("compilation.eager_and_compiled(", CPU_ONLY),
        ("compilation.recompiles(", CPU_ONLY),
        ('print("compiled, with a graph break:"', ABOUT),
        ("worst_prediction=", ABOUT),
    ],
    "03_precision_and_optimizers": [
        ('precision.against_fp32("fp32")', CPU_ONLY),
        ("precision.against_fp32(mode)", CPU_ONLY),
        ("precision.against_fp32(mode, r)", CPU_ONLY),
        ("precision.first_log(", CPU_ONLY),
        ("loss_scaling.resumed_scaler(", CPU_ONLY),
        ("optimizers.muon_run(", CPU_ONLY),
        ("split_run(split", CPU_ONLY),
        ("autocast.teacher_use(", CPU_ONLY),
        ("speed = autocast.teacher_speed", CPU_ONLY),
        ("scheduled = optimizers.scheduled", CPU_ONLY),
        ('trial.facts["P34", "broken"]["rates"]', CPU_ONLY),
        ("scaler saved, fewer skips", ABOUT),
        ("for mode, points in swept.items()", ABOUT),
    ],
    "04_loop_and_recovery": [
        ("data.shifted(", CPU_ONLY),
        ("data.ends(", CPU_ONLY),
        ("loop.accumulated(how", CPU_ONLY),
        ("loop.trained(", CPU_ONLY),
        ("data.load_epoch(", PROCESS),
        ("loop.resumed_without(", CPU_ONLY),
        ("gaps = {}", ABOUT),
        ("rollback.rollback_of_weights()", CPU_ONLY),
        ("rollback.blind_spots()", CPU_ONLY),
        ("hf_trainer.nan_in_mid_run(", CPU_ONLY),
        ("hf_trainer.experts_on_disk()", CPU_ONLY),
        ("hf_trainer.resume_mixture(", CPU_ONLY),
        ("processes.damaged_folder()", PROCESS),
        ("resume bit-equal with everything", ABOUT),
        ("mean_of_means_error=", ABOUT),
    ],
    "05_doctor": [
        ('reports["adapters cut off"], losses, warned', CPU_ONLY),
        ("after = {name: look(mended", CPU_ONLY),
        ("in each(programs.WELL", CPU_ONLY),
        ("script = subprocess.run(", PROCESS),
        ("guess_reading = show.predict(", CPU_ONLY),
        ("guess_reading.answer(", ABOUT),
        ("first_step_checks.arriving(kind", CPU_ONLY),
        ("picture = show.curves(shares", ABOUT),
        ('reports["a weight overflowed"] = look(', CPU_ONLY),
        ("roots = {reports", ABOUT),
        ("watched, rows = {}", CPU_ONLY),
        ("unseen, rows = look(hidden)", CPU_ONLY),
        ("peers.consult()", CPU_ONLY),
        ("preflight put everything back", ABOUT),
        ("roots={name", ABOUT),
    ],
    "10_lrc": [
        ("loss_weight_phases.phase_diagram", CPU_ONLY),
        ("lrc_tables.phase_diagram(", ABOUT),
    ],
    "11_ard_lora": [
        ("ard_lora.planted(", CPU_ONLY),
        ("ard_tables.planted(", ABOUT),
        ('on["ARD"]', ABOUT),
    ],
}
INSTEAD: dict[str, list[tuple[str, str, str]]] = {
    "01_freeze_and_adapters": [
        ("models.load, folder, four_bit=True", "models.load, folder, four_bit=False", FOUR_BIT),
    ],
    "02_compile_and_checkpointing": [
        ('assert mib["rank 1"]', "one or mib", MEMORY),
        ("assert mib[\"torch's", "one or mib[\"torch's", MEMORY),
    ],
    "11_ard_lora": [("else packed()}", "else data.model}", FOUR_BIT)],
}


class Facts(dict):
    """What a pitfall would have measured, for the cells that read it."""

    def __missing__(self, key):
        return Facts() if isinstance(key, tuple) else 0.0


class NoTrials:
    """In the place of `trials.Trials()`."""

    def __init__(self):
        self.facts, self.shows = Facts(), Facts()

    def __call__(self, *_):
        return None


def small_base(store: Path) -> None:
    """A base model that trains in a second, and short corpora, in place of the stored ones, which
    are not touched.
    """
    from nblib import paths, text
    from nbworkbook import base_model

    store.mkdir(parents=True, exist_ok=True)
    (paths.store() / "text").mkdir(parents=True, exist_ok=True)
    # what was read for the corpora is read once for all stores
    with contextlib.suppress(FileExistsError):
        (store / "text").symlink_to(paths.store() / "text")
    os.environ["NBLIB_BASE"] = str(store)
    whole = text.documents
    text.documents = lambda source="prose", split="train": whole(source, split)[:60]
    base_model.RECIPES["default"] = dict(
        steps=6, rows=4, length=64, vocab=512, hidden=32, layers=2
    ) | dict(muon_lr=0.02, adamw_lr=3e-3)


def cells(name: str) -> list[tuple[list[str], str]]:
    """Tags and source of the code cells."""
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [(cell["metadata"].get("tags", []), "".join(cell["source"])) for cell in code]


def planned(name: str) -> list[tuple[list[str], str, list[str]]]:
    """Tags and source of every code cell, as it is run, with the reasons for what is left out of
    it. No text of the two tables may be without its cell.
    """
    plan, unused = [], {text for text, *_ in SKIPPED.get(name, []) + INSTEAD.get(name, [])}
    for tags, source in cells(name):
        reasons = []
        for text, *other, why in INSTEAD.get(name, []):
            if text in source:
                source, unused = source.replace(text, *other), unused - {text}
                reasons.append(why)
        for text, why in SKIPPED.get(name, []):
            if text in source:
                source, unused = "", unused - {text}
                reasons.append(why)
        plan.append((tags, source, reasons))
    assert not unused, f"{name} has no cell with {unused}: mend the tables of {__file__}"
    return plan


def execute(source: str, number: int, names: dict) -> None:
    """One cell, with `await` at its top level; its last expression is shown as a kernel shows
    it.
    """
    file = f"<cell {number}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    from magics import plain

    body = ast.parse(plain(source), file)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    for part, mode in ((body, "exec"), (last and ast.Expression(last.value), "eval")):
        if part is None:
            continue
        code = compile(part, file, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, names)
        value = asyncio.run(value) if asyncio.iscoroutine(value) else value
        if mode == "eval" and value is not None:
            shown(value)


def shown(*values) -> None:
    """What a kernel does with a value: it asks for its representations."""
    from IPython.core.formatters import DisplayFormatter

    for value in values:
        if show := getattr(value, "_ipython_display_", None):
            show()
        else:
            DisplayFormatter().format(value)


def run(name: str, *, given: dict, pitfalls: bool = False, times: bool = False) -> list[str]:
    """Run it with the `given` parameters over the small ones; the reasons of the cells that were
    left out. An error of a cell goes up, with the cell's number.
    """
    import IPython.display

    from lessons import trials

    IPython.display.display = lambda *values, **_: shown(*values)
    if not pitfalls:
        trials.Trials = NoTrials
    names, left_out = {"__name__": "__main__", "display": IPython.display.display}, []
    for number, (tags, source, reasons) in enumerate(planned(name)):
        left_out += [f"cell {number}: {why}" for why in reasons]
        if "parameters" in tags:
            exec(compile(source, f"<cell {number}>", "exec"), names)
            unknown = (set(SMALL[name]) | set(given)) - set(names) - {"device"}
            assert not unknown, f"{name} has no parameters {unknown}"
            names |= SMALL[name] | {key: value for key, value in given.items() if key in names}
        else:
            began = time.perf_counter()
            try:
                execute(source, number, names)
            except Exception as error:
                error.add_note(f"in code cell {number} of {name}")
                raise
            if times and time.perf_counter() - began > 0.5:
                print(f"TIME {number} {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return left_out


def main() -> int:
    parser = argparse.ArgumentParser(description="run a notebook's code cells on a card of values")
    parser.add_argument("name")
    parser.add_argument("--pitfalls", action="store_true", help="these too, which takes minutes")
    parser.add_argument(
        "--instead",
        nargs=2,
        metavar=("TEXT", "OTHER"),
        help="change the notebook: to plant a fault",
    )
    parser.add_argument(
        "--store", type=Path, help="where the small base model is, or is put, for the next notebook"
    )
    parser.add_argument(
        "--times", action="store_true", help="say which cells take more than half a second"
    )
    options = parser.parse_args()
    if options.instead:
        INSTEAD.setdefault(options.name, []).append((*options.instead, "a planted fault"))
    sys.path[:0] = [str(ROOT / part) for part in ("", "notebooks", "doctor", "tests")]
    import card_values  # before torch

    with tempfile.TemporaryDirectory(prefix="nblib-card-") as folder:
        os.environ |= {
            "NBLIB_OUTPUTS": folder,
            "NBLIB_HEADLESS": "1",
            "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "agg",
        }
        os.chdir(ROOT / "notebooks")
        card_values.begin()
        small_base(options.store or Path(folder) / "base")
        with contextlib.redirect_stdout(sys.stderr if options.times else open(os.devnull, "w")):
            try:
                left_out = run(
                    options.name,
                    given={"device": "cuda"},
                    pitfalls=options.pitfalls,
                    times=options.times,
                )
            except Exception:
                traceback.print_exc()
                return 1
    print(
        f"{options.name}: every code cell ran on the card but {len(left_out)}",
        *left_out,
        sep="\n  ",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
