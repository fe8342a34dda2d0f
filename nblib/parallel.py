"""Train in several processes, so that a step is that of one process on the same rows.

    ddp    each process holds all weights; gradients are added while backward still runs
    fsdp   weights, gradients and moments are cut over the processes; the weights of a block are
           put together while it computes
    hsdp   fsdp within groups, ddp between them: the groups are the nodes, or two halves of one node

torch's engines follow the forward of one module, so `Step` makes the loss a module.

    rows       each process takes its part of every batch of the notebook
    gradients  are sums, divided by the tokens of all processes and never averaged. ddp adds them
               once per step. fsdp adds them for every micro-batch, as whole ones would have to be
               kept until then; hsdp does so within a group and once per step between groups
    draws      inside the loop each process has its own generators, made from those of process 0;
               outside, all have those of process 0

Under fsdp and hsdp a copy of the model trains: `fully_shard` cannot be undone, so it never touches
the caller's module. The copy takes over the weights; the caller's parameters are empty meanwhile,
and buffers are the same tensors in both. `Spread.whole` fills the caller's model for an evaluation,
and at the end the trained weights are put into the parameters of before, in the optimizers too. So
whoever calls the loop sees no shards, and any notebook trains on any mesh.

Footgun: a mean that a loss takes over its batch is one over the rows of one process; `averaged`
makes it that of all. A process that ends alone, by an error, leaves the others waiting until the
launcher ends them. And a loss must run the module that it is given: the caller's own module has no
weights while fsdp trains, and other attributes that the loop changes are those of the copy.
"""

import copy
import functools
import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
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
    """Say how the processes share a training: what `auto` became."""

    kind: str  # off, ddp, fsdp, hsdp
    device: torch.device
    world: int = 1
    rank: int = 0
    groups: int = 1  # of hsdp

    def mine(self, batch: Batch) -> Batch:
        """Return this process's share of the rows; tensors that were one object stay one."""
        rows = len(batch["labels"])
        if rows < self.world:
            raise ValueError(
                f"rows = {rows}: fewer than the {self.world} processes that share them"
            )
        shares: dict[int, Tensor] = {}
        for tensor in batch.values():
            if len(tensor) == rows:
                shares[id(tensor)] = tensor.tensor_split(self.world)[self.rank]
            else:
                shares[id(tensor)] = tensor
        return {name: shares[id(tensor)] for name, tensor in batch.items()}


def check(mesh: str, world: int) -> int:
    """Return the number of groups of a mesh; ValueError where it cannot be."""
    if mesh not in MESHES:
        raise ValueError(f"mesh = {mesh!r}: allowed are {', '.join(MESHES)}")
    if world == 1 and mesh != "auto":
        raise ValueError(
            f"mesh = {mesh!r}: this is one process; "
            "`nblib train NOTEBOOK --processes 2` starts several"
        )
    if mesh != "hsdp":
        return 1

    # a group is a node, or half of the only one
    of_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    groups = world // of_a_node if of_a_node < world else 2
    if world % groups or world // groups < 2:
        raise ValueError(
            f"mesh = 'hsdp': {world} processes do not divide into {groups} equal groups "
            "of two or more"
        )
    return groups


def plan(machine: runtime.Machine) -> Plan:
    """Return how the processes of this world share a training; join the world if need be."""
    mesh = machine.mesh
    if mesh == "auto":
        mesh = os.environ.get(MESH, mesh)
    world = dist.get_world_size() if dist.is_initialized() else runtime.world()
    groups = check(mesh, world)
    if world == 1:
        return Plan("off", machine.device)

    kind = "ddp" if mesh == "auto" else mesh
    if kind != "ddp" and machine.precision == "fp16":
        raise ValueError(
            f"mesh = {kind!r}: precision = 'fp16' needs its loss scaler on whole gradients; "
            "take ddp"
        )
    if not dist.is_initialized():
        dist.init_process_group("nccl" if machine.device.type == "cuda" else "gloo")
    return Plan(kind, machine.device, world, dist.get_rank(), groups)


