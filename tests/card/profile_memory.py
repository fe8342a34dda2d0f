"""What the gpu profiles of notebooks 10 to 15 need, by the notebooks' own lines on a card of
shapes.

    python tests/card/profile_memory.py [NOTEBOOK ...] [--one]

For cards of 24, 80 and 141 GB the cell that chooses `rows` is executed with the profile's
parameters, the published sizes of its model, and what the card then has free. Prints the comment
lines that belong on top of the profile. With --one only one number is computed again: the bytes of
a step at the rows that the comment names for 80 GB.

Tokens are rows x accumulate x length x steps of the main training. Its time is 6 operations per
parameter that works on a token, 8 where blocks are computed twice, over an assumed 100 TFLOP/s.
Nothing of this is measured on a card.
"""

import card_shapes  # isort: skip  # before torch
import argparse
import ast
import json
import re
import sys
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from experiments import muon_race
from nblib import losses, memory, models, paths, runtime
from nblib.methods import ard, goose, lrc, moe
from nblib.methods.distill import objective
from nblib.methods.moe import depths, jamba, multi_token
from nblib.methods.muon import groups
from nbworkbook import base_model, parameters

CARDS, SPEED = (24, 80, 141), 100e12
KEYS = dict(use_cache=False, tie_word_embeddings=True)
QWEN = KEYS | dict(
    vocab_size=151936,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
PUBLISHED = {
    "Qwen/Qwen3-0.6B": tf.Qwen3Config(hidden_size=1024, intermediate_size=3072, **QWEN),
    "Qwen/Qwen3-1.7B": tf.Qwen3Config(hidden_size=2048, intermediate_size=6144, **QWEN),
    "HuggingFaceTB/SmolLM2-1.7B": tf.LlamaConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        **KEYS,
    ),
    "openai-community/gpt2": tf.GPT2Config(use_cache=False),
}
DEFAULTS = {"10_lrc": 8, "11_ard_lora": 8, "12_moe_muon": 8, "13_distillation": 4}
DEFAULTS |= {"14_sparse_depth": 8, "15_spiking_student": 4}
LINE = "# As computed, not measured, in GB of the card: "


def profile(name: str) -> dict:
    declared = parameters.declared(paths.notebooks() / f"{name}.ipynb")
    values = parameters.load_yaml(file(name))
    # checked by tests/test_notebooks.py
    return {key: p.default for key, p in declared.items()} | values


def file(name: str) -> Path:
    return paths.root() / "parameters" / f"{name}.gpu.yaml"


def on_meta(config) -> nn.Module:
    with torch.device("meta"):
        return memory.build(config)


def bytes_of(net: nn.Module, *, four_bit: bool = False) -> int:
    """Of its weights, the blocks' matrices in four bits."""
    inside = sum(p.numel() for p in net.model.layers.parameters() if p.ndim > 1) if four_bit else 0
    return 4 * models.count(net)["all"] - inside * 7 // 2


def chosen(name: str, values: dict, net: nn.Module | None):
    """The notebook's need() and its choice, as functions: rows -> bytes beside and all, GB ->
    (rows, accumulate).
    """
    machine = runtime.Machine(torch.device("cuda:0"), "bf16", "a card of shapes")
    world = dict(values) | dict(
        torch=torch, partial=partial, models=models, losses=losses, machine=machine
    )
    world |= dict(
        lrc=lrc,
        ard=ard,
        moe=moe,
        objective=objective,
        groups=groups,
        param_groups=groups,
        muon_race=muon_race,
    )
    world |= dict(goose=goose, jamba=jamba, mixture_of_depths=depths, multi_token=multi_token)
    world |= dict(
        vocabulary=base_model.RECIPES["full"]["vocab"] if net is None else net.config.vocab_size,
        teacher=net,
    )
    world |= dict(setup=SimpleNamespace(model=net), data=SimpleNamespace(model=net))
    world["shape"] = {
        name: values.get(key)
        for name, key in dict(hidden="hidden", layers="layers", heads="attention_heads").items()
    } | {key: values.get(key) for key in ("width", "experts", "top_k")}
    here = 0 if net is None else bytes_of(net)
    if values.get("four_bit"):
        packed = bytes_of(net, four_bit=True)
        world["base"] = SimpleNamespace(
            parameters=lambda: [torch.empty(packed, dtype=torch.uint8, device="meta")]
        )
        here += packed
    else:
        world["base"] = net
    calls = {}

    def fit(need, *, beside=0, **options):
        calls.update(need=cache(need), beside=beside, options=options)
        return options["rows"], options["accumulate"]

    world["memory"] = SimpleNamespace(estimate=memory.estimate, build=memory.build, fit=fit)
    exec(compile(ast.Module(_lines(name), []), name, "exec"), world)
    need, beside = calls["need"], calls["beside"]
    return lambda rows: need(rows) + beside + here, lambda gb: memory.fit(
        need, beside=beside, room=int(gb * 1e9) - here, **calls["options"]
    )


