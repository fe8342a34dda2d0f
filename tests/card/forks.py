"""Imports torch with its card and the libraries once, and runs the programs of this folder, each in
a fork of its own.

    python tests/card/forks.py     as tests/warm.py, which says what it reads and answers

Footgun: the card must be there before torch is imported.
"""

import sys

import absent_card

absent_card.appear()
sys.path.append(str(absent_card.ROOT / "tests"))  # last: that folder holds one named lessons

import warm  # noqa: E402

# transformers imports them when it meets their names
FAMILIES = ("qwen3", "qwen3_moe", "llama", "mixtral", "gpt2")
NEEDED = [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES]
NEEDED += [
    "transformers.trainer",
    "peft",
    "IPython.core.formatters",
    "nblib.doctor",
    "nblib.hf",
    "nbworkbook.show",
]
NEEDED += ["lessons.trials", "lessons.exercises", "nbworkbook.gpu_check", "nbworkbook.method_steps"]

if __name__ == "__main__":
    warm.serve(NEEDED)
