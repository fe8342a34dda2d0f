"""What was seen of a training run: a list of events in the order they happened, and a few questions
about it.

A *round* is what a person calls a training step: from the first backward after an optimizer step to
the last optimizer step before the next backward. It may hold several forwards, backwards
(accumulation) and steps (several optimizers). Events carry the number of their round and small
facts; no tensor in them outlives the round.

Footgun: a check may only conclude from what was seen. A compiled or sharded step hides its inside;
then the fact is None, the check says UNKNOWN, and nothing may read that as OK.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from loopdoctor.places import Place, here

ROOM = 256  # events of one kind that a round keeps


def nothing() -> None:
    """Stands in for a weak reference to an object that is not there any more."""


@dataclass
class Event:
    round: int
    place = None  # file and line of the program under way, see places.py
    sorts = ()  # attributes by which events of a class are of several kinds


@dataclass
class Call(Event):
    """One call of a whole model.

    Tensors are live until the next backward begins, arguments until the first step.
    """

    role: str  # "model", "teacher" or "other"
    grad: bool  # gradients were enabled
    inference: bool  # under torch.inference_mode
    training: bool  # the flag of the module called
    autocast: torch.dtype | None
    args: tuple = ()  # as passed; only of the first calls, dropped after the probes
    kwargs: dict = field(default_factory=dict)
    ids: Tensor | None = None  # (B, T) on the CPU
    mask: Tensor | None = None  # (B, T) on the CPU, when a two-dimensional one was given
    positions: Tensor | None = None  # (B, T) on the CPU
    # what its tables were asked for, of the first calls, until the probes are over
    looked: tuple[Tensor, ...] = ()
    labels: Tensor | None = None  # (B, T) on the CPU, when given to the model
    decoder: Tensor | None = None  # (B, T) on the CPU, decoder_input_ids of an encoder-decoder
    logits: Tensor | None = None  # (B, T, V), live until the next backward begins, then None
    # (B, T, D) after the last norm, where no logits were seen; live as long as these
    hidden: Tensor | None = None
    head: Tensor | None = None  # (V, D), what would make logits of it
    vocabulary: int | None = None  # V
    loss: Tensor | None = None  # what the model itself calls its loss; live as long as logits
    requires_grad: bool = False  # some output does
    cached: bool = False  # returned a key-value cache
    cache: Any = nothing  # weak reference to it
    kept: int = 0  # positions in it when the call was over
    recached: int = 0  # and after the backward, where they have become more
    adapters_off: bool = False  # every layer with an adapter (peft's) was switched off
    finite: bool | None = None  # of the logits
    raised: str = ""
    module: Any = nothing  # weak reference to what was called
    sorts = ("role", "grad")
    mark: Tensor | None = None  # a few numbers of what it was given, where that is no ids
    # it was given what hangs on leaves that are no weights, and that get a gradient
    learns: bool = False


@dataclass
class Fed:
    """What a loss was given, see fed.py: numbers about some rows of it, and where they come
    from.
    """

    makers: list[str]  # functions that made the input, the last one first, views left out
    logged: bool  # a logarithm is in the arithmetic before it
    shape: tuple[int, ...] = ()
    target_shape: tuple[int, ...] | None = None
    classes: int | None = None
    rows: int = 0  # looked at
    tolerance: float = 1e-4  # of sums, in its dtype
    low: float | None = None
    high: float | None = None
    sums: float | None = None  # largest distance of a row's sum from 1
    over_classes: float | None = None  # largest distance of a row's logsumexp from 0
    over_rows: float | None = None  # the same down the columns; NaN where it was not looked at
    target_low: float | None = None  # of targets that are no indices
    target_high: float | None = None
    target_sums: list[float] | None = None  # least and largest sum of a row
    target_hard: bool = False  # only zeros and ones
    only: int | None = None  # the class of all rows, where it is one
    again: bool = False  # what each row has there stands in another column too
    softmax_over: int | None = None  # dimension of the log_softmax of a matrix
    cut: float | None = None  # share of its numbers at their ends, where it comes from a clamp
    right: float | None = None  # share of rows whose largest answer is that of their class
    # a square matrix whose diagonal is one number, the largest of its row, and no target
    own: bool = False
    exchanged: bool = False  # the target learns, and what is given does not
    doubled: float = 0.0  # share of a batch's other rows that are the same partner as a row's own
    mixed: tuple[int, ...] | None = None  # (N, C, ...) that was reshaped to (rows, C)


@dataclass
class Entropy(Event):
    """One call of a loss function of torch.nn.functional.

    Tensors are live until the next backward begins.
    """

    name: str  # one of fed.LOSSES
    input: Tensor | None
    target: Tensor | None
    value: Tensor | None
    reduction: str
    ignored: int | None
    grad: bool  # gradients were enabled
    connected: bool  # its value requires a gradient
    width: int | None = None  # size of the input's last dimension
    number: float | None = None  # its value, of a divergence or of a loss that is used
    shape: tuple[int, ...] = ()  # of the input
    dtypes: tuple[torch.dtype, ...] = ()  # of input and target, where these are no indices
    fed: Fed | None = None  # in the first rounds
    used: bool = False  # the differentiated loss hangs on it
    raised: str = ""
    log_target: bool = False  # of kl_div
    log_input: bool = True  # of poisson_nll_loss
    smoothing: float = 0.0  # of cross_entropy
    weight: Tensor | None = None  # of its classes
    # of kl_div: the plain numbers that it is multiplied by on its way into the loss
    factors: tuple[float, ...] = ()
    sorts = ("grad", "name")


@dataclass
class Backward(Event):
    """One call of loss.backward(), the outermost one."""

    value: float | None  # as passed, divided by the scaler's scale; None when not a scalar
    requires_grad: bool
    leaf: bool  # requires a gradient but has no history
    scale: float | None  # of the enabled scaler that scaled it
    calls: list[Call] = field(default_factory=list)  # of models, since the last backward
    entropies: list[Entropy] = field(default_factory=list)  # since the last backward
    reading: Any = None  # fingerprint.Reading or None
    norm: float | None = None  # of the sampled gradients after it
    # report.terms: value, requires_grad
    declared: dict[str, tuple[float, bool]] = field(default_factory=dict)
    # a constant other than 0 that was added to the loss outside the graph
    dead_term: float | None = None
    retained: bool = False  # with retain_graph
    source: str = ""  # what in its graph made it NaN or infinite
    # a difference by hand that was broadcast: shapes before and after
    square: tuple[tuple, tuple] | None = None
    # recorded losses without a gradient: their values
    dead_values: dict[str, float] = field(default_factory=dict)
    raised: str = ""
    # a model was given a leaf that learns and is no weight (an attack, a derivative)
    inputs: bool = False
    copies: bool = False  # it hangs on tensors with the shapes of the weights, and on no weight


@dataclass
class ZeroGrad(Event):
    had: bool  # some gradient was there
    ids: frozenset[int] = frozenset()  # of the parameters cleared
    module: bool = False  # by a module, not by an optimizer
    held: frozenset[int] = frozenset()  # those of them that had a gradient


@dataclass
class Clip(Event):
    limit: float
    total: float | None  # the norm that it saw
    nothing: bool  # every gradient was None
    scaled: bool  # under an enabled scaler, before unscale_
    ids: frozenset[int] = frozenset()  # of the parameters clipped


@dataclass
class Unscale(Event):
    pass


@dataclass
class ScalerStep(Event):
    enabled: bool
    stepped: bool
    scale: float


@dataclass
class Schedule(Event):
    optimizer: int  # index in Evidence.optimizers, -1 when unknown
    epochal: bool  # ReduceLROnPlateau and the like, meant to be called once per epoch
    scheduler: int = 0  # id of it
    kind: str = ""  # its class
    hundredth: int | None = None  # of its steps, after which the rate is a hundredth
    past: bool = False  # a cosine has made more steps than its T_max
    mode: str = ""  # of ReduceLROnPlateau
    metric: float | None = None  # what it was given
    evaluated: int = 0  # rows that the model was given to be evaluated, since it last trained
    # steps of a warm-up and of the whole run, as the schedule was told
    warm_up: tuple[int, int] | None = None
    peak: float | None = None  # the largest factor that a LambdaLR will give


@dataclass
class Update:
    """What one step did to one sampled tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    lr: float
    rms: float  # of the change
    relative: float  # norm of the change over norm of the tensor
    changed: float  # share of elements that changed
    gradient: float | None  # norm
    silent: float | None = None  # share of the gradient's elements that are exactly zero


