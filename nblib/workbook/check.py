"""Check the answer to an exercise: what holds is said, what does not comes with a hint, never with the solution.

`nblib.check("00.schedule", my_function)` tries properties a right answer must have. tests/test_check.py holds one
solution and at least two plausible wrong answers for each.
"""

import math
from collections.abc import Callable


def check(exercise: str, answer: Callable) -> bool:
    """Try an answer; prints the verdict and returns it."""
    if exercise not in EXERCISES:
        raise ValueError(f"exercise = {exercise!r}: allowed are {', '.join(EXERCISES)}")
    for hint, holds in EXERCISES[exercise]:
        try:
            fine = bool(holds(answer))
        except Exception as error:  # whatever the reader's code raises is part of the verdict
            print(f"{exercise}: not yet. Your code raised {type(error).__name__}: {error}")
            return False
        if not fine:
            print(f"{exercise}: not yet. {hint}")
            return False
    print(f"{exercise}: right.")
    return True


EXERCISES = {
    "00.schedule": [  # (step, total, warmup) -> factor
        ("The first step should already move the weights: what is the factor at step 0?", lambda f: f(0, 100, 10) > 0),
        ("Warm-up should reach 1 exactly at its last step.", lambda f: math.isclose(f(9, 100, 10), 1.0)),
        ("Warm-up should grow by the same amount each step.", lambda f: math.isclose(f(4, 100, 10), 0.5)),
        (
            "After warm-up it should never grow.",
            lambda f: all(f(s, 100, 10) >= f(s + 1, 100, 10) - 1e-12 for s in range(9, 99)),
        ),
        ("Half way down a cosine stands at one half.", lambda f: math.isclose(f(55, 100, 10), 0.5, abs_tol=0.02)),
        ("What happens after the end? Try step 150 of 100.", lambda f: abs(f(150, 100, 10)) < 1e-9),
    ],
    "00.bits_per_byte": [  # (nats per token, tokens, bytes) -> bits per byte
        (
            "A loss of ln 2 nats on one token per byte is one bit per byte.",
            lambda f: math.isclose(f(math.log(2), 10, 10), 1),
        ),
        ("Fewer bytes per token must cost more bits per byte.", lambda f: f(2.0, 100, 300) > f(2.0, 100, 400)),
        ("Guessing among 256 bytes costs eight bits each.", lambda f: math.isclose(f(math.log(256), 7, 7), 8)),
        (
            "Twice the tokens over the same bytes is twice the bits.",
            lambda f: math.isclose(f(1.5, 20, 50), 2 * f(1.5, 10, 50)),
        ),
    ],
    "02.chunk": [  # (vocabulary, bytes) -> rows of fp32 logits that fit
        ("An fp32 number takes four bytes: how many rows of 1,000 fit 40,000 bytes?", lambda f: f(1000, 40_000) == 10),
        ("A part of a row is no row: 40,001 bytes still hold ten.", lambda f: f(1000, 43_999) == 10),
        ("At least one row must be scored, whatever the budget.", lambda f: f(150_000, 1000) == 1),
        ("Whole rows come as an int.", lambda f: isinstance(f(1000, 40_000), int)),
    ],
    "02.segment": [  # (layers, inside) -> blocks per checkpointed segment
        ("With 16 blocks that each hold 20 inputs inside, try the peak of every size.", lambda f: f(16, 20) == 1),
        ("With one input inside, it is the square root of the depth.", lambda f: f(64, 1) == 8),
        ("How does the best size change when a block holds four times as much?", lambda f: f(64, 4) == 4),
        (
            "No size may have a lower peak.",
            lambda f: all(
                layers / (n := f(layers, inside)) + n * inside
                <= min(layers / m + m * inside for m in range(1, layers + 1)) + 1e-9
                for layers in (8, 30, 100)
                for inside in (1, 2, 9)
            ),
        ),
    ],
}
