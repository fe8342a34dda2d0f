"""More than one process: the loop's step is that of one process on the same rows, whoever shares them.

    ddp    every process holds all; gradients are added while backward still runs
    fsdp   weights, gradients and moments are cut over the processes, and a block's weights come together to compute
    hsdp   fsdp within groups, ddp between them: the groups are the nodes, or on one node its two halves

torch's engines follow the forward of one module, so `Step` makes the loss one. What is shared and what is added:

    rows       each process takes its part of every batch of the notebook
    gradients  sums, divided by the tokens of all processes and never averaged, as the terms are. ddp adds them once per
               step. fsdp does for every micro-batch, as whole ones would have to be kept until then; hsdp half and half
    draws      inside the loop each process has its own generators, made from rank 0's; outside all have rank 0's

Outside of the loop nobody sees shards: `whole` puts them together for an evaluation, and at the end the parameters are
those of before, in the optimizers too. So any notebook trains on any mesh.

Footgun: a mean that a loss takes over its batch is one over the rows of one process; `averaged` makes it that of all.
Who leaves alone, by an error, leaves the others waiting until the launcher ends them.
"""

import functools
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from nblib import compiling, runtime
from nblib.losses import Batch, Loss, Terms

MESHES = ("auto", "ddp", "fsdp", "hsdp")
MESH = "NBLIB_MESH"  # the launcher's choice for all trainings of a run


class Plan(NamedTuple):
    """What `auto` became."""

    kind: str  # off, ddp, fsdp, hsdp
    device: torch.device
    world: int = 1
    rank: int = 0
    groups: int = 1  # of hsdp

    def mine(self, batch: Batch) -> Batch:
        """This process's share of the rows; tensors that were one stay one."""
        if (rows := len(batch["labels"])) < self.world:
            raise ValueError(f"rows = {rows}: fewer than the {self.world} processes that share them")
        shares = {id(t): t.tensor_split(self.world)[self.rank] if len(t) == rows else t for t in batch.values()}
        return {name: shares[id(t)] for name, t in batch.items()}


def check(mesh: str, world: int) -> int:
    """How many groups a mesh has, or a sentence why it cannot be."""
    if mesh not in MESHES:
        raise ValueError(f"mesh = {mesh!r}: allowed are {', '.join(MESHES)}")
    if world == 1 and mesh != "auto":
        raise ValueError(f"mesh = {mesh!r}: this is one process; `nblib train NOTEBOOK --processes 2` starts several")
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    groups = 1 if mesh != "hsdp" else world // node if node < world else 2
    if mesh == "hsdp" and (world % groups or world // groups < 2):
        raise ValueError(f"mesh = 'hsdp': {world} processes do not divide into {groups} equal groups of two or more")
    return groups


def plan(machine: runtime.Machine, mesh: str = "auto") -> Plan:
    """How the processes of this world share a training; joins the world if that was not done."""
    mesh = os.environ.get(MESH, mesh) if mesh == "auto" else mesh
    world = dist.get_world_size() if dist.is_initialized() else runtime.world()
    groups = check(mesh, world)
    if world == 1:
        return Plan("off", machine.device)
    kind = "ddp" if mesh == "auto" else mesh
    if kind != "ddp" and machine.precision == "fp16":
        raise ValueError(f"mesh = {kind!r}: precision = 'fp16' needs its loss scaler on whole gradients; take ddp")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if machine.device.type == "cuda" else "gloo")
    return Plan(kind, machine.device, world, dist.get_rank(), groups)


