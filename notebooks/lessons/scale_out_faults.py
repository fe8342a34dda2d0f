"""Six faults of training in several processes, each with the lines that are wrong and those that
are right.

They run inside of a `scale_out.World` of two ranks, so they are no pitfalls of the catalogue, whose
runs are made in one process. `FAULTS` holds them by name. `trial = Measured(world)`, then
`trial("norm")` makes both runs and is what a page shows: the lines side by side, the verdict, and
what every rank measured. Whoever waits for a rank that has left does so in a group of its own with
a limit of `LIMIT` seconds, so the world can be used again.

Footgun: most of these faults raise nothing. The numbers differ from one process's, and only a
comparison shows it.
"""

import copy
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from lessons.pitfalls import VERSIONS, Pitfall
from lessons.scale_out import World, sentence
from lessons.trials import SideBySide
from nblib import losses, models, parallel
from nblib.losses import Batch

LIMIT = 2  # seconds that a rank waits for the others where one of them leaves
LONG = 120  # and where none does, however busy the machine
VOCABULARY, LENGTH, ROWS = 64, 32, 4
SEEN = f"Seen on {VERSIONS.split(',')[0]}, over gloo."


def device() -> torch.device:
    """Return this rank's card, or the CPU."""
    return (
        torch.device("cuda", dist.get_rank())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def model() -> nn.Module:
    return models.tiny(VOCABULARY, hidden=32, layers=2, heads=2).to(device())


def batch(seed: int = 0) -> Batch:
    """Rows of all ranks.

    The first half supervises a few tokens of a row only, so the ranks have unequal counts.
    """
    ids = torch.randint(
        VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed)
    ).to(device())
    labels = ids.clone()
    labels[: ROWS // 2, : LENGTH - 4] = losses.IGNORED
    return {"input_ids": ids, "labels": labels}


def mine(whole: Batch) -> Batch:
    return parallel.Plan("ddp", device(), dist.get_world_size(), dist.get_rank()).mine(whole)


def summed(running: nn.Module, part: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss summed over the supervised tokens, and their count."""
    (loss,) = running(part).values()
    return loss, torch.as_tensor(losses.supervised(part["labels"]), device=loss.device)


def gradient(of: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in of.parameters()])


def of_one_process(whole: Batch) -> tuple[float, Tensor]:
    """Loss and gradient of all rows, as one process computes them."""
    step = parallel.Step(model(), losses.causal_lm)
    loss, count = summed(step, whole)
    (loss / count).backward()
    return float(loss.detach() / count), gradient(step)


def mean_over_ranks(value: Tensor) -> float:
    return float(parallel.averaged(value))


def error(ours: Tensor, true: Tensor) -> float:
    return float((ours - true).norm() / true.norm())


def together(right: bool) -> dist.ProcessGroup:
    """Return a group of all ranks, which enter it at one moment."""
    group = dist.new_group(timeout=timedelta(seconds=LONG if right else LIMIT))
    dist.barrier()  # in the group of all, which waits half an hour
    return group


def hello() -> str:
    total = torch.tensor(float(dist.get_rank() + 1), device=device())
    dist.all_reduce(total)  # in place, and the same on all ranks
    return (
        f"rank {dist.get_rank()} of {dist.get_world_size()} over {dist.get_backend()}: the "
        f"sum is {total:g}"
    )


# ------------------------------------------------------------------ mean of means
def mean_of_means(loss: Tensor, count: Tensor) -> Tensor:
    return loss / count  # this rank's tokens; DDP then takes the mean over the ranks


def mean_of_all(loss: Tensor, count: Tensor) -> Tensor:
    total = count.clone()
    dist.all_reduce(total)  # the tokens of all ranks
    return loss * dist.get_world_size() / total  # DDP divides by the ranks, so undo it


def divided(right: bool) -> dict:
    whole = batch()
    running = DDP(parallel.Step(model(), losses.causal_lm))
    loss, count = summed(running, mine(whole))
    value = (mean_of_all if right else mean_of_means)(loss, count)
    value.backward()
    true, reference = of_one_process(whole)
    return {
        "supervised tokens": int(count),
        "loss": mean_over_ranks(value),
        "loss in one process": true,
        "gradient error": error(gradient(running), reference),
    }


# ------------------------------------------------------------------ a sum for every micro-batch
def send_always(running: DDP, micro: list[Batch]) -> None:
    for part in micro:
        loss, count = summed(running, part)
        (loss / count).backward()  # sends all gradients


def send_once(running: DDP, micro: list[Batch]) -> None:
    for part in micro[:-1]:
        with running.no_sync():  # forward and backward inside
            loss, count = summed(running, part)
            (loss / count).backward()
    loss, count = summed(running, micro[-1])
    (loss / count).backward()  # sends the sum of all


def sent(right: bool, micro_batches: int = 4) -> dict:
    counted: list[int] = []

    def count(_, bucket):
        counted.append(bucket.buffer().numel() * bucket.buffer().element_size())
        buffer = bucket.buffer().div_(dist.get_world_size())
        return (
            dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])
        )

    running = DDP(parallel.Step(model(), losses.causal_lm))
    running.register_comm_hook(None, count)
    micro = [mine(batch(seed)) for seed in range(micro_batches)]
    (send_once if right else send_always)(running, micro)
    return {
        "micro-batches": micro_batches,
        "all-reduces": len(counted),
        "bytes given to all-reduce": sum(counted),
        "gradient norm": float(gradient(running).norm()),
    }


# ------------------------------------------------------------------ experts without tokens
class Mixture(nn.Module):
    """Even tokens go to one expert, odd tokens to the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:  # (tokens,)
        x = self.embedding(ids)  # (tokens, 16)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen := ids % 2 == number).any():  # an expert without tokens does nothing
                out = out.index_put((chosen.nonzero()[:, 0],), expert(x[chosen]))
        return self.head(out)


def as_it_is(mixture: nn.Module, group) -> DDP:
    return DDP(mixture, process_group=group)


def told_of_unused(mixture: nn.Module, group) -> DDP:
    return DDP(mixture, process_group=group, find_unused_parameters=True)


def unused(right: bool, steps: int = 3) -> dict:
    """Rank 1 has even tokens only, so its second expert has none."""
    mixture = Mixture().to(device())
    alone = copy.deepcopy(mixture)
    shares = [torch.arange(0, 12, device=device()) * (1 + rank) for rank in range(2)]
    own, done, said = shares[dist.get_rank()], 0, "nothing"
    group = together(right)
    running = (told_of_unused if right else as_it_is)(mixture, group)
    began = time.monotonic()
    try:
        for _ in range(steps):
            running.zero_grad(set_to_none=True)
            F.cross_entropy(running(own), own).backward()
            done += 1
    except RuntimeError as trouble:
        said = sentence(trouble)
    waited, facts = time.monotonic() - began, {"steps": done, "says": said}
    dist.barrier()  # in the group of all, which is sound
    if done == steps:
        sum(F.cross_entropy(alone(share), share) for share in shares).div(2).backward()
        facts |= {"gradient error": error(gradient(mixture), gradient(alone))}
    return facts | {"waited for seconds": round(waited) if done < steps else 0}


# ------------------------------------------------------------------ who ends alone
def leave_alone(ended: bool, group) -> bool:
    return ended  # what this rank knows


def leave_together(ended: bool, group) -> bool:
    wish = torch.tensor(float(ended), device=device())
    dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=group)  # one wish is enough
    return bool(wish)


def ending(right: bool, steps: int = 6, rank_1_ends_after: int = 3) -> dict:
    group = together(right)
    leave, done, said, began = (
        leave_together if right else leave_alone,
        0,
        "nothing",
        time.monotonic(),
    )
    try:
        for step in range(steps):
            if leave(dist.get_rank() == 1 and step == rank_1_ends_after, group):
                break
            dist.all_reduce(torch.ones(1000, device=device()), group=group)  # the step's gradients
            done += 1
    except RuntimeError as trouble:
        said = sentence(trouble)
    waited = time.monotonic() - began
    dist.barrier()
    return {
        "steps": done,
        "says": said,
        "waited for seconds": round(waited) if said != "nothing" else 0,
    }


def dying(rank: int = 1) -> str:
    """Return this rank is killed, and the others are in the middle of a sum."""
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000, device=device()))
    return "nothing"