@dataclass
class Step(Event):
    optimizer: int
    rates: list[float]  # of each group
    backwards: int  # since this optimizer's previous step
    norm: float | None  # of the sampled gradients before it
    own: float | None = None  # the same of all of this optimizer's gradients; None when it has none
    # they hold what the backward of another optimizer's loss has left on these tensors
    foreign: bool = False
    # the gradients of its previous step were still there when a backward added to them
    stale: bool = False
    summed: bool = False  # those of all evaluations of its closure were added up
    updates: list[Update] = field(default_factory=list)


@dataclass
class Gradients(Event):
    """Norm of every trainable parameter's gradient before the round's first step; None where there
    is none.
    """

    norms: dict[str, float | None]
    root: str = ""  # what in the graph of the loss made them NaN


E = TypeVar("E", bound=Event)


class Tree:
    """The modules and parameters of some models. To ask whether they are still the same is far
    cheaper than to walk through them again, which named_parameters would do several times in each
    step.
    """

    def __init__(self, models: list[nn.Module]):
        self.models = list(models)
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for number, model in enumerate(models):
            for name, p in model.named_parameters():
                found.setdefault(id(p), (f"model{number}.{name}" if number else name, p))
        self.parameters = dict(found.values())
        every = {id(m): m for model in models for m in model.modules()}.values()
        # these cannot be changed
        every = [m for m in every if not isinstance(m, torch.jit.ScriptModule)]
        self.held = [
            (m, [*map(id, m._modules.values())], [*map(id, m._parameters.values())]) for m in every
        ]

    def still(self, models: list[nn.Module]) -> bool:
        if len(models) != len(self.models) or any(a is not b for a, b in zip(models, self.models)):
            return False
        for m, inside, own in self.held:
            modules, ps = m._modules, m._parameters
            if len(modules) != len(inside) or len(ps) != len(own):
                return False
            if (
                inside
                and [*map(id, modules.values())] != inside
                or own
                and [*map(id, ps.values())] != own
            ):
                return False
        return True


