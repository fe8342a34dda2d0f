"""Models are always transformers models: tiny ones built from a config, real ones by hub name or
local path.

The default is a Qwen3 of about four million parameters. It trains in minutes on two CPU cores, and
its code is that of its large relatives. The other tiny families differ where training code tends to
break: GPT-2 has dropout on and biases, Llama has neither, the mixture models keep their experts in
stacked 3-D parameters.

Footgun: since transformers 5 `from_pretrained` keeps the dtype of the file. A bf16 checkpoint then
trains in bf16 parameters, where small updates round to nothing (notebook 03). So `load` asks for
fp32 unless told otherwise, and leaves lower precision to autocast.
"""

import os
from pathlib import Path

import torch
import transformers as tf
from torch import Tensor, nn

from nblib import hub, runtime, wiring

FAMILIES = ("qwen3", "llama", "gpt2", "qwen3_moe", "mixtral")
OFFLINE = {"local_files_only": True}  # what transformers is told where the hub cannot be reached


def tiny(
    vocab_size: int,
    *,
    family: str = "qwen3",
    hidden: int = 256,
    layers: int = 4,
    heads: int = 4,
    length: int = 1024,
    seed: int = 0,
    **config,
) -> nn.Module:
    """Return a small causal language model with random weights.

    `config` goes to the transformers config as it is.
    """
    shape = dict(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    shape |= dict(max_position_embeddings=length, tie_word_embeddings=True, use_cache=False)
    shape |= dict(bos_token_id=None, eos_token_id=None)
    llama = shape | dict(intermediate_size=3 * hidden, num_key_value_heads=max(1, heads // 2))
    moe = llama | dict(num_experts_per_tok=2)
    configs = {
        "qwen3": lambda: tf.Qwen3Config(**(llama | dict(head_dim=hidden // heads) | config)),
        "llama": lambda: tf.LlamaConfig(**(llama | config)),
        "gpt2": lambda: tf.GPT2Config(**(shape | config)),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(
            **(
                moe
                | dict(num_experts=8, moe_intermediate_size=hidden, head_dim=hidden // heads)
                | config
            )
        ),
        "mixtral": lambda: tf.MixtralConfig(**(moe | dict(num_local_experts=8) | config)),
    }
    if family not in configs:
        raise ValueError(f"family = {family!r}: allowed are {', '.join(FAMILIES)}")
    # the weights depend on this seed alone, and the caller's generator is left as it was
    with runtime.seeded(seed):
        model = tf.AutoModelForCausalLM.from_config(configs[family](), dtype=torch.float32)
    return model.train()


def load(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    four_bit: bool = False,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> nn.Module:
    """Return a causal model by hub name or local path. `four_bit` keeps its linear layers in NF4
    (bitsandbytes) and, on a card, multiplies in its native precision.
    """
    options = dict(dtype=dtype, trust_remote_code=trust_remote_code, device_map=str(device))
    if four_bit:
        # a CPU unpacks to `dtype`, as its stored results have it
        card = torch.device(device).type == "cuda"
        compute = runtime.PRECISIONS[runtime.native_precision("cuda")[0]] if card else dtype
        options["quantization_config"] = tf.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    offline = OFFLINE | {"adapter_kwargs": OFFLINE}  # it looks for an adapter beside the model too
    model = _reach(tf.AutoModelForCausalLM.from_pretrained, name, offline=offline, **options)
    return keep_differentiable(model) if four_bit else model


def keep_differentiable(model: nn.Module) -> nn.Module:
    """Forbid bitsandbytes to repack 4-bit weights for inference. On a CPU with AVX-512 BF16 it does
    so in the first forward pass in evaluation mode, for a product that has no backward. Returning
    to train() does not undo it. The gradients are wrong from then on, and nothing says so (notebook
    01).
    """
    from bitsandbytes.nn import Linear4bit

    for m in model.modules():
        if isinstance(m, Linear4bit):
            m.support_avx512bf16_for_cpu = False
    return model


def load_tokenizer(name: str, *, trust_remote_code: bool = False):
    return _reach(tf.AutoTokenizer.from_pretrained, name, trust_remote_code=trust_remote_code)


def load_config(name: str):
    """Return the config of a model by hub name or local path, without its weights."""
    return _reach(tf.AutoConfig.from_pretrained, name, what="a model's config")


def _reach(
    from_pretrained, name: str, *, what: str = "a model", offline: dict = OFFLINE, **options
):
    """Return what `from_pretrained` loads, by a path or a hub name; one sentence where it does
    not.
    """
    path = Path(name).expanduser()
    is_local = os.path.exists(path)  # Path.exists would raise where a name is too long for a path
    if name.startswith((".", "/", "~")) and not is_local:
        raise FileNotFoundError(f"model {name!r}: no such folder")

    # without a network the cache is read at once, instead of after many tries to connect
    is_reachable = is_local or hub.is_reachable()
    if not is_reachable:
        options |= offline
    try:
        return from_pretrained(str(path) if name.startswith("~") else name, **options)
    except (OSError, ValueError) as error:
        # a ValueError where the config names no known architecture
        none = f"model {name!r}: no folder with {what} that can be loaded, and"
        if not is_reachable and isinstance(error, OSError):
            raise FileNotFoundError(
                f"{none} not in the cache of the hub; {hub.address()} "
                "is not reachable from here, or HF_HUB_OFFLINE is set"
            ) from error
        raise FileNotFoundError(
            f"{none} not reachable on the hub from here (offline, misspelt, or gated). "
            f"First reason given: {str(error).splitlines()[0]}"
        ) from error


def as_teacher(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Frozen, in evaluation mode, its products' weights held in `dtype` (`machine.frozen_dtype`).
    Keep it out of the student's module tree: `student.train()` would flip it.
    """
    return hold(model.requires_grad_(False).eval(), dtype)


def hold(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Keep frozen weights that only products read in `dtype`: `machine.frozen_dtype`; fp32 leaves
    all as it is.

    Autocast remembers its copy of a weight only if that trains; a frozen one it casts at every use.
    Held in its dtype the results are the same bits, from half the memory. Norms, embeddings and the
    head, often one of these, stay fp32. Outside autocast the products are fp32, and what is saved
    has fp32 tensors, both of the rounded weights.
    """
    for layer in wiring.select(model, nn.Module).values() if dtype != torch.float32 else ():
        linear = type(layer) is nn.Linear
        # each a tensor of its own in transformers' mixtures
        experts = ("gate_up_proj", "down_proj")
        names = ("weight", "bias") if linear else getattr(layer, "read_by_products", experts)
        held = {name: p for name, p in layer._parameters.items() if p is not None and name in names}
        if held and not any(p.requires_grad or p.dtype != torch.float32 for p in held.values()):
            for name, p in held.items():
                setattr(layer, name, nn.Parameter(p.detach().to(dtype), requires_grad=False))
            layer.register_state_dict_post_hook(_save_wide)
            layer.__class__ = HeldLinear if linear else type(layer)
    return model


class HeldLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for weights that may be held: outside autocast in the dtype of x."""
    if not torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
    return nn.functional.linear(x, weight, bias)


def _save_wide(layer: nn.Module, state: dict[str, Tensor], prefix: str, _) -> None:
    for name, p in layer._parameters.items():
        if p is not None and p.dtype in (torch.bfloat16, torch.float16):
            state[prefix + name] = state[prefix + name].float()


def count(model: nn.Module) -> dict[str, int]:
    """Parameters, each shared tensor once: all of them, those that train, and those outside the
    embeddings.
    """
    tied = {
        id(p)
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m
        for p in m.parameters()
    }
    every = list(model.parameters())
    return {
        "all": sum(p.numel() for p in every),
        "trainable": sum(p.numel() for p in every if p.requires_grad),
        "outside_embeddings": sum(p.numel() for p in every if id(p) not in tied),
    }