# ------------------------------------------------------------------ the norm of a shard
def norm_of_my_shards(params: list[nn.Parameter]) -> Tensor:
    return torch.stack([p.grad.to_local().norm() for p in params]).norm()


def norm_of_all_shards(params: list[nn.Parameter]) -> Tensor:
    whole = nn.utils.get_total_norm([p.grad for p in params])  # knows of shards
    return whole.full_tensor()  # adds up over the ranks


def clipped(right: bool) -> dict:
    from torch.distributed.fsdp import fully_shard

    whole = batch()
    _, reference = of_one_process(whole)
    step = parallel.Step(model(), losses.causal_lm)
    for module in (*step.model.model.layers, step):
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    loss, count = summed(step, mine(whole))
    (loss / parallel.added(count.clone())).backward()
    params, limit = list(step.parameters()), float(reference.norm()) / 4
    norm = (norm_of_all_shards if right else norm_of_my_shards)(params)
    for p in params:
        p.grad.mul_(min(1.0, limit / float(norm)))
    after = torch.cat([p.grad.full_tensor().flatten() for p in params])
    return {
        "norm that the rank used": float(norm),
        "true norm": float(reference.norm()),
        "norm after the clip / limit": float(after.norm()) / limit,
        "cosine with the true gradient": float(F.cosine_similarity(after, reference, dim=0)),
    }


