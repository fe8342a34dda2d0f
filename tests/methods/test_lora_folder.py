"""A folder that PEFT opens to the same update, for layers of different rank and scale."""

import peft
import torch

from nblib import models
from nblib.methods import lora_folder


def test_peft_adds_what_the_factors_say(tmp_path):
    base, ids = models.tiny(256, hidden=64, layers=2).eval(), torch.randint(256, (2, 16))
    names, dense = (
        [f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)],
        models.tiny(256, hidden=64, layers=2).eval(),
    )
    ranks, scales = (3, 5), (2.0, 0.25)
    factors = {
        name: lora_folder.Factors(torch.randn(rank, 64), torch.randn(64, rank), scale)
        for name, rank, scale in zip(names, ranks, scales)
    }
    for name, (down, up, scale) in factors.items():
        dense.get_submodule(name).weight.data += scale * up @ down
    theirs = peft.PeftModel.from_pretrained(
        base, lora_folder.save(factors, tmp_path, base="a/b")
    ).eval()
    assert torch.allclose(theirs(ids).logits, dense(ids).logits, atol=1e-5)
    assert peft.PeftConfig.from_pretrained(tmp_path).base_model_name_or_path == "a/b"
