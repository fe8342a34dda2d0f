"""Runs side by side: what they left is read, what cannot be compared is named, and each axis gets
its own order.

    find(["10_lrc", "outputs/10_lrc/sweep-....json"])     names to run folders
    trained, left_out = load(folders)
    what can be compared, and what cannot with the reason
    at(curve, budget)                                      the loss of a run at a budget that it
                                                           passes
    ranking(values), flips(one, other)                     an order with its doubts; pairs that two
                                                           axes order otherwise
    front(points)                                          the points that no other point beats in
                                                           everything

Two trainings can be compared when their losses are of the same rows and they begin from the same
base model. So the text, the length of a row, the number of tokens judged and the hash of the base
model must agree; what most runs share counts, and the others are left out with a sentence. A
training that ended early stays, and its label says so.

A method is what its runs share when the seed is taken away: the training's name, or the parameter
`method`, and the parameters that vary beside the seed.

Footgun: at a budget that cuts a run short its rate has not come down yet. A run planned for that
budget would do better. Read an order at equal seconds as a question, and plan the runs that answer
it.
"""

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lessons import seeds
from nblib import files, paths
from nbworkbook import parameters, runs, show
from nbworkbook.parameters import ParameterError

AXES = {"step": "steps", "tokens": "tokens", "seconds": "seconds"}
COSTS = {  # what result.json may say of a run, and its name on an axis
    "trainable_bytes": "bytes that train",
    "optimizer_bytes": "bytes of the optimizer",
    "peak_bytes": "peak bytes of training",
    "disk_bytes": "bytes to store",
    "loaded_bytes": "bytes to load for use",
    "seconds": "seconds of training",
}
COLOURS = [
    f"tab:{name}"
    for name in ("blue", "orange", "green", "red", "purple", "brown", "pink", "olive", "cyan")
]
MARKERS = "osD^vP*X"
Points = list[tuple[float, float]]
BESIDE = "beside the one before"


class Trained(NamedTuple):
    """One training of one run, as far as it is needed here."""

    method: str
    seed: int
    folder: Path
    ended: str  # "24 steps", or "44 of 600 steps, stopped"
    whole: bool
    curves: dict[str, Points]  # held-out loss over steps, tokens and seconds, preparation included
    loss: float  # at the end
    costs: dict[str, float]
    new: bool  # begins with new weights, and not from the base model

    @property
    def label(self) -> str:
        return self.method if self.whole else f"{self.method}, {self.ended}"


# ------------------------------------------------------------------ finding and reading


def find(names: Sequence[str]) -> list[Path]:
    """Return the run folders that names stand for: a notebook (its newest run), `notebook/run` (`*`
    for all), or a sweep.
    """
    every = {
        f"{p.parent.parent.name}/{p.parent.name}": p.parent
        for p in sorted(paths.outputs().glob("*/*/run.json"))
    }
    folders, problems = [], []
    for name in names:
        try:
            folders += _sweep(name) if name.endswith(".json") else _named(name.strip("/"), every)
        except ParameterError as error:
            problems.append(str(error))
    if problems:
        raise ParameterError("\n".join(problems))
    return list(dict.fromkeys(folders))


def _named(name: str, every: Mapping[str, Path]) -> list[Path]:
    short = name.removeprefix("outputs/")
    if short.endswith("/*"):
        chosen = [folder for key, folder in every.items() if key.startswith(short[:-1])]
    elif short in every:
        chosen = [every[short]]
    else:
        # the newest of a notebook, or a folder by its own name; names of folders begin with the
        # time
        chosen = [folder for key, folder in every.items() if short in key.split("/")][-1:]
    if not chosen:
        known = {*every, *(key.split("/")[0] for key in every)}
        raise ParameterError(f"runs = '{name}': {parameters.unknown('run', short, known)}")
    return chosen