@dataclass
class Optimizer:
    kind: type
    ids: set[int]  # of all its parameters
    low: bool  # holds tensors below 32 bits
    object: torch.optim.Optimizer | None  # dropped when the watch ends
    began: tuple[float, ...] = ()  # rates of its groups when it was first seen, before any schedule
    live: set[int] = field(default_factory=set)  # of those that had a gradient at some step


class Evidence:
    """Everything seen, the objects it was seen on, and what the user declared."""

    def __init__(self, **declared):
        self.started = time.time()
        self.declared = declared  # steps, tokenizer, untied, from_scratch, orig_vocab
        self.events: list[Event] = []
        self._kinds: dict[type[Event], list[Event]] = {}  # the same by class
        self._tree = Tree([])  # of the models, as they were when last looked at
        self.crowded: set[type[Event]] = set()  # kinds of which some were not kept
        self._room: Counter = Counter()  # events of the round under way, by kind
        self.models: list[nn.Module] = []  # trained roots, wrappers taken off
        self.wrappers: list[nn.Module] = []  # DDP and compiled wrappers found around them
        self.teachers: list[nn.Module] = []
        self.named_teachers: list[nn.Module] = []  # those of them that the user named
        # id of one that is a layer -> rounds with gradients, its versions
        self.lone: dict[int, dict[int, tuple]] = {}
        self.optimizers: list[Optimizer] = []
        self.called: dict[int, int] = {}  # id(module) -> times seen; parts are seen once or more
        self.called_with_grad: dict[int, int] = {}
        # id -> name, training when last called, p
        self.dropouts: dict[int, tuple[str, bool, float]] = {}
        # reentrant checkpoints, gradients on, none of whose inputs requires one
        self.cut_regions = 0
        self.regions = 0  # reentrant checkpoints entered with gradients on
        self.warned: list[str] = []  # texts of Python warnings, some from before the watch
        # load_state_dict: module, missing, unexpected
        self.loaded: list[tuple[str, list[str], list[str]]] = []
        self.loads: list[Any] = []  # the same since the import, see loads.py
        self.loads_before = 0  # how many there were before the first step
        # number of a load -> what it left out and other means brought since
        self.brought: dict[int, set[str]] = {}
        self.probes: dict[str, Any] = {}  # results of replays, see probes.py
        # sampled tensors at the start: name -> (id, strided clone)
        self.first: dict[str, tuple[int, Tensor]] = {}
        self.shadow: dict[str, float] = {}  # see shadow.py
        self.coarse = 0.0  # share of low-precision numbers that a settled step of Adam can't change
        self.crooked = False  # a loss that was not finite has been looked into
        # layers that were given numbers without a gradient, in the order of their calls
        self.raw: list[str] = []
        # modules without batch_first: shapes they were given
        self.sequences: dict[str, set[tuple[int, ...]]] = {}
        self.latents: list[Any] = []  # samples without a gradient, see latents.py
        # whether what a score was multiplied by has a gradient -> rounds
        self.factors: dict[bool, set[int]] = {}
        self.awake: list[Any] | None = None  # weak references to parts in train mode, see after.py
        # rounds in which each function of torch was seen (eye.py), and what was seen:
        self.shown: set[int] = set()
        # id of a check -> round -> what was seen
        self.habits: dict[str, dict[int, Any]] = defaultdict(dict)
        # the same, and where the program was then
        self.places: dict[str, dict[int, Place]] = defaultdict(dict)
        # place -> rounds, of weights or gradients
        self.dropped: dict[tuple, list[tuple[int, frozenset[str]]]] = {}
        # rounds in which a derivative without a graph was part of the loss
        self.slopes: set[int] = set()
        # round -> which targets went in at their own place, see echoes.py
        self.echoed: dict[int, str] = {}
        self.lookups: list[Tensor] = []  # ids given to embeddings since the last backward
        self.cosines_of: dict[int, Any] = {}  # id of a CosineAnnealingLR -> weak reference to it
        # round -> whether a mask hides the text and shows the padding
        self.hiding: dict[int, bool] = {}
        # rounds in which a derivative with respect to an input was zero everywhere
        self.flat: set[int] = set()
        # round -> what cosines were multiplied by before a cross-entropy
        self.cosines: dict[int, float] = {}
        # round -> layer that was given the nearest rows of a table as they are
        self.chosen: dict[int, str] = {}
        # round -> data set that was written into while it was read
        self.stored: dict[int, str] = {}
        # round -> shape of a divergence that is summed over its rows
        self.summed: dict[int, tuple[int, ...]] = {}
        # round -> numbers of a row that a reconstruction is a mean over
        self.over_numbers: dict[int, int] = {}
        # code that calls a dropout without saying whether it trains -> where
        self.unaware: dict[Any, str] = {}
        self.endings: dict[
            int, tuple[int, int]
        ] = {}  # round -> rows of a recurrent network that end in padding, of all
        # round -> shape that was normalised, numbers per feature
        self.few: dict[int, tuple[tuple[int, ...], int]] = {}
        # round -> formula, least and largest answer in it
        self.overlaps: dict[int, tuple[str, float, float]] = {}
        # rounds whose loss pulls two views together from both sides
        self.both_sides: set[int] = set()
        # line of a backward -> cuts before it
        self.cut_off: dict[Place, list[tuple[Place, frozenset[int]]]] = {}
        self.evaluated = 0  # rows that the model was given to be evaluated, since it last trained
        # round -> what a column and a row of the batch went into (outer_products.py)
        self.outer: dict[int, Any] = {}
        # function without a slope -> ids of what is below it
        self.starving: dict[str, set[int]] = {}
        # round -> pictures that were moved, targets that were, rows
        self.moved: dict[int, list[int]] = {}
        # rounds with a loss that is the value of a draw without a gradient
        self.valued: set[int] = set()
        # round -> length of a target of the next values without any end
        self.endless: dict[int, int] = {}
        # round -> class that is ignored, its rows, all rows
        self.left_out: dict[int, tuple[int, int, int]] = {}
        # id of a loss with weights -> it, their versions
        self.criteria: dict[int, tuple[Any, dict[str, int]]] = {}
        # (round, call) -> what lives as long as the answer's graph
        self.answered: dict[tuple[int, int], Any] = {}
        self.taken: set[int] = set()  # rounds in which state_dict() of a model was asked for
        # id(loader) -> batches (0 of a stream), rounds of iter(), id of its data set
        self.restarted: dict[int, tuple[int, set[int], int]] = {}
        # normalisation -> what is known of its average, see averages.py
        self.averages: dict[str, Any] = {}
        self.packed = False  # torch.autograd.graph.saved_tensors_hooks were entered
        self.turned: dict[int, str] = {}  # round -> dtype of flags that were turned bit by bit
        # round -> weak reference to what lives as long as its graph, see graphs.py
        self.graphs: dict[int, Any] = {}
        # sampled tensor -> steps that begin as the one before them began
        self.as_before: dict[str, set[int]] = {}
        # sampled tensor -> how often it was back where it started
        self.returned: dict[str, int] = {}
        # kind -> name -> round -> counts
        self.histograms: dict[str, dict[str, dict[int, list[int]]]] = {}
        # normalisations with statistics, by id: batches counted at the start
        self.tracked: dict[int, int] = {}
        self.frozen_at_start: set[str] = set()  # those of the sampled that were
        self.unshadowed = ""  # why some optimizer of low precision has no shadow
        self.tied_at_start: bool | None = None
        self.alike_at_start: bool | None = None  # two matrices of equal values
        self.exception: BaseException | None = None  # what left the block
        self.raised: Any = None  # what is known of it, see raising.py
        self.opaque: str = ""  # why the inside was not visible (compiled, sharded)
        self.faults: list[str] = []  # what went wrong in watching itself
        self.rounds = 0  # complete ones, and so the number of the one under way
        self.late = False  # the watch began in the middle of a run
        self.begun = False  # a model, a loss or a backward was seen
        self.accelerator = ""  # kind of device that a model was called on, where it is not the CPU
        # round -> lines that read from it before the step, see waits.py
        self.waits: dict[int, Counter[str]] = {}
        self.settled = False  # who learns and who teaches is known, because an optimizer stepped

    # ---------------------------------------------------------------- events
    def note(self, event: Event) -> bool:
        """Keep an event, unless its round has enough of its kind: an evaluation or a rollout makes
        thousands.

        Of a watch that begins in the middle of a run, what ends the step before it is left out.
        """
        self.begun = self.begun or isinstance(event, Call | Entropy | Backward)
        if self.late and not self.begun:
            return False
        if self._room.pop("round", self.rounds) != self.rounds:
            self._room.clear()
        self._room["round"] = self.rounds
        kind = type(event), *[getattr(event, name) for name in event.sorts]
        self._room[kind] += 1
        if self._room[kind] > ROOM:
            self.crowded.add(type(event))
            return False
        event.place = here()
        self.events.append(event)
        self.every(type(event)).append(event)
        return True

    def forget(self, gone: Callable[[Event], bool]) -> None:
        """Leave these events out."""
        self.events[:] = [event for event in self.events if not gone(event)]
        self._kinds = {
            kind: [event for event in each if not gone(event)] for kind, each in self._kinds.items()
        }

    def of(self, kind: type[E], **where) -> list[E]:
        """Events of a kind, in order, that have these attributes."""
        found = self.every(kind)
        return (
            [event for event in found if all(getattr(event, k) == v for k, v in where.items())]
            if where
            else [*found]
        )

    def every(self, kind: type[E]) -> list[E]:
        """All of a kind, the list itself: of hundreds, one asks for the last few."""
        return self._kinds.setdefault(kind, [])

    def by_round(self, kind: type[E]) -> dict[int, list[E]]:
        rounds: dict[int, list[E]] = {}
        for event in self.of(kind):
            rounds.setdefault(event.round, []).append(event)
        return rounds

    @property
    def forwards(self) -> list[Call]:
        """Calls of the trained model with gradients on: the training forwards."""
        return [
            call for call in self.of(Call) if call.role == "model" and call.grad and not call.raised
        ]

    @property
    def stepped(self) -> bool:
        return bool(self.of(Step))

    @property
    def complaint(self) -> str:
        """Text of the exception that ended the block, with that of a backward or call inside it."""
        texts = [str(self.exception)] if self.exception is not None else []
        return "\n".join(texts + [b.raised for b in self.of(Backward) if b.raised])

    # ---------------------------------------------------------------- the model
    @property
    def model(self) -> nn.Module | None:
        return self.models[0] if self.models else None

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the trained models by name, each once.

        Names stay when a second model is met later on.
        """
        return self.tree().parameters

    @property
    def followed(self) -> dict[str, nn.Parameter]:
        """Those of the sampled parameters that are there, as they were when somebody last asked for
        all.
        """
        ps = self._tree.parameters
        there = ((name, ps[name]) for name in self.first if name in ps)
        # and no tensor of a functional call
        return {name: p for name, p in there if isinstance(p, nn.Parameter)}

    def tree(self) -> Tree:
        """Another one whenever the models have changed."""
        if not self._tree.still(self.models):
            self._tree = Tree(self.models)
        return self._tree

    def trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters().items() if p.requires_grad}

    def owners(self) -> dict[str, nn.Module]:
        """Return the module that holds each parameter."""
        holds = {
            id(p): m
            for model in self.models
            for m in model.modules()
            for p in m.parameters(recurse=False)
        }
        return {name: holds[id(p)] for name, p in self.parameters().items()}

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        for model in self.models:
            yield from model.named_modules()

    @property
    def config(self) -> Any:
        """The transformers config of the model, its text part where it has several; None for other
        modules.
        """
        config = getattr(self.model, "config", None)
        # settings of somebody's own, whatever they raise when they are asked
        if isinstance(config, dict):
            return None
        text = asked(config, "get_text_config")
        return text() if callable(text) else config

    def optimized(self) -> set[int]:
        """Ids of all parameters in any optimizer seen."""
        return set().union(*(o.ids for o in self.optimizers)) if self.optimizers else set()

    def embedding(self) -> Tensor | None:
        """Weight of the token embedding."""
        return _weight(_ends(self.model)[0])

    def head(self) -> Tensor | None:
        """Weight of the output layer over the vocabulary."""
        return _weight(_ends(self.model)[1])

    def token(self, which: str) -> int | None:
        """Id of "eos", "bos" or "pad": of the tokenizer given, else of the config."""
        for holder in (
            self.declared.get("tokenizer"),
            getattr(self.model, "generation_config", None),
            self.config,
        ):
            found = asked(holder, f"{which}_token_id")
            if isinstance(found, (list, tuple)):
                found = found[0] if found else None
            if found is not None:
                return int(found)
        return None


def asked(holder: Any, name: str) -> Any:
    """Return an attribute, or None: settings that are read as attributes of a dict raise what they
    like.
    """
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


ADAPTERS = ("lora_", "hada_", "lokr_", "ia3_", "oft_", "vera_", "boft_")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to a low-rank adapter, by the names that peft and others give
    them.
    """
    return any(part.startswith(ADAPTERS) for part in name.split("."))


