"""An LRC model as a folder that stock transformers and PEFT read, without this library.

It leaves in two parts:

    folder/           the ternary model, a BitNet checkpoint of transformers: codes at two bits, one
                      scale a layer
    folder/adapter    U V^T as a PEFT LoRA:  A = V^T, B = U, alpha / r = 1

    model = AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(model, folder / "adapter")

Footguns: transformers opens the codes to full numbers when it loads, so a smaller file is no
smaller model in memory. Its layer multiplies the bias by the scale as well, so a bias is stored
divided by it. Without the adapter the folder is the rounded model, which is much worse, and nothing
says so.
"""

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers as tf
from torch import Tensor, nn

from nblib import files
from nblib.methods import lora_folder
from nblib.methods.lrc import layer as lrc
from nblib.methods.lrc import ternary

ADAPTER = "adapter"


def save(
    model: nn.Module, folder: Path | str, *, tokenizer: tf.PreTrainedTokenizerBase | None = None
) -> Path:
    """Return an LRC model as a BitNet checkpoint with its correction beside it; see above for how
    to load it.
    """
    layers = lrc.layers(model)
    if not layers:
        raise ValueError("the model has no LRC layers: attach first")
    if rows := [name for name, layer in layers.items() if layer.scale == "rows"]:
        raise ValueError(
            f"{rows[0]} has a scale for each row, and BitNet one for each layer: "
            "scale='least_squares'"
        )
    config = copy.deepcopy(model.config)
    plain = [name for name in _linears(config, layers) if name not in layers]
    config.quantization_config = tf.BitNetQuantConfig(plain, linear_class="autobitlinear").to_dict()
    config.architectures = [type(model).__name__]
    with files.replacing(Path(folder)) as partial:  # an earlier export stays whole until the end
        for part in filter(None, (config, getattr(model, "generation_config", None), tokenizer)):
            part.save_pretrained(partial)
        lora_folder.write(partial / "model.safetensors", _bitnet(model, layers))
        factors = {
            name: lora_folder.Factors(V.T, U)
            for name, layer in layers.items()
            for U, V in (layer.factors(),)
        }
        lora_folder.save(factors, partial / ADAPTER, base=str(folder))
    return Path(folder)


def _linears(config, layers: Iterable[str]) -> list[str]:
    """Return the linear layers of a stock model of this config; ValueError where an LRC layer is
    none of them.
    """
    with torch.device("meta"):
        stock = tf.AutoModelForCausalLM.from_config(config)
    linears = [name for name, m in stock.named_modules() if isinstance(m, nn.Linear)]
    if other := [name for name in layers if name not in linears]:
        kind = type(stock.get_submodule(other[0])).__name__
        raise ValueError(
            f"{other[0]} is a {kind} in transformers: a BitNet checkpoint replaces nn.Linear alone"
        )
    return linears


def _bitnet(model: nn.Module, layers: dict[str, lrc.LRCLinear]) -> dict[str, Tensor]:
    """Return what the stock model loads: all that is not LRC's as it is, each shared tensor once,
    and the layers packed.
    """
    from transformers.integrations.bitnet import VALUES_PER_ITEM, pack_weights

    owned = {f"{name}.{part}" for name in layers for part in ("weight", "bias", "U", "V")}
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if name not in owned and tensor.data_ptr() not in seen:  # a tied head is its embedding
            seen.add(tensor.data_ptr())
            state[name] = tensor
    for name, layer in layers.items():
        weight = ternary.ternary(layer.weight, layer.scale) if layer.joint else layer.weight
        scale, codes = weight.abs().max().clamp_min(torch.finfo(torch.float32).tiny), weight.sign()
        whole = len(codes) % VALUES_PER_ITEM == 0  # others it reads unpacked
        state |= {
            f"{name}.weight": pack_weights(codes) if whole else codes,
            f"{name}.weight_scale": scale.view(1),
        }
        if layer.bias is not None:
            state[f"{name}.bias"] = layer.bias / scale
    return state