def _sweep(name: str) -> list[Path]:
    places = [Path(name), paths.root() / name, paths.outputs() / name.removeprefix("outputs/")]
    if (file := next((place for place in places if place.is_file()), None)) is None:
        raise ParameterError(
            f"runs = '{name}': there is no such sweep file; allowed: "
            "outputs/<notebook>/sweep-*.json."
        )
    try:
        rows = [row["run"] for row in files.read_json(file)["rows"] if row["run"]]
        folders = [file.parent / row for row in rows if Path(row).name == row]
    except (files.Unreadable, KeyError, TypeError) as error:
        raise ParameterError(f"runs = '{name}': this is no file of a sweep ({error}).") from None
    if not folders:
        raise ParameterError(f"runs = '{name}': none of its combinations has run.")
    return folders


class _Skip(ValueError):
    """Why a training cannot be compared."""


def load(folders: Iterable[Path]) -> tuple[list[Trained], list[dict[str, str]]]:
    """Return the trainings that can be compared, by method and seed, and a row for each that
    cannot, with the reason.
    """
    read, left_out = [], []
    for folder in folders:
        name = f"{folder.parent.name}/{folder.name}"
        try:
            known = _read(folder)
        except _Skip as why:
            left_out.append({"run": name, "training": "all", "left out because": str(why)})
            continue
        for training, records in known["trainings"].items():
            try:
                read.append({**known, "training": training, **_curve(records, known["result"])})
            except _Skip as why:
                left_out.append(
                    {
                        "run": name,
                        "training": training or "the only one",
                        "left out because": str(why),
                    }
                )
    comparable = _alike(read, left_out)
    if not comparable:
        reasons = (
            "; ".join(f"{row['run']}: {row['left out because']}" for row in left_out[:3])
            or "there are none"
        )
        raise ParameterError(f"runs: none of these runs can be compared. {reasons}")
    return sorted(_trained(comparable), key=lambda t: (t.new, t.method, t.seed)), left_out


def _read(folder: Path) -> dict[str, Any]:
    """Return what a folder holds; _Skip says what is wrong with it."""
    if problem := runs.problem(folder):
        raise _Skip(problem)
    try:
        values = parameters.load_yaml(folder / "parameters.yaml")
        result, begins = (files.read_json(folder / name) for name in ("result.json", "base.json"))
        records = runs.Run(folder, values).history()
    except (ParameterError, files.Unreadable, OSError) as error:
        raise _Skip(f"damaged: {error}") from None
    if not records:
        raise _Skip("it logged nothing: no metrics.jsonl")
    trainings: dict[str, list[dict]] = {}
    for record in records:
        trainings.setdefault(str(record.get("run", "")), []).append(record)
    content = begins.get("content") or values.get("model") or None
    about = {
        "folder": folder,
        "values": values,
        "result": result,
        "base": content,
        "trainings": trainings,
    }
    return about | {"status": runs.status(folder)}


def _curve(records: list[dict], result: Mapping[str, Any]) -> dict[str, Any]:
    """Points of the held-out loss over each axis.

    What a method needs before its first step comes on top.
    """
    looks = [r for r in records if _number(r.get("eval_loss")) and _number(r.get("step"))]
    looks.sort(key=lambda r: r["step"])
    if len(looks) < 2:
        raise _Skip(
            "fewer than two held-out losses in its records: it was trained without eval_every"
        )
    for name in ("tokens", "seconds"):
        if not all(_number(r.get(name)) for r in looks):
            raise _Skip(
                f"no {name} in its records, as in runs of older code; tokens_per_s alone gives none"
            )
    before = {
        "step": 0,
        **{name: result.get(f"prepare_{name}", 0) for name in ("tokens", "seconds")},
    }
    curves = {axis: [(r[axis] + before[axis], r["eval_loss"]) for r in looks] for axis in AXES}
    last = max((r for r in records if _number(r.get("step"))), key=lambda r: r["step"])
    judged = next((r["eval_tokens"] for r in looks if "eval_tokens" in r), None)
    return {"curves": curves, "last": last, "judged": judged}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _alike(read: list[dict], left_out: list[dict]) -> list[dict]:
    """Those whose text and base model are the ones that most share; the others go to `left_out`."""

    def text(r: dict) -> tuple:
        return r["values"].get("corpus"), r["values"].get("length"), r["judged"]

    for part, say in ((text, _another_text), (lambda r: r["base"], _another_base)):
        if not read:
            return []
        usual, _ = Counter(map(part, read)).most_common(1)[0]
        for r in read:
            if part(r) != usual:
                name = f"{r['folder'].parent.name}/{r['folder'].name}"
                why = say(part(r), usual)
                left_out.append(
                    {
                        "run": name,
                        "training": r["training"] or "the only one",
                        "left out because": why,
                    }
                )
        read = [r for r in read if part(r) == usual]
    return read