# ------------------------------------------------------------------ equal seeds
def all_alike(rows: int, each: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)  # on every rank
    chosen = torch.randint(rows, (each,))
    return chosen, F.dropout(torch.ones(256), 0.5)


def own_part_own_noise(rows: int, each: int) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)  # one order of rows for all ranks
    chosen = torch.randperm(rows)[rank * each : (rank + 1) * each]
    torch.manual_seed(1 + rank)  # and noise that is each rank's own
    return chosen, F.dropout(torch.ones(256), 0.5)


def drawn(right: bool, rows: int = 1000, each: int = 8) -> dict:
    chosen, noise = (own_part_own_noise if right else all_alike)(rows, each)
    everybody = parallel.every([chosen.tolist(), noise.tolist()])
    picked = [row for rows_of_one, _ in everybody for row in rows_of_one]
    return {
        "rows of the step": len(picked),
        "different rows": len(set(picked)),
        "ranks with the same dropout": sum(mask == everybody[0][1] for _, mask in everybody),
    }


# ------------------------------------------------------------------ what a page shows
def _fault(
    title: str, symptom: str, verdict: str, fix: str, seen: Callable, wrong, right
) -> Pitfall:
    nobody: Callable = dict
    return Pitfall(
        "", title, symptom, "", f"{verdict} {SEEN}", fix, nobody, nobody, seen, wrong, right
    )