def _ends(model: nn.Module | None) -> tuple[nn.Module | None, nn.Module | None]:
    """Input embedding and output layer: by transformers' methods, else the first embedding and the
    linear layer that is as wide as its table.
    """
    if model is None:
        return None, None
    try:
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        if ends[0] is not None:
            return ends
    except (AttributeError, NotImplementedError, TypeError):
        pass
    tables = [
        m for m in model.modules() if isinstance(m, nn.Embedding) and weight_of(m) is not None
    ]
    tables.sort(key=lambda m: -m.num_embeddings)
    for table in tables:
        linear = (
            m for m in model.modules() if isinstance(m, nn.Linear) and weight_of(m) is not None
        )
        heads = [
            m for m in linear if weight_of(m).shape == weight_of(table).shape
        ]  # an output layer over the table's vocabulary
        if heads:
            return table, heads[-1]
    return (tables[0] if tables else None), None


def _weight(module: nn.Module | None) -> Tensor | None:
    """Return the weight in use: peft keeps a trained copy beside the original."""
    if module is None:
        return None
    copies = getattr(module, "modules_to_save", None)
    active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", None)
    if copies is not None and active:
        name = active[0] if isinstance(active, (list, tuple)) else active
        if name in copies:
            return _weight(copies[name])
    base = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
    inner = base if base is not None else module
    return None if parametrize.is_parametrized(inner) else getattr(inner, "weight", None)


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """Return the parameter of this name. `module.weight` would compute one that is parametrised,
    and spectral_norm writes its vectors each time it is computed.
    """
    return module._parameters.get("weight")