def _another_text(own: tuple, usual: tuple) -> str:
    names = ("corpus", "length", "tokens judged")
    return "another text: " + ", ".join(
        f"{n} {a}, not {b}" for n, a, b in zip(names, own, usual) if a != b
    )


def _another_base(own: str | None, usual: str | None) -> str:
    if own is None:
        return "its folder does not say which base model it began from"
    return f"another base model: {own}, not {usual or 'an unknown one'}"


def _trained(read: list[dict]) -> list[Trained]:
    several = len({r["folder"].parent.name for r in read}) > 1
    names = [_method(r, several) for r in read]
    held_out = all(_number(r["result"].get("held_out_loss")) for r in read)
    trained = []
    for r, name in zip(read, names):
        varies = {
            key
            for other, same in zip(read, names)
            for key, value in r["values"].items()
            if same == name and other["values"].get(key) != value
        }
        parts = [
            f"{key} {show.cell(r['values'][key])}" for key in sorted(varies - {"seed", "runs"})
        ]
        loss = r["result"]["held_out_loss"] if held_out else r["curves"]["step"][-1][1]
        costs = {key: r["result"][key] for key in COSTS if _number(r["result"].get(key))}
        costs["seconds"] = r["curves"]["seconds"][-1][0]
        seed = r["values"].get("seed", 0)
        ended, whole = _ending(r)
        new = bool(r["result"].get("from_scratch"))
        method = ", ".join([name, *parts])
        trained.append(
            Trained(method, seed, r["folder"], ended, whole, r["curves"], loss, costs, new)
        )
    return trained


def _method(r: dict, several: bool) -> str:
    if "method" in r["values"]:
        return str(r["values"]["method"])
    return " ".join(
        filter(
            None, [r["folder"].parent.name if several or not r["training"] else "", r["training"]]
        )
    )


def _ending(r: dict) -> tuple[str, bool]:
    """How far a training came.

    One that is not at its last step says why: stopped, killed, failed or running.
    """
    step, of, status = r["last"]["step"], r["last"].get("of"), r["status"].split(",")[0].split()[0]
    if not _number(of) or step >= of:
        return f"{step} steps", True
    why = "stopped" if "stopped" in r["last"] or status == "done" else status
    return f"{step} of {of} steps, {why}", False


# ------------------------------------------------------------------ the comparison


def at(curve: Points, budget: float) -> float | None:
    """Return the loss at a budget, on the straight line between the looks around it; None where the
    run did not get there.
    """
    for (x, loss), (next_x, next_loss) in itertools.pairwise(curve):
        if x <= budget <= next_x:
            share = (budget - x) / (next_x - x) if next_x > x else 1.0
            return loss + share * (next_loss - loss)
    return None