FAULTS: dict[str, tuple[Callable[..., dict], Pitfall]] = {
    "mean of means": (
        divided,
        _fault(
            "Mean of means over the ranks",
            "the same rows give another loss in two processes than in one",
            "Each rank divides by its own tokens, and DDP takes the mean over the ranks. A "
            "token of a rank with few "
            "tokens counts more than one of a rank with many. Nothing is raised.",
            "Add up the token counts first, divide the summed loss by them, and undo DDP's "
            "division by the ranks",
            lambda facts: facts["gradient error"] > 1e-3,
            mean_of_means,
            mean_of_all,
        ),
    ),
    "sends": (
        sent,
        _fault(
            "A sum over the ranks for every micro-batch",
            "accumulation saves no traffic: a step of four micro-batches sends four times the "
            "gradients",
            "DDP adds up all gradients in every backward unless it is told that more is to "
            "come. The gradient is the "
            "same, so only the bytes show it.",
            "Put forward and backward of all micro-batches but the last inside `no_sync()`",
            lambda facts: facts["all-reduces"] > 1,
            send_always,
            send_once,
        ),
    ),
    "unused": (
        unused,
        _fault(
            "An expert without tokens on one rank",
            "rank 0 hangs in the middle of a backward, and rank 1 raises in its next forward",
            "DDP waits for the gradient of every parameter. On rank 1 the second expert has no "
            "tokens and so no "
            "gradient, and its bucket is never sent. Rank 0 waits for it, by default for half "
            "an hour.",
            "`find_unused_parameters=True`, which looks at the graph in every step; or a loss "
            "in which every parameter "
            "takes part",
            lambda facts: facts["says"] != "nothing",
            as_it_is,
            told_of_unused,
        ),
    ),
    "leaves": (
        ending,
        _fault(
            "A rank that ends alone",
            "one rank ends its loop, and the others stand still without a word",
            "The rank that has no more rows is not there for the next sum. The others wait for "
            "it until the limit of "
            "the group, half an hour by default.",
            "Agree before every step: one `all_reduce` of a wish, with MAX",
            lambda facts: facts["says"] != "nothing",
            leave_alone,
            leave_together,
        ),
    ),
    "norm": (
        clipped,
        _fault(
            "The norm of a shard taken for that of the gradient",
            "clipping lets through gradients that are longer than the limit",
            "Each rank sees the norm of its own shards, which is smaller than the norm of all. "
            "The ranks use "
            "different factors, so the gradient is too long and has another direction. Nothing "
            "is raised.",
            "`nn.utils.clip_grad_norm_` or `get_total_norm` on the sharded parameters; "
            "`full_tensor()` of the result",
            lambda facts: facts["norm after the clip / limit"] > 1.001,
            norm_of_my_shards,
            norm_of_all_shards,
        ),
    ),
    "seeds": (
        drawn,
        _fault(
            "Equal seeds on all ranks",
            "two processes learn no more per step than one",
            "With one seed on every rank all draw the same rows and the same noise. The batch "
            "holds every row as often "
            "as there are ranks, and costs as if they were different. Nothing is raised.",
            "One order of rows for all, of which each rank takes its part; noise from a seed "
            "of the rank's own",
            lambda facts: facts["different rows"] < facts["rows of the step"],
            all_alike,
            own_part_own_noise,
        ),
    ),
}


class Measured:
    """The runs of a fault on all ranks, for figures and summaries: `facts[name]` is [wrong, right],
    each by rank.
    """

    def __init__(self, world: World) -> None:
        self.world, self.facts = world, {}

    def __call__(self, name: str) -> SideBySide:
        """Both runs of a fault; a column per run, a line per fact and rank where the ranks
        differ.
        """
        if name not in FAULTS:
            raise ValueError(f"fault = {name!r}: allowed are {', '.join(FAULTS)}")
        measure, fault = FAULTS[name]
        runs = self.facts[name] = [self.world(measure, right=right) for right in (False, True)]
        shows = {
            run: any(map(fault.seen, by_rank)) for run, by_rank in zip(("broken", "fixed"), runs)
        }
        page = SideBySide(fault, dict(zip(shows, by_line(runs))), shows)
        page.title = page.title.strip()
        return page

    def differ(self, name: str) -> tuple[bool, bool]:
        """Whether the symptom showed with the wrong lines, and with the right ones."""
        return tuple(any(map(FAULTS[name][1].seen, by_rank)) for by_rank in self.facts[name])


def by_line(runs: list[list[dict]]) -> list[dict]:
    """Return the facts of each run: one line for a fact that all ranks agree on in all runs, one
    per rank for any other.
    """
    names = dict.fromkeys(name for by_rank in runs for facts in by_rank for name in facts)
    lines: list[dict] = [{} for _ in runs]
    for name in names:
        table = [[facts.get(name) for facts in by_rank] for by_rank in runs]
        alike = all(value == by_rank[0] for by_rank in table for value in by_rank)
        for line, by_rank in zip(lines, table):
            every = (
                {name: by_rank[0]}
                if alike
                else {f"{name}, rank {n}": v for n, v in enumerate(by_rank)}
            )
            line |= {name: value for name, value in every.items() if value is not None}
    return lines