def _lines(name: str) -> list[ast.stmt]:
    """Of the cell that chooses the rows what the choice needs, and before it what of earlier cells
    it refers to: functions, and the models that are made on the meta device.
    """
    earlier: dict[str, ast.stmt] = {}
    keep: list[ast.stmt] = []
    for cell in parameters.cells(paths.notebooks() / f"{name}.ipynb"):
        if cell["cell_type"] == "code" and "await " not in cell["source"]:
            nodes = ast.parse(cell["source"]).body
            if "memory.fit(" in cell["source"]:
                keep = [node for node in nodes if _names(node) & {"need", "copies", "plan", "fit"}]
                break
            earlier |= {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
            earlier |= {
                n.id: node
                for node in nodes
                if isinstance(node, ast.With)
                for n in ast.walk(node)
                if _set(n)
            }
    before: list[ast.stmt] = []
    for node in chain(keep, before):  # which grows while it is read
        before += [earlier.pop(called) for called in sorted(_names(node) & earlier.keys())]
    return before[::-1] + keep


def _set(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _names(node: ast.stmt) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {getattr(node, "name", "")}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def model_of(name: str, values: dict) -> nn.Module | None:
    return on_meta(PUBLISHED[values["model"]]) if values.get("model") else None


def work(name: str, values: dict, net: nn.Module | None) -> tuple[int, float]:
    """Tokens of the main training, and hours."""
    tokens = DEFAULTS[name] * values["accumulate"] * values["length"] * values["steps"]
    each = 8 if values.get("checkpointing") else 6
    with torch.device("meta"):
        if name == "12_moe_muon":
            mixture = muon_race.backbone(
                base_model.RECIPES["full"]["vocab"],
                family=values["backbone"],
                heads=values["attention_heads"],
                **{key: values[key] for key in ("hidden", "layers", "width", "experts", "top_k")},
            )
            operations = each * moe.sizes(mixture)["active"]
        elif name == "13_distillation":
            shape = dict(
                hidden=values["hidden"], layers=values["layers"], heads=values["attention_heads"]
            )
            student = models.tiny(net.config.vocab_size, length=values["length"], **shape)
            operations = each * models.count(student)["all"] + 2 * models.count(net)["all"]
        elif name == "14_sparse_depth":
            parts = {key: values[key] for key in ("hidden", "layers", "width", "experts", "top_k")}
            family, heads, words = (
                values["backbone"],
                values["attention_heads"],
                base_model.RECIPES["full"]["vocab"],
            )
            mixture = muon_race.backbone(words, family=family, heads=heads, **parts)
            sizes = moe.sizes(mixture)
            # every second one works on a share of the tokens
            blocks = sizes["active"] - words * values["hidden"]
            operations = each * (
                blocks * (1 + values["capacity"]) / 2 + words * values["hidden"] * values["ahead"]
            )
        elif name == "15_spiking_student":
            shape = dict(hidden=values["hidden"], layers=values["layers"], length=values["length"])
            student = goose.tiny(net.config.vocab_size, **shape)
            operations = each * models.count(student)["all"] + 2 * models.count(net)["all"]
        else:
            operations = each * models.count(net)["all"]
    return tokens, tokens * operations / SPEED / 3600


def lines(name: str) -> list[str]:
    values = profile(name)
    net = model_of(name, values)
    total, choose = chosen(name, values, net)
    fits = []
    for gb in CARDS:
        try:
            rows, accumulate = choose(gb)
            fits.append(f"{gb}: rows {rows} x {accumulate}, {total(rows) / 1e9:.1f}")
        except ValueError:
            fits.append(f"{gb}: none, one row takes {total(1) / 1e9:.1f}")
    return [LINE + "; ".join(fits), second(*work(name, values, net))]


def second(tokens: int, hours: float) -> str:
    return f"# {tokens:,} tokens, {hours:.2g} hours of the main training at an assumed 100 TFLOP/s"


def again(name: str) -> dict:
    """What the profile's comment says, and what it should say."""
    written = file(name).read_text()
    said = re.search(r"80: rows (\d+) x (\d+), ([\d.]+)", written)
    values = profile(name)
    net = model_of(name, values)
    answer = {"lines": [line for line in written.splitlines() if line.startswith("# ")]}
    answer["second"] = second(*work(name, values, net))
    answer["batch"] = DEFAULTS[name] * values["accumulate"]
    answer["rows"] = [[int(r), int(a)] for r, a in re.findall(r"rows (\d+) x (\d+), ", written)]
    answer["said"] = float(said[3]) if said else None
    answer["computed"] = chosen(name, values, net)[0](int(said[1])) / 1e9 if said else None
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description="the memory, tokens and time of the gpu profiles")
    parser.add_argument("notebooks", nargs="*", help=f"of {', '.join(DEFAULTS)}; default all")
    parser.add_argument(
        "--one", action="store_true", help="one figure of memory for each, to compare"
    )
    parser.add_argument("--json", type=Path, help="a file for the answer")
    options = parser.parse_args()
    F.scaled_dot_product_attention = card_shapes._attention
    answer = {}
    for name in options.notebooks or DEFAULTS:
        answer[name] = again(name) if options.one else lines(name)
        print(name, json.dumps(answer[name], indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
