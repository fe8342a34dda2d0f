"""An update of low rank as a PEFT LoRA folder, `adapter_config.json` and
`adapter_model.safetensors`.

    y = W x + scale * up (down x)
    PEFT: y = W x + alpha / r * B (A x), with a rank and an alpha for each layer

`PeftModel.from_pretrained(base, folder)` then computes the same. Both methods whose result is such
an update leave by this door: ARD-LoRA with its means (ard_run.export_peft), LRC with its correction
(nblib/methods/lrc/export.py).

Footgun: only what PEFT knows travels. Noise, priors and rounding stay behind.
"""

from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from nblib import files


class Factors(NamedTuple):
    """The update of one layer, y = W x + scale * up (down x)."""

    down: Tensor  # (r, in)
    up: Tensor  # (out, r)
    scale: float = 1.0


def save(
    factors: dict[str, Factors], folder: Path | str, *, base: str | None, transposed: bool = False
) -> Path:
    """Return a PEFT LoRA folder for layers by name. `base` is the name or folder of the model that
    it belongs to, `transposed` says that its layers are GPT-2's Conv1D.
    """
    from peft import LoraConfig

    ranks = {name: len(f.down) for name, f in factors.items()}
    # PEFT divides by the rank of each layer
    alphas = {name: f.scale * ranks[name] for name, f in factors.items()}
    config = LoraConfig(
        r=max(ranks.values()),
        lora_alpha=max(alphas.values()),
        target_modules=list(factors),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        fan_in_fan_out=transposed,
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    state = {}
    for name, f in factors.items():
        state[f"base_model.model.{name}.lora_A.weight"] = f.down.detach()
        state[f"base_model.model.{name}.lora_B.weight"] = f.up.detach()
    write(Path(folder) / "adapter_model.safetensors", state)
    config.save_pretrained(folder)
    return Path(folder)


def write(path: Path, state: dict[str, Tensor]) -> None:
    with files.replacing(path) as partial:
        save_file(
            {n: t.detach().cpu().contiguous() for n, t in state.items()},
            partial,
            metadata={"format": "pt"},
        )
