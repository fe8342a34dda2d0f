"""An LRC model as two GGUF files, which llama.cpp reads: codes in TQ2_0, and the correction as its
LoRA adapter.

    folder/model.gguf     the ternary model; embeddings, norms and biases in fp32
    folder/adapter.gguf   U V^T as A = V^T, B = U in fp32; alpha 0, which llama.cpp takes as "no
                          scale"

    llama-cli -m folder/model.gguf --lora folder/adapter.gguf

TQ2_0 keeps two bits a weight and an fp16 number for every 256 weights of a row. So the codes leave
as they are, and the scale is rounded to eleven bits: half a thousandth at most, whatever the model.
A scale for each row fits as well. `read` opens both files to an LRC model again; its weights are
the model's with that rounding, to the bit.

Needs the package gguf: pip install 'nblib[gguf]'.

Footguns: llama.cpp rounds the inputs of a product to eight bits in groups of 256, LRC to eight bits
per token, so their logits differ a little. And without --lora it answers all the same, from the
rounded model, which is much worse.
"""

import copy
import json
from pathlib import Path
from types import ModuleType

import torch
import transformers as tf
from torch import Tensor, nn

from nblib import files, wiring
from nblib.methods.lrc import layer as lrc
from nblib.methods.lrc import ternary

MODEL, ADAPTER = "model.gguf", "adapter.gguf"
BLOCK = 256  # weights of a row that share a scale
# Llama's queries and keys would need their rows in another order
FAMILIES = {"qwen2": "QWEN2", "qwen3": "QWEN3"}


def package() -> ModuleType:
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError("gguf is not installed; pip install 'nblib[gguf]'") from None
    return gguf


def save(
    model: nn.Module, folder: Path | str, *, tokenizer: tf.PreTrainedTokenizerBase | None = None
) -> Path:
    """Both files. Without a tokenizer llama.cpp takes tokens by number alone."""
    gguf, layers = package(), lrc.layers(model)
    _refuse(model, layers)
    names = _names(gguf, model.config)
    with files.replacing(Path(folder)) as partial:  # an earlier export stays whole until the end
        partial.mkdir(exist_ok=True)
        writer = gguf.GGUFWriter(
            partial / MODEL, gguf.MODEL_ARCH_NAMES[_architecture(gguf, model.config)]
        )
        _describe(writer, model.config)
        _vocabulary(gguf, writer, model.config, tokenizer)
        for name, tensor in _rest(model, layers).items():
            writer.add_tensor(_name(names, name), tensor.detach().float().cpu().numpy())
        for name, layer in layers.items():
            kind = gguf.GGMLQuantizationType.TQ2_0
            data = gguf.quants.quantize(_weight(layer).float().cpu().numpy(), kind)
            writer.add_tensor(_name(names, f"{name}.weight"), data, raw_dtype=kind)
        _write(writer)
        writer = gguf.GGUFWriter(
            partial / ADAPTER, gguf.MODEL_ARCH_NAMES[_architecture(gguf, model.config)]
        )
        writer.add_type("adapter")
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)
        for name, layer in layers.items():
            U, V = (f.detach().float().cpu() for f in layer.factors())
            for part, factor in {"lora_a": V.T.contiguous(), "lora_b": U.contiguous()}.items():
                writer.add_tensor(f"{_name(names, f'{name}.weight')}.{part}", factor.numpy())
        _write(writer)
    return Path(folder)


def read(folder: Path | str, config: tf.PretrainedConfig) -> nn.Module:
    """Return the LRC model of both files, which are opened by the package alone.

    `config` says what its shape is.
    """
    gguf = package()
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names, (weights, factors) = (
        _names(gguf, config),
        (_tensors(gguf, Path(folder) / f) for f in (MODEL, ADAPTER)),
    )
    state = {name: weights.pop(_name(names, name)) for name in _own(model)}
    if weights:
        raise ValueError(f"{next(iter(weights))!r} of {MODEL} is in no model of this config")
    model.load_state_dict(state, strict=False)  # a tied head is its embedding
    pairs = {}
    for name in lrc.linear_layers(model):
        stem = _name(names, f"{name}.weight")
        if f"{stem}.lora_a" in factors:
            pairs[name] = (factors[f"{stem}.lora_b"], factors[f"{stem}.lora_a"].T.contiguous())
    once = ternary.Once()

    def replace(name: str, linear: nn.Module) -> lrc.LRCLinear:
        U, V = pairs[name]
        layer = lrc.LRCLinear(
            linear.weight.detach(), linear.bias, U.shape[1], once=once, scale="rows"
        )
        layer.U.data, layer.V.data = U, V
        return layer

    wiring.swap(model, replace, {name: model.get_submodule(name) for name in pairs})
    return model