def front(points: Mapping[Any, tuple[float, float]]) -> list:
    """Return the names of the (cost, loss) points that no other point beats: as cheap and as good,
    and better in one.
    """

    def beats(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    return [
        name
        for name, point in points.items()
        if not any(beats(other, point) for other in points.values())
    ]


def budget(trained: Sequence[Trained], axis: str) -> float:
    """Return the most of an axis that every whole training reached."""
    ends = [t.curves[axis][-1][0] for t in trained if t.whole] or [
        t.curves[axis][-1][0] for t in trained
    ]
    return min(ends)


def by_method(
    trained: Iterable[Trained], value: Callable[[Trained], float | None]
) -> dict[str, dict[int, float]]:
    """Return method -> seed -> value, without those that have none."""
    table: dict[str, dict[int, float]] = {}
    for t in trained:
        if (number := value(t)) is not None:
            table.setdefault(t.label, {})[t.seed] = number
    return table


def ranking(values: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Return a row per method, the lowest mean first, with its spread and whether it differs from
    the one before it.
    """
    order = sorted(values, key=lambda method: mean(values[method].values()))
    rows = []
    for place, method in enumerate(order, start=1):
        of = values[method]
        row = {
            "place": place,
            "method": method,
            "mean": mean(of.values()),
            "lowest": min(of.values()),
        }
        row |= {"highest": max(of.values()), "seeds": len(of), BESIDE: ""}
        if place > 1:
            apart = differs(values[order[place - 2]], of)
            row[BESIDE] = "higher" if apart else "not distinguishable"
        rows.append(row)
    return rows


def differs(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    """Whether two methods differ by more than their seeds do: the rule of lessons/seeds.py on the
    seeds of both.
    """
    common = sorted(one.keys() & other.keys())
    return seeds.distinct(seeds.gains([other[s] for s in common], [one[s] for s in common]))


def flips(
    one: Mapping[str, Mapping[int, float]], other: Mapping[str, Mapping[int, float]]
) -> list[tuple[str, str]]:
    """Pairs of methods that both comparisons tell apart, and order the other way round."""
    pairs = []
    for a, b in itertools.combinations([name for name in one if name in other], 2):
        if differs(one[a], one[b]) and differs(other[a], other[b]):
            first, second = (
                mean(table[a].values()) < mean(table[b].values()) for table in (one, other)
            )
            if first != second:
                pairs.append((a, b))
    return pairs


def moves(losses: Mapping[str, Mapping[str, Mapping[int, float]]]) -> list[str]:
    """Return a sentence for each pair that two axes tell apart and order the other way round, and
    for each method that leads on one axis and is out on another. Empty where the order does not
    hang on the axis.
    """
    sentences = []
    for one, other in itertools.combinations(losses, 2):
        for a, b in flips(losses[one], losses[other]):
            sentences.append(f"{a} and {b} change places between {one} and {other}")
    for one, other in itertools.permutations(losses, 2):
        if (first := leader(ranking(losses[one]))) in losses[one] and first not in losses[other]:
            sentences.append(f"{first} leads at {one} and is out at {other}")
    return sentences


def places(orders: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, str]]:
    """Return a row per method with its place on each axis; `=` where it cannot be told from the one
    before it.
    """
    rows = []
    for method in dict.fromkeys(row["method"] for ranked in orders.values() for row in ranked):
        row = {"method": method}
        for axis, ranked in orders.items():
            own = next((r for r in ranked if r["method"] == method), None)
            doubt = " =" if own and own[BESIDE].startswith("not") else ""
            row[axis] = f"{own['place']}{doubt}" if own else "out"
        rows.append(row)
    return rows


def means(trained: Sequence[Trained], cost: str) -> dict[str, tuple[float, float]]:
    """Return method -> (mean cost, mean loss), of the methods that noted this cost."""
    known = [t for t in trained if cost in t.costs]
    losses, spent = by_method(known, lambda t: t.loss), by_method(known, lambda t: t.costs[cost])
    return {
        method: (mean(spent[method].values()), mean(of.values())) for method, of in losses.items()
    }


def leader(ranked: Sequence[Mapping[str, Any]]) -> str:
    """Return the method on the first place, if its seeds tell it from the second."""
    if not ranked:
        return "none of them"
    return (
        "not distinguishable"
        if "not" in ranked[min(1, len(ranked) - 1)][BESIDE]
        else ranked[0]["method"]
    )


# ------------------------------------------------------------------ tables and figures


class OneLine:
    """A line of output that says what is being done, several times a second at most; the runner
    hears of it, too.
    """

    def __init__(self) -> None:
        self.handle, self.drawn, self.reported = None, 0.0, 0.0

    def __call__(self, sentence: str) -> None:
        now, last = time.monotonic(), " found in " in sentence
        if self.handle is None or now - self.drawn > 0.25 or last:
            self.drawn, self.handle = now, show.displayed(sentence, self.handle)
        if runs.RUN_DIR in os.environ and (last or now - self.reported > 5):
            self.reported = now
            with (Path(os.environ[runs.RUN_DIR]) / runs.PROGRESS).open(
                "a", encoding="utf-8"
            ) as lines:
                lines.write(f"{sentence}\n")


def overview(trained: Sequence[Trained]) -> list[dict[str, Any]]:
    """Return a row per method: what it began from, how long it trained, and its bytes in MB."""
    rows = []
    for label in dict.fromkeys(t.label for t in trained):
        group = [t for t in trained if t.label == label]
        row = {"method": label, "begins from": "new weights" if group[0].new else "the base model"}
        row |= {"seeds": len(group), "ended after": ", ".join(sorted({t.ended for t in group}))}
        row["tokens"] = round(mean(t.curves["tokens"][-1][0] for t in group))
        for key, name in COSTS.items():
            known = [t.costs[key] for t in group if key in t.costs]
            scale = 1e6 if key.endswith("bytes") else 1
            shown = name.replace("bytes", "MB")
            row[shown] = mean(known) / scale if known else "not noted"
        rows.append(row)
    return rows


def looks(trained: Iterable[Trained]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker per method, the same in every figure."""
    labels = dict.fromkeys(t.label for t in trained)
    return dict(zip(labels, zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS))))


