"""ARD-LoRA on eleven families: it trains, is saved, loads to the same bits, and resumes under both
loops.

They differ where adapters break: fused q, k and v (Phi-3, GPT-NeoX), Conv1D (GPT-2), soft caps
(Gemma 2), experts in stacks (Mixtral, OLMoE), biases, partial rotations, dropout.
"""

import pytest
import torch
import transformers as tf
from conftest import FP32

from lessons import resume
from lessons.pitfalls import bench
from nblib import hf, runtime, text, train, wiring
from nblib.methods import ard
from nblib.methods.ard import adapter_files, ranks

pytestmark = [pytest.mark.slow]
SIZES = dict(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
SIZES |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = dict(intermediate_size=48, num_key_value_heads=2)
FAMILIES = {
    "qwen2": GROUPED,
    "qwen3": GROUPED | dict(head_dim=8),
    "llama": GROUPED,
    "mistral": GROUPED,
    "gemma2": GROUPED | dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=16),
    "phi3": GROUPED,
    "stablelm": GROUPED,
    "gpt_neox": dict(intermediate_size=48),
    "gpt2": {},
    "mixtral": GROUPED | dict(num_local_experts=4, num_experts_per_tok=2),
    "olmoe": GROUPED | dict(num_experts=4, num_experts_per_tok=2),
}
FUSED = {"phi3": "qkv_proj", "gpt_neox": "query_key_value", "gpt2": "c_attn"}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def plain(family: str):
    config = tf.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    with runtime.seeded(0):
        return tf.AutoModelForCausalLM.from_config(config).train()


def adapted(family: str, *, seed: int = 0):
    with runtime.seeded(seed):
        return ard.attach(plain(family), rank=2, alpha=4.0)


def batches():
    stream = torch.randint(3, 128, (3000,), generator=torch.Generator().manual_seed(0))
    return text.Batches(stream, rows=4, length=24, seed=0)


class Rows(torch.utils.data.Dataset):
    ids = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict:
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def test_there_are_ten_families_and_more():
    assert len(FAMILIES) >= 10


def test_adapters_stand_on_every_projection_train_alone_and_load_to_the_same_bits(family, tmp_path):
    model, before = adapted(family), dict(plain(family).named_parameters())
    ids = next(batches())["input_ids"]
    assert FUSED.get(family, "q_proj") in {name.rpartition(".")[2] for name in ard.adapters(model)}
    assert set(ard.adapters(model)) == set(wiring.select(plain(family)))
    # they start at zero
    assert torch.equal(model.eval()(ids).logits, plain(family).eval()(ids).logits)
    adamw = train.adamw(model, lr=1e-2, weight_decay=0.0)
    loss = ard.loss(model, beta=1e-3, warmup=2, optimizer=adamw)
    records = train.fit(model, batches(), adamw, total=3, loss=loss, machine=FP32, clip=0)
    assert all(record["kl"] > 0 for record in records)
    for name, p in model.named_parameters():
        if name.replace(".base.", ".") in before:
            assert torch.equal(p, before[name.replace(".base.", ".")]), name
    assert all(float(a.lora_up.detach().abs().max()) > 0 for a in ard.adapters(model).values())
    ranks.estimate_priors(model, [{"input_ids": ids, "labels": ids}])

    adapter_files.save(model, tmp_path)
    again = adapter_files.load(plain(family), tmp_path)
    assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def test_stopped_and_resumed_by_the_loop_it_ends_on_the_same_bits(family, tmp_path):
    current = {}

    def build():
        model = adapted(family)
        adamw = train.adamw(model, lr=1e-2, weight_decay=0.0)
        current["loss"] = ard.loss(model, beta=1e-3, warmup=3, optimizer=adamw)
        return model, batches(), adamw

    assert resume.bit_equal(
        build, tmp_path, total=4, machine=FP32, loss=lambda m, b: current["loss"](m, b)
    )


def _by_trainer(model, folder, checkpoint: str | None = None):
    adamw = train.adamw(model, lr=1e-2, weight_decay=0.0)
    loss = ard.loss(model, beta=1e-3, warmup=3, optimizer=adamw, language=hf.causal_lm)
    options = dict(
        loss=loss,
        optimizers=(adamw, None),
        train_dataset=Rows(),
        save=adapter_files.save,
        load=adapter_files.load,
    )
    with bench.seeded(), bench.silent():
        arguments = bench.arguments(str(folder), max_steps=4, save_strategy="steps", save_steps=2)
        hf.Trainer(model, arguments, **options).train(resume_from_checkpoint=checkpoint)
    return model


def test_resumed_under_the_trainer_it_ends_on_the_same_bits(family, tmp_path):
    straight = _by_trainer(adapted(family), tmp_path / "a")
    resumed = _by_trainer(
        adapted(family, seed=1), tmp_path / "b", str(tmp_path / "a" / "checkpoint-2")
    )
    mine, theirs = straight.state_dict(), resumed.state_dict()
    assert int(straight.ard_steps) == 4
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )


def test_a_family_with_linear_layers_of_its_own_is_refused_in_one_sentence():
    model = tf.FalconForCausalLM(tf.FalconConfig(**SIZES, ffn_hidden_size=48))
    with pytest.raises(
        ValueError, match="query_key_value is a FalconLinear: allowed are nn.Linear"
    ):
        ard.attach(model, rank=2, alpha=4.0)