class Step(nn.Module):
    """Make the loss the forward of a module."""

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model = model
        self.__dict__["loss"] = loss  # no submodule: a teacher in it is not trained

    def forward(self, batch: Batch) -> Terms:
        return self.loss(self.model, batch)


class Spread:
    """Spread a model over the processes inside of `with`; call it for the terms of a batch.

    `model` is the one that trains: the caller's own, or under fsdp and hsdp the copy that is cut.
    """

    def __init__(self, plan: Plan, model: nn.Module, loss: Loss, optimizers: list[Optimizer]):
        self.plan = plan
        self.optimizers = optimizers
        self.original = model
        self.model = model
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # the caller's, and the shard

        if plan.kind in ("fsdp", "hsdp"):
            self.model = _copied(model)
            self.run = self._sharded(Step(self.model, loss))
        elif plan.kind == "ddp":
            self.run = _replicated(Step(model, loss))
        else:
            self.run = Step(model, loss)

    def __call__(self, batch: Batch, *, last: bool) -> Terms:
        """Return the terms of a micro-batch; `last` is the one after which gradients are added."""
        if self.plan.kind == "ddp":
            self.run.require_backward_grad_sync = last
        elif self.plan.kind != "off":
            # between groups; within one, whole gradients would stay in each process
            self.run.set_requires_all_reduce(last)
        return self.run(batch)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Put all weights into the caller's model while the block runs."""
        self._fill_original()
        yield
        self._empty_original()

    def __enter__(self) -> "Spread":
        if self.plan.rank:
            runtime.branch(self.plan.rank)
        return self

    def __exit__(self, error, *_) -> None:
        """Put the trained weights into the caller's parameters, in the optimizers too."""
        if self.plan.world == 1:
            return
        if error not in (None, GeneratorExit):
            return  # whoever raised may be alone; a cell that leaves its loop is left by all

        if self.pairs:
            self._fill_original()
            back = {id(shard): original for original, shard in self.pairs}
            _hand_over(self.optimizers, back, lambda value, _: gathered(value))
        del self.run
        del self.model
        self.pairs = []
        gc.collect()  # DDP's hooks on the gradients, and the shards
        runtime.set_generators(every(runtime.generators())[0])

    def _sharded(self, step: Step) -> nn.Module:
        """Cut the copy over the processes, and give the optimizers its shards."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # refuse what cannot be cut
        kind, world, groups = self.plan.kind, self.plan.world, self.plan.groups
        packed = [n for n, p in self.model.named_parameters() if not p.is_floating_point()]
        if packed:
            raise ValueError(
                f"mesh = {kind!r}: 4-bit weights cannot be cut ({packed[0]}); take ddp"
            )

        # each block alone, and the rest together
        if kind == "hsdp":
            shape, names = (groups, world // groups), ("groups", "shards")
        else:
            shape, names = (world,), ("shards",)
        mesh = init_device_mesh(self.plan.device.type, shape, mesh_dim_names=names)
        for module in [*compiling.blocks(self.model), step]:
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)  # gradients are sums: they are added
            module.set_force_sum_reduction_for_comms(True)

        # each process keeps its shards alone
        shards = dict(self.model.named_parameters())
        self.pairs = [(p, shards[name]) for name, p in self.original.named_parameters()]
        _hand_over(self.optimizers, {id(p): shard for p, shard in self.pairs}, like)
        self._empty_original()
        return step

    def _fill_original(self) -> None:
        """Give the caller's model the weights, buffers and modes of the copy. All must call."""
        for parameter, shard in self.pairs:
            parameter.data = gathered(shard.detach())
        if self.pairs:
            for module, copied in zip(self.original.modules(), self.model.modules(), strict=True):
                module.training = copied.training
                for name, buffer in copied.named_buffers(recurse=False):
                    setattr(module, name, buffer)

    def _empty_original(self) -> None:
        for parameter, _ in self.pairs:
            parameter.data = parameter.data.new_empty(0)


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of the modules that holds the same parameters and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for module, original in zip(copied.modules(), model.modules(), strict=True):
        if original._compiled_call_impl is not None:  # copies of modules are not compiled
            module.compile(**getattr(original, compiling.OPTIONS, {}))
    return copied


