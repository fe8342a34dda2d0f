"""Checkpoints of six families of models, given to every notebook that takes a model: does it run,
or say why not?

    python tests/families.py                                 the whole table, one process per
                                                             notebook and family
    python tests/families.py 10_lrc 11_ard_lora --only gpt2 mixtral
    python tests/families.py 10_lrc --folder FOLDER
    one run in this process, of a checkpoint that is there

A checkpoint is made from a config and trained for seconds, because to round random weights costs
nothing. Its tokenizer is trained on the embedded text, because no stored one can be reached.
`save_pretrained` writes both, as on the hub. The cells of a notebook run in order with small
parameters on the plain CPU, without pitfalls and what takes no model.

A run ends in one of three ways: *ran*; *refused*, by an error of one sentence before anything was
trained; or *failed*, which is everything else, such as a sentence that comes too late, or an error
from inside of another library.
"""

import argparse
import ast
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "card"), str(TESTS)]
import run_notebook  # noqa: E402

FAMILIES = ("qwen3", "llama", "gemma2", "mixtral", "olmoe", "gpt2")
NOTEBOOKS = (
    "01_freeze_and_adapters",
    "10_lrc",
    "11_ard_lora",
    "13_distillation",
    "15_spiking_student",
    "20_compare",
)  # test_families.py holds it to all that have the parameter `model`
# fewer do not show the gap
SMALL = {"10_lrc": run_notebook.SMALL["10_lrc"] | dict(eval_rows=64, quick_rows=32)}
SMALL |= {"20_compare": dict(steps=4, seeds=2, rows=2, length=32, eval_rows=32, corpus="prose")}
# What a family needs besides `model`, in the words of the sentence that refuses it without.
GIVEN = {
    ("11_ard_lora", "gpt2"): dict(kinds=["c_attn", "c_proj"]),
    ("20_compare", "gemma2"): dict(methods=["full", "lora", "lrc", "ard", "moe"]),
}
VOCABULARY, STEPS, RAN, REFUSED, FAILED = 512, 200, "ran", "refused", "failed"


class Outcome(NamedTuple):
    """How a run ended."""

    kind: str
    words: str
    seconds: float