def _panels(
    trained: Sequence[Trained], columns: int, height: float
) -> tuple[Figure, Any, list[list[Trained]]]:
    """Return a row of axes per group, new weights above the base model: their losses are too far
    apart for one scale.
    """
    groups = [group for new in (True, False) if (group := [t for t in trained if t.new is new])]
    figure = Figure(figsize=(9.6, height * len(groups) + 0.4), layout="constrained")
    panels = figure.subplots(len(groups), columns, sharex="col", sharey="row", squeeze=False)
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    for row, group in zip(panels, groups):
        row[0].set_ylabel("from new weights" if group[0].new else "from the base model")
    return figure, panels, groups


def _legend(figure: Figure, panels: Any, trained: Sequence[Trained]) -> None:
    drawn = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels())
    }
    labels = [label for label in looks(trained) if label in drawn]
    figure.legend(
        [drawn[label] for label in labels],
        labels,
        frameon=False,
        loc="outside right upper",
        fontsize=9,
    )


def _scales(groups: list) -> str:
    return (
        " Above: new weights; below: the base model, on a scale of its own."
        if len(groups) > 1
        else ""
    )


def curves(trained: Sequence[Trained]) -> show.Picture:
    """Held-out loss over steps, tokens and seconds, a line per run."""
    figure, panels, groups = _panels(trained, len(AXES), 2.1)
    look = looks(trained)
    for row, group in zip(panels, groups):
        for axes, axis in zip(row, AXES):
            for t in group:
                style = "-" if t.whole else ":"
                colour, _ = look[t.label]
                axes.plot(
                    *zip(*t.curves[axis]),
                    style,
                    color=colour,
                    label=t.label,
                    linewidth=1.1,
                    alpha=0.8,
                )
        row[-1].axvline(budget(group, "seconds"), color="black", linestyle="--", linewidth=0.8)
    for axes, name in zip(panels[-1], AXES.values()):
        axes.set_xlabel(name)
    _legend(figure, panels, trained)
    words = (
        "Loss on the validation rows, nats per token; a colour per method, a line per "
        f"seed.{_scales(groups)}"
    )
    words += (
        " Tokens and seconds count what a method needs before its first step. Dashed: the "
        "end of the fastest run."
    )
    return show.Picture(figure, words, title="The same runs over three axes")


def costs(trained: Sequence[Trained]) -> show.Picture:
    """Loss at the end against each cost in bytes that was noted, with the range of the seeds."""
    noted = [
        cost for cost in COSTS if cost.endswith("bytes") and any(cost in t.costs for t in trained)
    ]
    figure, panels, groups = _panels(trained, max(1, len(noted)), 1.9)
    for column, cost in zip(panels.T, noted):
        _points(column, groups, trained, cost)
    _legend(figure, panels, trained)
    words = (
        "Lower and further left is better. A point per method: the mean; the bar is the "
        "range of the seeds."
    )
    orders = {
        tuple(sorted(p, key=lambda method: p[method][0]))
        for cost in noted
        for p in [means(trained, cost)]
    }
    words += (
        f"{_scales(groups)} The {len(noted)} kinds of bytes put the methods into "
        f"{len(orders)} orders."
    )
    return show.Picture(
        figure,
        words if noted else "No run noted its bytes.",
        title="The loss at the end, against bytes",
    )


