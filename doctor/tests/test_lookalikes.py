"""Healthy programs of other kinds, whose labels, masks and losses are not those of a causal language model."""

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.bench import batches, lm, quiet
from tests.test_loss import Small, ce, loop, picked, shift

BERT = transformers.BertConfig(
    vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)


def t5():
    config = transformers.T5Config(
        vocab_size=256, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).train()


def bert(kind):
    return getattr(transformers, kind)(BERT).train()


def lora():
    return peft.get_peft_model(lm(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def holes(model, ids, every=False):
    hole = torch.rand(ids.shape) < 0.15
    return model(input_ids=torch.where(hole, 2, ids), labels=torch.where(hole | every, ids, -100)).loss


def preference(model, ids):
    def score(x):
        return picked(model(input_ids=x).logits[:, :-1], x[:, 1:])[:, 8:].sum(1)

    a, b = ids.chunk(2)
    with torch.no_grad(), model.disable_adapter():
        before = score(a) - score(b)
    return -F.logsigmoid(0.1 * (score(a) - score(b) - before)).mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(256, 32), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 256)

    def forward(self, x, state=None):
        y, state = self.layer(self.table(x), state)
        return self.head(y), state


def focal(model, ids):
    each = picked(*shift(model, ids, 1))
    return ((1 - (-each).exp()) ** 2 * each).mean()


PROGRAMS = {
    "masked lm": (lambda: bert("BertForMaskedLM"), holes),
    "classes": (
        lambda: bert("BertForSequenceClassification"),
        lambda m, i: m(input_ids=i, labels=i[:, 0] % 2).loss,
    ),
    "token classes": (
        lambda: bert("BertForTokenClassification"),
        lambda m, i: m(input_ids=i, labels=i % 2).loss,
    ),
    "encoder-decoder": (t5, lambda m, i: m(input_ids=i[:, :16], labels=i[:, 16:]).loss),
    "encoder-decoder, copying": (t5, lambda m, i: m(input_ids=i, labels=i).loss),
    "adapter": (lora, lambda m, i: m(input_ids=i, labels=i).loss),
    "adapter, preference": (lora, preference),
    "recurrent": (Recurrent, lambda m, i: ce(m(i[:, :-1])[0], i[:, 1:])),
    "focal": (Small, focal),
    "policy gradient": (lm, lambda m, i: (picked(*shift(m, i, 1)) * torch.randn(4, 1)).mean()),
    "monotonous": (Small, lambda m, i: ce(*shift(m, i * 0 + torch.arange(32) % 2, 1))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_kinds_are_left_alone(name):
    model, loss = PROGRAMS[name]
    report = quiet(lambda: loop(model(), loss, batches(5), steps=5))
    assert report.done and not report.faults and report.root is None, f"{report.faults}\n{report}"


def test_a_masked_model_that_is_asked_for_all_tokens_is_no_causal_one():
    report = quiet(lambda: loop(bert("BertForMaskedLM"), lambda m, i: holes(m, i, True), batches(5), steps=5))
    assert {f.check for f in report.findings} == {"F33"} and not report.faults, f"\n{report}"