def config(family: str, vocabulary: int):
    """A config of two layers that keeps what sets the family apart: tied heads, soft caps, experts,
    windows.
    """
    import transformers as tf

    shape = dict(vocab_size=vocabulary, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    grouped = shape | dict(intermediate_size=128, num_key_value_heads=2)
    made = {
        "qwen3": lambda: tf.Qwen3Config(**grouped, head_dim=16, tie_word_embeddings=True),
        "llama": lambda: tf.LlamaConfig(**grouped, tie_word_embeddings=False),
        "gemma2": lambda: tf.Gemma2Config(
            **grouped, head_dim=16, query_pre_attn_scalar=16, sliding_window=16
        ),
        "mixtral": lambda: tf.MixtralConfig(**grouped, num_local_experts=4, num_experts_per_tok=2),
        "olmoe": lambda: tf.OlmoeConfig(**grouped, num_experts=4, num_experts_per_tok=2),
        "gpt2": lambda: tf.GPT2Config(**shape),
    }
    return made[family]()


def checkpoint(family: str, folder: Path) -> Path:
    """The family's checkpoint with a tokenizer, made where it is missing."""
    import torch
    import transformers as tf

    from nblib import runtime, text

    if not (folder / "config.json").exists():
        documents = text.documents("prose")[:60]
        tokenizer = text.train_tokenizer(documents, vocab_size=VOCABULARY)
        batches = text.Batches(text.encode(documents, tokenizer), rows=8, length=64)
        with runtime.seeded(0):
            model = tf.AutoModelForCausalLM.from_config(
                config(family, len(tokenizer)), dtype=torch.float32
            ).train()
            adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(STEPS):
                # the loss of transformers, not ours
                model(**next(batches), use_cache=False).loss.backward()
                adamw.step(), adamw.zero_grad()
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def execute(name: str, folder: Path, given: dict) -> Outcome:
    """The notebook's cells in this process, which ought to be a fresh one."""
    run_notebook.SMALL |= SMALL
    four_bit = run_notebook.FOUR_BIT  # there are kernels for a CPU
    for table in (run_notebook.SKIPPED, run_notebook.INSTEAD):
        table |= {
            of: [line for line in lines if line[-1] != four_bit] for of, lines in table.items()
        }
    from nblib import train

    whole, trained = train.steps, []

    def steps(*args, **options):  # a sentence after this one comes too late
        trained.append(name)
        return whole(*args, **options)

    train.steps = steps
    began = time.perf_counter()
    try:
        run_notebook.run(
            name, given={"device": "cpu", "precision": "fp32", "model": str(folder)} | given
        )
        kind, words = RAN, ""
    except (ValueError, TypeError, FileNotFoundError) as error:
        kind, words = REFUSED, str(error)
        if trained or not said_by_us(error) or "\n" in words:
            traceback.print_exc()
            kind, words = (
                FAILED,
                f"{type(error).__name__} {'after training began' if trained else ''}: {words}",
            )
    except Exception as error:
        traceback.print_exc()
        kind, words = FAILED, f"{type(error).__name__}: {error}"
    return Outcome(kind, words, time.perf_counter() - began)


def said_by_us(error: Exception) -> bool:
    """Whether the line that raised is one of nblib's or of the lessons."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return any(
        Path(last).is_relative_to(run_notebook.ROOT / part) for part in ("nblib", "notebooks")
    )


def new_process(words: Sequence[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)


def in_process(
    name: str,
    family: str,
    checkpoints: Path,
    given: dict,
    python: Callable[[Sequence[str]], subprocess.CompletedProcess] = new_process,
) -> Outcome:
    """The same in a process of its own, as a kernel would be."""
    began = time.perf_counter()
    ended = python(
        [__file__, name, "--only", family, "--folder", str(checkpoints), "--given", repr(given)]
    )
    kind, _, words = (ended.stdout.splitlines() or [""])[-1].partition(": ")
    if kind not in (RAN, REFUSED, FAILED):
        kind, words = FAILED, f"the process ended with {ended.returncode}"
    if kind == FAILED:
        words += "\n" + ended.stderr[-3000:]
    return Outcome(kind, words, time.perf_counter() - began)


def alone(name: str, family: str, checkpoints: Path, given: dict) -> Outcome:
    """What the process of `in_process` does."""
    import logging

    sys.path[:0] = [str(run_notebook.ROOT / part) for part in ("", "notebooks", "doctor")]
    with tempfile.TemporaryDirectory(prefix="nblib-families-") as folder:
        os.environ |= {
            "NBLIB_OUTPUTS": folder,
            "NBLIB_HEADLESS": "1",
            "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "agg",
        }
        os.chdir(run_notebook.ROOT / "notebooks")
        logging.disable(logging.WARNING)
        # the corpora, once read
        os.environ.setdefault("NBLIB_BASE", str(run_notebook.ROOT / "outputs" / "base"))
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            from nblib import text

            for source in ("prose", "code"):
                text.documents(source)
            run_notebook.small_base(checkpoints / "base")
            asyncio.set_event_loop(asyncio.new_event_loop())
            return execute(name, checkpoint(family, checkpoints / family), given)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="give a checkpoint of each family to every notebook that takes one"
    )
    parser.add_argument(
        "names", nargs="*", default=NOTEBOOKS, help="notebooks; all of them without"
    )
    parser.add_argument("--only", nargs="*", default=FAMILIES, choices=FAMILIES, help="families")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints are; one notebook of one family, here"
    )
    parser.add_argument("--given", default="{}", help="more parameters of that one, as a dict")
    options = parser.parse_args()
    if options.folder:
        outcome = alone(
            options.names[0],
            options.only[0],
            options.folder.resolve(),
            ast.literal_eval(options.given),
        )
        print(f"{outcome.kind}: {outcome.words}")
        return 0
    worst = 0
    with tempfile.TemporaryDirectory(prefix="nblib-families-") as folder:
        for name in options.names:
            for family in options.only:
                plans = [{}, *filter(None, [GIVEN.get((name, family))])]
                for given in plans:
                    kind, words, seconds = in_process(name, family, Path(folder), given)
                    worst |= kind == FAILED
                    with_these = "".join(f" {key}={value}" for key, value in given.items())
                    print(
                        f"{name:24}{family:9}{kind:8}{seconds:4.0f} s {with_these} {words}",
                        flush=True,
                    )
    return worst


if __name__ == "__main__":
    sys.exit(main())