class Step(nn.Module):
    """The loss as the forward of a module."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model = model
        self.__dict__["loss"] = loss  # no submodule: a teacher in it is not trained

    def forward(self, batch: Batch) -> Terms:
        return self.loss(self.model, batch)


class Spread:
    """A model that is spread over the processes inside of `with`, as the loop uses it: `spread(batch, last=...)`."""

    def __init__(self, plan: Plan, model: nn.Module, loss: Loss, optimizers: list[Optimizer]):
        self.plan, self.optimizers, self.cut = plan, optimizers, {}
        self.step = self.run = Step(model, loss)
        if plan.kind == "ddp":  # a phase of a loss may leave out a part of the model
            options = dict(find_unused_parameters=True, gradient_as_bucket_view=True)
            self.run = nn.parallel.DistributedDataParallel(self.step, **options)
            self.run.broadcast_buffers = False  # from now on: each process computes them, and alike
            self.run.register_comm_hook(None, _add)
        elif plan.kind != "off":
            self._shard(model)

    def __call__(self, batch: Batch, *, last: bool) -> Terms:
        if self.plan.kind == "ddp":
            self.run.require_backward_grad_sync = last
        elif self.plan.kind != "off":
            self.run.set_requires_all_reduce(last)  # between groups; within one, whole gradients would stay on each
        return self.run(batch)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """All weights in place inside, for code that knows nothing of shards."""
        parts = [m for m in self.step.modules() if hasattr(m, "unshard")]
        for m in parts:
            m.unshard()
        yield
        for m in parts:
            m.reshard()

    def __enter__(self) -> "Spread":
        if self.plan.rank:
            runtime.branch(self.plan.rank)
        return self

    def __exit__(self, error, *_) -> None:
        """The parameters are those they were, with the weights of now; nothing of the engine is left on the model."""
        if self.plan.world == 1 or error not in (None, GeneratorExit):
            return  # whoever raised may be alone; a cell that leaves its loop is left by all
        if self.cut:
            self._take_off()
            for old, new in {id(old): (old, new) for old, new in self.cut.values()}.values():  # a tied one once
                old.data = gathered(new.detach())
            for (module, name), (old, _) in self.cut.items():
                module._parameters[name] = old
            self._hand_over({id(new): old for old, new in self.cut.values()}, lambda value, _: gathered(value))
        self.step = self.run = self.cut = self.before = None
        gc.collect()  # hooks of DDP on the gradients go with it
        runtime.set_generators(every(runtime.generators())[0])

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kind, groups = self.plan.kind, self.plan.groups
        if packed := [n for n, p in model.named_parameters() if not p.is_floating_point()]:
            raise ValueError(f"mesh = {kind!r}: 4-bit weights cannot be cut ({packed[0]}); take ddp")
        shape = (groups, self.plan.world // groups) if kind == "hsdp" else (self.plan.world,)
        mesh = init_device_mesh(self.plan.device.type, shape, mesh_dim_names=("groups", "shards")[-len(shape) :])
        whole = {(m, name): p for m in self.step.modules() for name, p in m._parameters.items() if p is not None}
        before = {m: (type(m), set(vars(m))) for m in self.step.modules()}
        for module in [*compiling.blocks(model), self.step]:
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)  # gradients are sums: they are added
            module.set_force_sum_reduction_for_comms(True)
        self.before = {m: (kind, set(vars(m)) - names) for m, (kind, names) in before.items()}
        self.cut = {(m, name): (old, m._parameters[name]) for (m, name), old in whole.items()}
        self._hand_over({id(old): new for old, new in self.cut.values()}, like)
        for old, _ in self.cut.values():
            old.data = old.data.new_empty(0)  # each process keeps its shard alone

    def _take_off(self) -> None:
        """`fully_shard` has no way back: its classes, the attributes that it added, and its hooks."""
        for m in [m for m in self.before if hasattr(m, "unshard")]:
            m.reshard()
        for m, (kind, added) in self.before.items():
            m.__class__ = kind
            for name in added:
                del vars(m)[name]
            for hooks in [v for name, v in vars(m).items() if name.endswith("_hooks") and isinstance(v, dict)]:
                for key, hook in list(hooks.items()):
                    if str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp"):
                        del hooks[key]

    def _hand_over(self, new: dict[int, nn.Parameter], make: Callable[[Tensor, Tensor], Tensor]) -> None:
        """The optimizers hold these parameters from now on, with what they knew of the old ones."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new[id(p)] for p in group["params"]]
            for p, known in list(optimizer.state.items()):
                del optimizer.state[p]
                now = {k: make(v, new[id(p)]) if isinstance(v, Tensor) else v for k, v in known.items()}
                optimizer.state[new[id(p)]] = now


def _add(_, bucket):  # where DDP would average
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


# ------------------------------------------------------------------ what all processes know


def added(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def averaged(tensor: Tensor) -> Tensor:
    """Over the processes, whose rows are as many; without a gradient."""
    return added(tensor.detach().clone()) / dist.get_world_size() if dist.is_initialized() else tensor


def read(values: list[Tensor]) -> list[float]:
    """Every number of a step in one transfer; the loss terms are added up over the processes."""
    numbers = torch.stack([v.detach().double() for v in values])
    added(numbers[:-2])  # norm and token count are the same everywhere
    return numbers.tolist()


def highest(code: int, device: torch.device) -> int:
    """One process that ends alone leaves the others waiting, so they agree."""
    if dist.is_initialized():
        codes = torch.tensor(code, device=device)
        dist.all_reduce(codes, op=dist.ReduceOp.MAX)
        code = int(codes)
    return code


@functools.cache
def beside(world):
    """A group of the same processes for another thread, whose sums must not meet those of the steps."""
    return dist.new_group(backend="gloo")


def every(value, group=None) -> list:
    """Each process's, in the order of ranks."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value, group=group)
    return values


def together(work: Callable, group=None) -> list:
    """What `work` returned in each process. If it fails in one, all raise that."""
    value, failed = None, ""
    try:
        value = work()
    except BaseException as error:  # that of torch's checkpoints is no Exception, and ends with what happened
        failed = (str(error) or repr(error)).splitlines()[-1]
    told = every((value, failed), group)
    if wrong := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(told) if why]:
        raise OSError(wrong[0])
    return [value for value, _ in told]


def gathered(value):
    """A tensor that is cut, whole. Every process must call."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def like(value: Tensor, p: Tensor) -> Tensor:
    """A whole tensor, cut as this parameter is; an empty shard for one that is only described (on meta)."""
    if not hasattr(p, "placements") or hasattr(value, "placements") or value.shape != p.shape:
        return value
    if value.is_meta:
        return torch.empty_like(p, dtype=value.dtype)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)  # nothing travels