def _points(column: Any, groups: list, trained: Sequence[Trained], cost: str) -> None:
    """Draw the methods in the axes of their group; bytes in MB, on a logarithmic scale."""
    look, size = looks(trained), 1e6 if cost.endswith("bytes") else 1
    for axes, group in zip(column, groups):
        losses = by_method(group, lambda t: t.loss)
        for n, (method, (x, loss)) in enumerate(means(group, cost).items()):
            of, (colour, marker) = losses[method].values(), look[method]
            reach = [[loss - min(of)], [max(of) - loss]]
            style = dict(
                color=colour,
                marker=marker,
                markersize=max(4, 8 - n),
                linestyle="",
                capsize=2,
                zorder=3 + n,
            )
            axes.errorbar(x / size, loss, yerr=reach, label=method, **style)
    for axes in column:
        axes.margins(x=0.15)
    axes.set_xlabel(COSTS[cost].replace("bytes", "MB"))
    if size > 1:
        x = [x for x, _ in means(trained, cost).values()]
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if max(x) > 6 * min(x) else (1, 2, 3, 5, 7))
        )
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


def fronts(trained: Sequence[Trained], chosen: Sequence[str]) -> show.Picture:
    """Return the Pareto front of loss against each of a few costs, over all groups."""
    figure, panels, groups = _panels(trained, len(chosen), 2.0)
    sentences = []
    for column, cost in zip(panels.T, chosen):
        _points(column, groups, trained, cost)
        points, size = means(trained, cost), 1e6 if cost.endswith("bytes") else 1
        on = sorted(front(points), key=lambda name: points[name])
        edge = [(points[name][0] / size, points[name][1]) for name in on]
        for axes in column:  # one line through both scales
            low, high = axes.get_ylim()
            far = (max(x for x, _ in points.values()) / size, edge[-1][1])
            axes.step(
                *zip((edge[0][0], 99.0), *edge, far),
                where="post",
                color="black",
                linewidth=0.9,
                zorder=1,
            )
            axes.set_ylim(low, high)
        sentences.append(f"{COSTS[cost].replace('bytes', 'MB')}: {', '.join(on)}")
    _legend(figure, panels, trained)
    words = (
        f"Black: the front. What lies above or right of it is beaten.{_scales(groups)} On it, by "
    )
    words += f"{'; by '.join(sentences)}."
    return show.Picture(figure, words, title="Pareto fronts: what no other method beats")


def spread(trained: Sequence[Trained]) -> show.Picture:
    """Every seed's loss at the end as a point, a line of points per method, each group on a scale
    of its own.
    """
    groups = [g for new in (False, True) if (g := [t for t in trained if t.new is new])]
    tables = [by_method(group, lambda t: t.loss) for group in groups]
    figure = Figure(figsize=(9.4, 0.9 + 0.33 * max(map(len, tables))), layout="constrained")
    panels, look = figure.subplots(1, len(groups), squeeze=False)[0], looks(trained)
    for axes, group, table in zip(panels, groups, tables):
        order = [row["method"] for row in ranking(table)][::-1]
        for method in order:
            of = list(table[method].values())
            axes.plot([min(of), max(of)], [method, method], color=look[method][0], linewidth=1)
            axes.plot(of, [method] * len(of), "o", color=look[method][0], markersize=5)
        axes.set(
            xlabel=f"held-out loss, from {'new weights' if group[0].new else 'the base model'}"
        )
        axes.margins(y=0.25)
        axes.grid(alpha=0.3, axis="x")
    words = (
        "One point per seed, the lowest mean on top. Where two lines overlap, look at the "
        "seeds pair by pair."
    )
    return show.Picture(figure, words, title="The same training at several seeds")
