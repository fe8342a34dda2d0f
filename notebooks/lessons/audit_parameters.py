"""Parameters that contradict each other, found in a YAML file before anything is trained.

A profile, a sweep file and the parameters.yaml of a run are read with the notebook's own defaults beneath them. The
rules look at what two or more parameters say together, because each alone is in its range already:

    rates       lr with its convention (Muon "original", "match_rms_adamw", AdamW), and the AdamW beside Muon
    reach       the sum of the rates over all steps: further than that no norm can move
    batch       rows x accumulate x length tokens of a step, and how many of them an expert gets
    mixture     top_k of experts, and what balances them
    steps       warm-up, evaluations, races and epochs that do not fit into the steps
    precision   what the device cannot multiply

A rate means nothing without its convention (P30), so no range of rates is "Muon's". The thresholds are those of
`lessons.group_audit`, which judges a live optimizer.

Footgun: silence is no promise. A rule knows the names of this workbook's parameters and no others.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lessons.group_audit import LARGE_STEP, LARGEST, SMALLEST_BESIDE, USUAL
from nblib import paths, runtime
from nblib.methods import muon
from nblib.run import jobs, parameters, sweep
from nblib.run.parameters import Parameter, ParameterError

FIRST_SIZE = 0.02  # root mean square of a new matrix in transformers
MEAN_FACTOR = 0.5  # of a rate over a warm-up and a cosine to 0
LEAST_REACH = 0.01  # of a norm, which is 1 at the start
LEAST_TOKENS = 256  # of a step
LEAST_EACH = 32  # tokens of an expert in a micro-batch; fewer, and some get none by chance
EPOCHS = 4  # after which repeated text teaches less (arXiv:2305.16264)

Values = Mapping[str, Any]


def audit(path: Path) -> list[str]:
    """A sentence for every contradiction, the same one once; ParameterError where the file cannot be judged."""
    given, name = parameters.load_yaml(path, depth=2), jobs.resolve(_notebook(path))
    return lint(parameters.declared(paths.notebooks() / f"{name}.ipynb"), given, source=paths.short(path))


def lint(known: Mapping[str, Parameter], given: Values, *, source: str) -> list[str]:
    """The same of values that were read, over the defaults of a notebook."""
    known = {n: p._replace(allowed=None) if isinstance(p.allowed, str) else p for n, p in known.items()}
    grid = list(_grid(known, given, source))
    told: dict[str, int] = {}
    for values in grid:
        for sentence in judge(values, {n: p.default for n, p in known.items()}):
            told[sentence] = told.get(sentence, 0) + 1
    return [sentence + (f" ({n} of {len(grid)} combinations)" if len(grid) > 1 else "") for sentence, n in told.items()]


def judge(values: Values, defaults: Values | None = None) -> list[str]:
    """The sentences about one set of values."""
    v = {**values}
    if v.get("rows") == 0 and defaults:
        v["rows"] = defaults["rows"]  # as many as the card takes; a batch of the notebook's own otherwise
    return [sentence for rule in RULES for sentence in rule(v)]


def _notebook(path: Path) -> str:
    """12_moe_muon of 12_moe_muon.gpu.yaml, and of a run's own parameters.yaml the folder above its own."""
    return path.absolute().parent.parent.name if path.name == "parameters.yaml" else path.name.split(".")[0]


def _grid(known: Mapping[str, Parameter], given: Values, source: str) -> Iterator[dict[str, Any]]:
    """Every combination of what varies, over the defaults."""
    if "minimise" in given or "maximise" in given:
        raise ParameterError(f"{source} is a search file: its values are ranges; audit the best run of the search.")
    varied = {}
    for name, value in given.items():
        is_list = name in known and known[name].type.startswith("list")
        varies = isinstance(value, list) and (not is_list or any(isinstance(item, list) for item in value))
        items = value if varies and value else [value]
        varied[name] = [parameters.check(known, {name: item}, source)[name] for item in items]
    combinations = itertools.product(*varied.values())
    for combination in itertools.islice(combinations, sweep.LIMIT):
        yield {n: p.default for n, p in known.items()} | dict(zip(varied, combination))


# ------------------------------------------------------------------ the rules


def _kind(v: Values) -> str:
    """The convention of `lr` where it is the rate of hidden matrices."""
    if "update" in v:
        return "AdamW" if v["update"] == "adamw" else v["update"]
    return "original" if "capacity" in v else "AdamW"


def _rates(v: Values) -> Iterator[str]:
    for name in v:
        if (name == "lr" or name.endswith("_lr")) and v[name] == 0:
            yield f"{name} = 0: what it belongs to does not train; give it a rate"
    if not {"lr", "adamw_lr", "hidden", "width"} <= v.keys():
        return
    kind, lr, beside = _kind(v), v["lr"], v["adamw_lr"]
    low, high = USUAL[kind]
    if kind == "original" and 0 < lr < low:
        yield (
            f"lr = {lr:g} with 'original' scaling moves a matrix by {lr:g} in spectral norm, and is AdamW's kind of "
            "number: take about 0.02, or the scaling match_rms_adamw"
        )
    if kind == "match_rms_adamw" and lr > high:
        yield (
            f"lr = {lr:g} is a number for 'original' scaling; with update = match_rms_adamw take AdamW's, about 0.003"
        )
    if kind == "AdamW" and lr > high:
        yield f"lr = {lr:g} by AdamW is Muon's kind of number: matrices need about 0.003"
    if beside > LARGEST:
        yield f"adamw_lr = {beside:g} moves every entry by about that in each step: take {USUAL['AdamW'][1]:g} or less"
    if kind != "AdamW" and 0 < beside < SMALLEST_BESIDE:
        yield (
            f"adamw_lr = {beside:g} beside Muon: embeddings, head and norms hardly train at it, whatever Muon does; "
            "take 0.001 or more"
        )
    if kind != "AdamW":
        shapes = {"hidden": (v["hidden"], v["hidden"]), "width": (v["width"], v["hidden"])}
        step = max(muon.step_rms(shape, lr, kind) for shape in shapes.values()) / FIRST_SIZE
        if step > LARGE_STEP:
            yield f"lr = {lr:g} with '{kind}' moves a new matrix by {step:.0%} of its own size in one step: lower it"


