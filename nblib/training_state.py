"""Everything that a training is: what a checkpoint holds, and what one step needs.

    a checkpoint holds   weights and buffers, optimizers, scaler, position in the data, progress
    a step needs also    the machine, the processes that share it, the clip, the count of FLOPs

A loop that keeps these in local variables cannot be cut into functions; one that keeps them in a
trainer hides the step. So the loop makes one `Training` and hands it to `step` and to recovery.

Footgun: under fsdp `model` is a copy of the caller's module, and the optimizers hold its shards.
`parameters` and `groups` are therefore computed anew at each use, and never kept.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nblib import checkpoint, mfu, parallel, runtime
from nblib.device_batches import DeviceBatches
from nblib.progress import Progress, say


@dataclass
class Training:
    """Hold what a step needs and a checkpoint stores."""

    model: nn.Module
    optimizers: list[Optimizer]
    batches: DeviceBatches
    total: int
    clip: float
    machine: runtime.Machine
    spread: parallel.Spread
    scaler: torch.amp.GradScaler
    speed: mfu.Speed
    progress: Progress = field(default_factory=Progress)

    @property
    def groups(self) -> list[dict]:
        """Return the parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters that the optimizers update."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def capture(self, *, clone: bool = False, **more) -> checkpoint.State:
        """Return the state that a checkpoint stores; `clone` copies the tensors."""
        return checkpoint.capture(
            self.model,
            self.optimizers,
            batches=self.batches,
            scaler=self.scaler,
            progress=self.progress.state_dict(),
            clone=clone,
            **more,
        )

    def restore(self, state: checkpoint.State) -> None:
        """Put a captured state back."""
        progress = checkpoint.restore(
            state, self.model, self.optimizers, batches=self.batches, scaler=self.scaler
        )
        self.progress.load_state_dict(progress)

    def resume(self, folder: Path | None, records: list[dict]) -> checkpoint.State | None:
        """Restore the newest checkpoint of a folder, where there is one.

        Fill `records` with those of the steps before, and return recovery's snapshot.
        """
        if folder is None:
            return None
        state = checkpoint.resume(
            folder,
            self.model,
            self.optimizers,
            batches=self.batches,
            scaler=self.scaler,
            progress=self.progress.state_dict(),
        )
        if state is None:
            return None
        saved = state["training"]
        self.progress.load_state_dict(saved["progress"])
        records[:] = saved.get("history", [])
        say(f"resumed at step {self.progress.step} of {self.total}")
        return saved.get("snapshot")
