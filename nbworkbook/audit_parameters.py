"""Parameters that contradict each other, found in a YAML file before anything is trained.

A profile, a sweep file and the parameters.yaml of a run are read with the notebook's own defaults
beneath them. The rules look at what two or more parameters mean together, because each alone is in
its range already:

    rates       lr with its convention (Muon "original", "match_rms_adamw", AdamW), and the AdamW
                beside Muon
    reach       the sum of the rates over all steps: further than that no norm can move
    batch       rows x accumulate x length tokens of a step, and how many of them an expert gets
    mixture     top_k of experts, and what balances them
    steps       warm-up, evaluations, races and epochs that do not fit into the steps
    teacher     what a cache of a teacher's answers cannot give
    precision   what the device cannot multiply

A rate means nothing without its convention (P30), so no range of rates is "Muon's". The thresholds
are those of `nblib.methods.muon.audit`, which judges a live optimizer.

Footgun: silence is no promise. A rule is about the names of this workbook's parameters and no
others.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nblib import paths, runtime
from nblib.methods import muon
from nblib.methods.muon.audit import LARGE_STEP, LARGEST, SMALLEST_BESIDE, USUAL
from nbworkbook import jobs, parameters, sweep
from nbworkbook.parameters import Parameter, ParameterError

FIRST_SIZE = 0.02  # root mean square of a new matrix in transformers
MEAN_FACTOR = 0.5  # of a rate over a warm-up and a cosine to 0
LEAST_REACH = 0.01  # of a norm, which is 1 at the start
LEAST_TOKENS = 256  # of a step
LEAST_EACH = 32  # tokens of an expert in a micro-batch; fewer, and some get none by chance
EPOCHS = 4  # after which repeated text teaches less (arXiv:2305.16264)
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}  # of a corpus's tokens

Values = Mapping[str, Any]


def audit(path: Path) -> list[str]:
    """Return a sentence for every contradiction in a file, the same one once.

    ParameterError where the file cannot be judged.
    """
    given = parameters.load_yaml(path, depth=2)
    name = jobs.resolve(_notebook_of(path))
    known = parameters.declared(paths.notebooks() / f"{name}.ipynb")
    return lint(known, given, source=paths.short(path))


def lint(known: Mapping[str, Parameter], given: Values, *, source: str) -> list[str]:
    """Return the same of values that were read, over the defaults of a notebook."""
    # A corpus or a model need not be on this machine to be judged.
    checked = {}
    for name, parameter in known.items():
        if isinstance(parameter.allowed, str):
            parameter = parameter._replace(allowed=None)
        checked[name] = parameter
    defaults = {name: parameter.default for name, parameter in known.items()}

    # Of a sweep file, every combination.
    combinations = list(_combinations(checked, given, source))
    times: Counter[str] = Counter()
    for values in combinations:
        times.update(dict.fromkeys(judge(values, defaults), 1))
    if len(combinations) == 1:
        return list(times)
    return [
        f"{sentence} ({count} of {len(combinations)} combinations)"
        for sentence, count in times.items()
    ]


def judge(values: Values, defaults: Values | None = None) -> list[str]:
    """Return the sentences about one set of values."""
    judged = dict(values)
    if judged.get("rows") == 0 and defaults:
        # As many as the card takes. A batch of the notebook's own stands for it.
        judged["rows"] = defaults["rows"]
    return [sentence for rule in RULES for sentence in rule(judged)]


def _notebook_of(path: Path) -> str:
    """Return 12_moe_muon of 12_moe_muon.gpu.yaml; of a run's parameters.yaml the folder above its
    own.
    """
    if path.name == "parameters.yaml":
        return path.absolute().parent.parent.name
    return path.name.split(".")[0]


def _combinations(
    known: Mapping[str, Parameter], given: Values, source: str
) -> Iterator[dict[str, Any]]:
    """Yield every combination of what varies, over the defaults."""
    if "minimise" in given or "maximise" in given:
        raise ParameterError(
            f"{source} is a search file: its values are ranges; audit the best run of the search."
        )

    # A list is what varies, but for a parameter that is one itself: then a list of lists is.
    choices: dict[str, list[Any]] = {}
    for name, value in given.items():
        takes_list = name in known and known[name].type.startswith("list")
        varies = isinstance(value, list)
        if takes_list and varies:
            varies = any(isinstance(item, list) for item in value)
        items = value if varies and value else [value]
        choices[name] = [parameters.check(known, {name: item}, source)[name] for item in items]

    defaults = {name: parameter.default for name, parameter in known.items()}
    products = itertools.product(*choices.values())
    for combination in itertools.islice(products, sweep.LIMIT):
        yield defaults | dict(zip(choices, combination))


# ------------------------------------------------------------------ the rules


def _convention(values: Values) -> str:
    """Return the convention of `lr` where it is the rate of hidden matrices."""
    update = values.get("update")
    if update is not None:
        return "AdamW" if update == "adamw" else update
    return "original" if "capacity" in values else "AdamW"


def _rates(values: Values) -> Iterator[str]:
    """Find rates that do not fit their convention."""
    for name, value in values.items():
        if (name == "lr" or name.endswith("_lr")) and value == 0:
            yield f"{name} = 0: what it belongs to does not train; give it a rate"
    if not {"lr", "adamw_lr", "hidden", "width"} <= values.keys():
        return

    # The rate of the matrices, by the convention of its optimizer.
    kind = _convention(values)
    lr = values["lr"]
    low, high = USUAL[kind]
    if kind == "original" and 0 < lr < low:
        yield (
            f"lr = {lr:g} with 'original' scaling moves a matrix by {lr:g} in spectral norm, "
            "and is AdamW's kind of "
            "number: take about 0.02, or the scaling match_rms_adamw"
        )
    if kind == "match_rms_adamw" and lr > high:
        yield (
            f"lr = {lr:g} is a number for 'original' scaling; with update = match_rms_adamw "
            "take AdamW's, about 0.003"
        )
    if kind == "AdamW" and lr > high:
        yield f"lr = {lr:g} by AdamW is Muon's kind of number: matrices need about 0.003"

    # The rate of the AdamW beside Muon, which has embeddings, head and norms.
    beside = values["adamw_lr"]
    if beside > LARGEST:
        yield (
            f"adamw_lr = {beside:g} moves every entry by about that in each step: take "
            f"{USUAL['AdamW'][1]:g} or less"
        )
    if kind == "AdamW":
        return
    if 0 < beside < SMALLEST_BESIDE:
        yield (
            f"adamw_lr = {beside:g} beside Muon: embeddings, head and norms hardly train at "
            "it, whatever Muon does; "
            "take 0.001 or more"
        )

    # How far the first step moves a matrix as it was made.
    hidden = values["hidden"]
    shapes = [(hidden, hidden), (values["width"], hidden)]
    step = max(muon.step_rms(shape, lr, kind) for shape in shapes) / FIRST_SIZE
    if step > LARGE_STEP:
        yield (
            f"lr = {lr:g} with '{kind}' moves a new matrix by {step:.0%} of its own size in "
            "one step: lower it"
        )


def _reach(values: Values) -> Iterator[str]:
    """Find runs in which no norm can move; only where norms train."""
    rate = values.get("adamw_lr")
    if "adamw_lr" not in values and "attention_heads" in values:
        rate = values.get("lr")
    if not rate or "steps" not in values:
        return
    reach = MEAN_FACTOR * rate * values["steps"]
    if reach < LEAST_REACH:
        yield (
            f"in {values['steps']:,} steps the rates of AdamW sum to {reach:.2g}, so no norm "
            "ends further than that "
            "from 1: the run is too short to judge by, or its rate too small"
        )


def _batch(values: Values) -> Iterator[str]:
    """Find batches of too few tokens, of a step or of an expert."""
    if not {"rows", "accumulate", "length"} <= values.keys():
        return
    micro = values["rows"] * values["length"]
    tokens = micro * values["accumulate"]
    if tokens < LEAST_TOKENS:
        yield (
            f"a step sees {tokens} tokens: with so few the gradient is mostly noise; raise "
            "rows, length or accumulate"
        )

    if {"experts", "top_k"} <= values.keys():
        each = micro * values["top_k"] / values["experts"]
        if each < LEAST_EACH:
            yield (
                f"of {micro} tokens of a micro-batch an expert gets {each:.0f} on average, so "
                "some get none by chance: "
                "raise rows or length (accumulate does not help the balance loss)"
            )


def _mixture(values: Values) -> Iterator[str]:
    """Find mixtures that cannot be built, route nothing, or are not balanced."""
    if {"hidden", "attention_heads"} <= values.keys():
        hidden = values["hidden"]
        heads = values["attention_heads"]
        if hidden % heads:
            yield f"hidden = {hidden} does not divide by attention_heads = {heads}: change one"

    if not {"experts", "top_k", "balance_weight"} <= values.keys():
        return
    experts = values["experts"]
    top_k = values["top_k"]
    weight = values["balance_weight"]
    if top_k > experts:
        yield (
            f"top_k = {top_k} of experts = {experts}: a token cannot have more experts than "
            "there are"
        )
    if top_k == experts:
        yield (
            f"top_k = experts = {top_k}: every token takes all experts, so nothing is routed "
            "and nothing is saved"
        )
    if top_k < experts and weight == 0:
        yield (
            "balance_weight = 0: nothing keeps the load of the experts even; look at the "
            "smallest load while training"
        )
    if weight > 1:
        yield (
            f"balance_weight = {weight:g}: an even load costs {weight:g} then, beside a "
            "language loss of a few nats"
        )


def _steps(values: Values) -> Iterator[str]:
    """Find what does not fit into the steps."""
    steps = values.get("steps", 0)
    if "warmup" in values and values["warmup"] >= steps:
        yield (
            f"warmup = {values['warmup']} of steps = {steps}: the warm-up does not end; take "
            "a tenth of the steps"
        )
    if values.get("eval_every", 0) > steps:
        yield (
            f"eval_every = {values['eval_every']} of steps = {steps}: nothing is evaluated "
            "before the end"
        )
    if values.get("update") == "adamw" and (values.get("rival") or values.get("race_steps")):
        yield (
            "update = adamw with rival or race_steps: AdamW cannot race itself; set "
            "race_steps: 0 and rival: false"
        )

    # How often the run reads a corpus whose size is given.
    size = re.search(r"[?&]tokens=([0-9.]+)([KMGB]?)", str(values.get("corpus", "")))
    if size is None or not {"rows", "accumulate", "length"} <= values.keys():
        return
    corpus = float(size[1]) * UNITS[size[2]]
    tokens = steps * values["rows"] * values["accumulate"] * values["length"]
    if corpus and tokens / corpus > EPOCHS:
        yield (
            f"the run reads its corpus {tokens / corpus:.1f} times: fetch more tokens, or "
            "take fewer steps"
        )


def _teacher(values: Values) -> Iterator[str]:
    """Find what a cache of the teacher's answers cannot give (methods/distill/divergences.py)."""
    if not values.get("k") or values.get("source", "cache") != "cache" or "tail" not in values:
        return
    tail = values["tail"]
    divergence = values.get("divergence", "forward")
    learns = values.get("learns", "fixed")
    if tail in ("drawn", "none") and divergence in ("reverse", "js"):
        yield (
            f"tail = {tail} leaves tokens out, which divergence = {divergence} cannot "
            "measure: take spread, or k: 0"
        )
    if learns == "fixed":
        return
    if divergence == "soft_ce":
        yield (
            f"learns = {learns} with divergence = soft_ce: the teacher's entropy would drive "
            "it; take forward"
        )
    elif tail != "drawn":
        yield (
            f"learns = {learns} with tail = {tail}: its shape misleads a learned "
            "temperature; take drawn, or k: 0"
        )


def _precision(values: Values) -> Iterator[str]:
    """Find precisions that cost time on their device."""
    device = values.get("device")
    precision = values.get("precision")
    if device == "cuda" and precision == "fp32":
        yield (
            "precision = fp32 on device = cuda turns TF32 off as well: no product uses the "
            "fast units; take auto"
        )
    if device != "cpu":
        return
    if precision == "fp16":
        yield (
            "precision = fp16 on device = cpu: a CPU gains nothing by it and needs a loss "
            "scaler; take auto"
        )
    if precision == "bf16" and runtime.native_precision("cpu")[0] != "bf16":
        yield (
            "precision = bf16 on device = cpu: this CPU emulates it, several times slower "
            "than fp32; take auto"
        )
    if values.get("four_bit"):
        yield (
            "four_bit on device = cpu: it saves memory and costs time, and is for cards; "
            "leave it out"
        )


RULES: tuple[Callable[[Values], Iterator[str]], ...] = (
    _rates,
    _reach,
    _batch,
    _mixture,
    _steps,
    _teacher,
    _precision,
)