def _reach(v: Values) -> Iterator[str]:
    """Only where norms train."""
    rate = v.get("adamw_lr", v.get("lr") if "attention_heads" in v else None)
    if not rate or "steps" not in v:
        return
    reach = MEAN_FACTOR * rate * v["steps"]
    if reach < LEAST_REACH:
        yield (
            f"in {v['steps']:,} steps the rates of AdamW sum to {reach:.2g}, so no norm ends further than that from "
            "1: the run is too short to judge by, or its rate too small"
        )


def _batch(v: Values) -> Iterator[str]:
    if not {"rows", "accumulate", "length"} <= v.keys():
        return
    micro = v["rows"] * v["length"]
    tokens = micro * v["accumulate"]
    if tokens < LEAST_TOKENS:
        yield f"a step sees {tokens} tokens: with so few the gradient is mostly noise; raise rows, length or accumulate"
    if {"experts", "top_k"} <= v.keys() and (each := micro * v["top_k"] / v["experts"]) < LEAST_EACH:
        yield (
            f"of {micro} tokens of a micro-batch an expert gets {each:.0f} on average, so some get none by chance: "
            "raise rows or length (accumulate does not help the balance loss)"
        )


def _mixture(v: Values) -> Iterator[str]:
    if {"hidden", "attention_heads"} <= v.keys() and v["hidden"] % v["attention_heads"]:
        yield f"hidden = {v['hidden']} does not divide by attention_heads = {v['attention_heads']}: change one"
    if not {"experts", "top_k", "balance_weight"} <= v.keys():
        return
    experts, k, weight = v["experts"], v["top_k"], v["balance_weight"]
    if k > experts:
        yield f"top_k = {k} of experts = {experts}: a token cannot have more experts than there are"
    if k == experts:
        yield f"top_k = experts = {k}: every token takes all experts, so nothing is routed and nothing is saved"
    if k < experts and weight == 0:
        yield "balance_weight = 0: nothing keeps the load of the experts even; look at the smallest load while training"
    if weight > 1:
        yield f"balance_weight = {weight:g}: an even load costs {weight:g} then, beside a language loss of a few nats"


def _steps(v: Values) -> Iterator[str]:
    steps = v.get("steps", 0)
    if "warmup" in v and v["warmup"] >= steps:
        yield f"warmup = {v['warmup']} of steps = {steps}: the warm-up does not end; take a tenth of the steps"
    if v.get("eval_every", 0) > steps:
        yield f"eval_every = {v['eval_every']} of steps = {steps}: nothing is evaluated before the end"
    if v.get("update") == "adamw" and (v.get("rival") or v.get("race_steps")):
        yield "update = adamw with rival or race_steps: AdamW cannot race itself; set race_steps: 0 and rival: false"
    size = re.search(r"[?&]tokens=([0-9.]+)([KMGB]?)", str(v.get("corpus", "")))
    if size and {"rows", "accumulate", "length"} <= v.keys():
        corpus = float(size[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}[size[2]]
        epochs = steps * v["rows"] * v["accumulate"] * v["length"] / corpus if corpus else 0
        if epochs > EPOCHS:
            yield f"the run reads its corpus {epochs:.1f} times: fetch more tokens, or take fewer steps"


def _teacher(v: Values) -> Iterator[str]:
    """What a cache of the teacher's answers cannot give (methods/divergences.py)."""
    if not v.get("k") or v.get("source", "cache") != "cache" or "tail" not in v:
        return
    tail, divergence, learns = v["tail"], v.get("divergence", "forward"), v.get("learns", "fixed")
    if tail in ("drawn", "none") and divergence in ("reverse", "js"):
        yield f"tail = {tail} leaves tokens out, which divergence = {divergence} cannot measure: take spread, or k: 0"
    if learns != "fixed" and divergence == "soft_ce":
        yield f"learns = {learns} with divergence = soft_ce: the teacher's entropy would drive it; take forward"
    elif learns != "fixed" and tail != "drawn":
        yield f"learns = {learns} with tail = {tail}: its shape misleads a learned temperature; take drawn, or k: 0"


def _precision(v: Values) -> Iterator[str]:
    device, precision = v.get("device"), v.get("precision")
    if device == "cpu" and precision == "fp16":
        yield "precision = fp16 on device = cpu: a CPU gains nothing by it and needs a loss scaler; take auto"
    if device == "cpu" and precision == "bf16" and runtime.native_precision("cpu")[0] != "bf16":
        yield "precision = bf16 on device = cpu: this CPU emulates it, several times slower than fp32; take auto"
    if device == "cuda" and precision == "fp32":
        yield "precision = fp32 on device = cuda turns TF32 off as well: no product uses the fast units; take auto"
    if device == "cpu" and v.get("four_bit"):
        yield "four_bit on device = cpu: it saves memory and costs time, and is for cards; leave it out"


RULES: tuple[Callable[[Values], Iterator[str]], ...] = (_rates, _reach, _batch, _mixture, _steps, _teacher, _precision)