def _replicated(step: Step) -> nn.Module:
    """Return DDP around a step, which adds gradients up."""
    run = nn.parallel.DistributedDataParallel(
        step,
        find_unused_parameters=True,  # a phase of a loss may leave out a part of the model
        gradient_as_bucket_view=True,
    )
    run.broadcast_buffers = False  # from now on: each process computes them, and alike
    run.register_comm_hook(None, _add)
    return run


def _add(_, bucket):
    """Add the gradients of a bucket up, where DDP would average them."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _hand_over(
    optimizers: Iterable[Optimizer],
    new: dict[int, nn.Parameter],
    make: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Let optimizers hold other parameters, with what they stored for the old ones.

    `new` maps the id of each old parameter to the new one; `make` changes a stored tensor.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new[id(parameter)] for parameter in group["params"]]
        for parameter, stored in list(optimizer.state.items()):
            del optimizer.state[parameter]
            other = new[id(parameter)]
            for name, value in stored.items():
                if isinstance(value, Tensor):
                    stored[name] = make(value, other)
            optimizer.state[other] = stored


# ------------------------------------------------------------------ numbers of all processes


def added(tensor: Tensor) -> Tensor:
    """Add a tensor up over all processes, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def averaged(tensor: Tensor) -> Tensor:
    """Return the mean over the processes, which have as many rows each; without a gradient."""
    if not dist.is_initialized():
        return tensor
    return added(tensor.detach().clone()) / dist.get_world_size()


def read(values: list[Tensor]) -> list[float]:
    """Return every number of a step, read in one transfer.

    The loss terms are added up over the processes; the last two numbers, the gradient norm and the
    count of tokens, are the same everywhere.
    """
    numbers = torch.stack([value.detach().double() for value in values])
    added(numbers[:-2])
    return numbers.tolist()


def highest(code: int, device: torch.device) -> int:
    """Return the largest code of all processes, so that none ends alone."""
    if not dist.is_initialized():
        return code
    codes = torch.tensor(code, device=device)
    dist.all_reduce(codes, op=dist.ReduceOp.MAX)
    return int(codes)


@functools.cache
def beside(world):
    """Return a group of the same processes for another thread.

    Its messages must not meet those of the steps.
    """
    return dist.new_group(backend="gloo")


def every(value, group=None) -> list:
    """Return the value of each process, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def together(work: Callable, group=None) -> list:
    """Call `work` in all processes and return what it returned in each.

    If it fails in one process, all raise that error: OSError with its rank and its last line.
    """
    if not dist.is_initialized():
        return [work()]

    value, failure = None, ""
    try:
        value = work()
    except BaseException as error:
        failure = (str(error) or repr(error)).splitlines()[-1]

    outcomes = every((value, failure), group)
    for rank, (_, failure) in enumerate(outcomes):
        if failure:
            raise OSError(f"rank {rank}: {failure}")
    return [value for value, _ in outcomes]


# ------------------------------------------------------------------ tensors that are cut


def gathered(value):
    """Return a tensor that is cut whole, and anything else as it is. Every process must call."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def like(value: Tensor, parameter: Tensor | None) -> Tensor:
    """Return a whole tensor cut as this parameter is.

    An empty shard for a tensor that is only described (on meta). A tensor of another shape, and one
    that is cut already, stays as it is.
    """
    if not hasattr(parameter, "placements") or hasattr(value, "placements"):
        return value
    if value.shape != parameter.shape:
        return value
    if value.is_meta:
        return torch.empty_like(parameter, dtype=value.dtype)

    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    whole = value.to(parameter.device)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)  # nothing is sent