def rounded(model: nn.Module) -> nn.Module:
    """Return a copy of an LRC model with the scales of its weights in fp16: what the files hold."""
    model = copy.deepcopy(model)
    for layer in lrc.layers(model).values():
        weight = _weight(layer)
        layer.joint, layer.scale = False, "rows"
        layer.weight = nn.Parameter(
            weight.sign() * weight.abs().amax(1, keepdim=True).half().float(), False
        )
        (U, V), layer.bits = (nn.Parameter(f.detach().clone(), False) for f in layer.factors()), 0
        layer.U, layer.V = U, V
    return model


def _weight(layer: lrc.LRCLinear) -> Tensor:
    return (ternary.ternary(layer.weight, layer.scale) if layer.joint else layer.weight).detach()


def _refuse(model: nn.Module, layers: dict[str, lrc.LRCLinear]) -> None:
    if not layers:
        raise ValueError("the model has no LRC layers: attach first")
    if model.config.model_type not in FAMILIES:
        allowed = ", ".join(FAMILIES)
        raise ValueError(f"model_type = {model.config.model_type!r}: to GGUF can go {allowed}")
    if odd := [name for name, layer in layers.items() if layer.in_features % BLOCK]:
        width = layers[odd[0]].in_features
        raise ValueError(
            f"{odd[0]} has rows of {width} weights, and TQ2_0 holds multiples of {BLOCK} alone"
        )


def _architecture(gguf: ModuleType, config: tf.PretrainedConfig):
    return getattr(gguf.MODEL_ARCH, FAMILIES[config.model_type])


def _names(gguf: ModuleType, config: tf.PretrainedConfig):
    return gguf.get_tensor_name_map(_architecture(gguf, config), config.num_hidden_layers)


def _name(names, name: str) -> str:
    if not (other := names.get_name(name, try_suffixes=(".weight", ".bias"))):
        raise ValueError(f"{name}: no tensor of GGUF has this part of the model")
    return other


def _own(model: nn.Module) -> list[str]:
    """Every tensor of a model, a shared one by its first name."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        first.setdefault(tensor.data_ptr(), name)
    return list(first.values())


def _rest(model: nn.Module, layers: dict[str, lrc.LRCLinear]) -> dict[str, Tensor]:
    state, theirs = (
        model.state_dict(),
        {f"{name}.{part}" for name in layers for part in ("weight", "U", "V")},
    )
    return {name: state[name] for name in _own(model) if name not in theirs}


def _describe(writer, config: tf.PretrainedConfig) -> None:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _vocabulary(gguf: ModuleType, writer, config: tf.PretrainedConfig, tokenizer) -> None:
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    kinds, bpe = gguf.TokenType, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if bpe["type"] != "BPE":
        raise ValueError(f"the tokenizer is a {bpe['type']}: to GGUF can go BPE")
    special, words = (
        set(tokenizer.all_special_ids),
        {i: token for token, i in tokenizer.get_vocab().items()},
    )
    tokens = [words.get(i, f"[PAD{i}]") for i in range(config.vocab_size)]
    types = [kinds.NORMAL if i in words else kinds.UNUSED for i in range(len(tokens))]
    for i in special:
        types[i] = kinds.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    )
    writer.add_add_bos_token(False)
    for name, add in (("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id)):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            add(number)


def _write(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(gguf: ModuleType, path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, opened to fp32."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(data.copy()).view(*reversed(tensor.shape.tolist()))
    return found
