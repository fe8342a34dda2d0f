"""Checks before a run of ARD-LoRA, and its files."""

import copy
from types import SimpleNamespace

import peft
import pytest
import torch
from ard_bench import adapted, gradients_of, ragged, random_batch
from bit_flips import flips

from nblib import files, losses, models
from nblib.methods import ard
from nblib.methods.ard import adapter_files, ranks


class _Tokens(SimpleNamespace):
    def __len__(self):
        return self.size


def _spoil(model, batch, tokenizer, what: str) -> None:
    if what == "embedding":
        model.get_input_embeddings().weight.requires_grad_(True)
    elif what == "frozen":
        next(iter(ard.adapters(model).values())).lora_up.requires_grad_(False)
    elif what == "bf16":
        model.bfloat16()
    elif what == "vocabulary":
        tokenizer.size = 300
    elif what == "pad":
        model.config.pad_token_id = 7
    elif what == "supervised":
        batch["labels"] = batch["input_ids"]
    elif what == "unmasked":
        del batch["attention_mask"]
    elif what == "labels":
        batch["labels"] = torch.full_like(batch["labels"], losses.IGNORED)
    elif what == "dead":
        for a in ard.adapters(model).values():
            a.register_forward_hook(lambda m, args, out: out.detach())


@pytest.mark.parametrize(
    "what, says",
    [
        ("embedding", "model.embed_tokens.weight trains, but it is not an adapter .1 in all"),
        ("frozen", "up is an adapter and is frozen"),
        ("bf16", "must be fp32.*bfloat16"),
        ("vocabulary", "300 tokens, the model embeds 256"),
        ("pad", "pad is token 0 for the tokenizer and 7 for the model"),
        ("supervised", "22 padding positions are supervised"),
        ("unmasked", "no attention_mask: its KL would count"),
        ("labels", "none is supervised"),
        ("dead", "a trial of two steps failed"),
    ],
)
def test_preflight_names_the_reason(what, says):
    model, (batch, _) = adapted(wake=False), ragged()
    tokenizer = _Tokens(size=256, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    loss = ard.loss(model, beta=0.1)
    facts = adapter_files.preflight(model, tokenizer, batch, loss=loss)
    assert facts["adapters"] == 6 and facts["trainable"] == models.count(model)["trainable"]
    _spoil(model, batch, tokenizer, what)
    with pytest.raises(ValueError, match=says):
        adapter_files.preflight(model, tokenizer, batch, loss=loss)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("pruned", [False, True])
def test_exported_peft_folder_and_own_file_give_the_same_logits(pruned, tmp_path):
    model, ids = adapted().eval(), random_batch()["input_ids"]
    if pruned:
        torch.manual_seed(1)
        scores = {name: torch.rand(4) for name in ard.adapters(model)}
        scores[next(iter(scores))] = torch.zeros(4)  # one layer loses all
        assert len(set(ranks.prune(model, scores, keep=11).values())) > 2
    logits = model(ids).logits
    adapter_files.export_peft(model, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(
        models.tiny(256, hidden=64, layers=2), tmp_path / "peft"
    ).eval()
    assert torch.allclose(theirs(ids).logits, logits, atol=1e-6)

    ranks.estimate_priors(model, [random_batch()])
    model.ard_steps.fill_(7)
    adapter_files.save(model, tmp_path)
    again = adapter_files.load(models.tiny(256, hidden=64, layers=2), tmp_path)
    assert torch.equal(again.eval()(ids).logits, logits) and int(again.ard_steps) == 7
    mine, other = model.state_dict(), again.state_dict()
    assert mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in mine)
    (a, _), (b, _) = (
        gradients_of(m, random_batch(), ard.loss(m, beta=0.1)) for m in (model, again)
    )
    assert torch.equal(a["kl"], b["kl"])  # bounds and priors too


def test_adapters_of_gpt2_beside_matrices_that_are_stored_the_other_way_round(tmp_path):
    base = models.tiny(256, family="gpt2", hidden=64, layers=2).eval()
    with pytest.raises(ValueError, match="no 'q_proj'; allowed are c_attn, c_fc, c_proj"):
        ard.projections(base)
    model, ids = (
        ard.attach(copy.deepcopy(base), rank=4, alpha=8).eval(),
        random_batch()["input_ids"],
    )
    # they start at zero
    assert len(ard.adapters(model)) == 8 and torch.equal(model(ids).logits, base(ids).logits)
    for a in ard.adapters(model).values():
        torch.nn.init.normal_(a.lora_up)
    assert not torch.allclose(model(ids).logits, base(ids).logits, atol=0.1)
    adapter_files.export_peft(model, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "peft").eval()
    assert torch.allclose(theirs(ids).logits, model(ids).logits, atol=1e-4)


def test_loading_says_what_does_not_fit(tmp_path):
    adapter_files.save(adapted(), tmp_path)
    with pytest.raises(FileNotFoundError, match="no saved adapters"):
        adapter_files.load(models.tiny(256, hidden=64, layers=2), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="modules that this model lacks"):
        adapter_files.load(models.tiny(256, hidden=64, layers=1), tmp_path)
    with pytest.raises(ValueError, match=r"mean is \(4, 64\), the model's \(4, 32\)"):
        adapter_files.load(models.tiny(256, hidden=32, layers=2), tmp_path)
    with pytest.raises(ValueError, match="different adapters"):
        adapter_files.load(adapted(kinds=("q_proj",)), tmp_path)


def test_a_damaged_save_is_refused(tmp_path):
    folder = adapter_files.save(adapted(), tmp_path)
    for name in (adapter_files.TENSORS, adapter_files.RECIPE):
        for _ in flips(folder / name):
            with pytest.raises(files.Unreadable):
                adapter_files.load(adapted(), tmp_path)
    assert adapter_files.load(adapted(), tmp_path)


def test_a_save_of_an_earlier_release_is_refused_in_one_sentence(tmp_path):
    (tmp_path / adapter_files.OLD_FILE).write_bytes(b"tensors")
    with pytest.raises(ValueError, match="written by nblib 0.1 and is no longer read"):
        adapter_files.load(adapted(), tmp_path)


def test_a_save_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    folder = adapter_files.save(adapted(), tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def stop(tensors, partial, metadata):
        partial.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter_files, "save_file", stop)
    with pytest.raises(KeyboardInterrupt):
        adapter_files.save(adapted(rank=2), tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
