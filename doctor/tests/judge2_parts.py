"""What the second judge's programs share: running a stand-alone script as `train-doctor FILE.py` does, and honesty."""

import contextlib
import io
import tempfile
import textwrap
from pathlib import Path

from train_doctor import script


def as_script(source: str, *, steps: int = 8):
    """The report of a script that must itself end well; its assertions say that its fault, or its health, is real."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train_it.py"
        file.write_text(textwrap.dedent(HEAD) + textwrap.dedent(source))
        with contextlib.redirect_stdout(io.StringIO()):
            report, code = script.diagnose(file, "", [], steps=steps)
    if code or report.exception:
        raise RuntimeError(f"the script ended with {code}: {report.exception!r}")
    return report


HEAD = """
import copy, os, tempfile, torch, torch.nn as nn, torch.nn.functional as F, transformers, peft
torch.manual_seed(0)
def data(n, rows=4, length=24, vocab=128, seed=0):
    g = torch.Generator().manual_seed(seed)
    nxt = torch.randint(3, vocab, (vocab,), generator=g)
    for _ in range(n):
        x = torch.randint(3, vocab, (rows, length), generator=g)
        for t in range(1, length):
            x[:, t] = torch.where(torch.rand(rows, generator=g) < .8, nxt[x[:, t - 1]], x[:, t])
        yield x
def llama(**more):
    c = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=512, use_cache=False,
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**c, **more})).train()
"""


def real(fact, text):
    """A fault that cannot be measured is no fault."""
    assert fact, f"the fault is not there: {text}"


def learnt(losses, by=0.02):
    k = max(1, len(losses) // 3)
    first, last = sum(losses[:k]) / k, sum(losses[-k:]) / k
    assert last < first - by * abs(first), f"does not learn: {losses}"
