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
    "03.survives": [  # (weight, update) -> does the sum differ from the weight once both are kept in bf16
        ("A weight of 1 feels an update of a hundredth.", lambda f: f(1.0, 0.01)),
        ("bf16 has 8 significant bits: between 1 and 2 it knows 128 numbers.", lambda f: not f(1.0, 0.003)),
        ("Small weights feel small updates: the distance grows with the weight.", lambda f: f(0.01, 1e-4)),
        ("And large ones do not: try 1000 and 1.", lambda f: not f(1000.0, 1.0)),
        ("Just below a power of two the numbers stand closer: try 1 and -0.003.", lambda f: f(1.0, -0.003)),
    ],
    "03.muon_rate": [  # (AdamW-like rate, rows, columns) -> the rate in the "original" convention for the same step
        ("It is proportional to the rate.", lambda f: math.isclose(f(2e-3, 64, 64), 2 * f(1e-3, 64, 64))),
        (
            "Square matrices: 'match_rms_adamw' multiplies by 0.2 sqrt(max(rows, columns)), 'original' by 1.",
            lambda f: math.isclose(f(1e-3, 100, 100), 2e-3),
        ),
        (
            "Taller than wide: 'original' multiplies by sqrt(rows / columns), so its rate must be smaller.",
            lambda f: math.isclose(f(1e-3, 400, 100), 2e-3),
        ),
        (
            "Wider than tall: 'original' multiplies by 1, never by less.",
            lambda f: math.isclose(f(1e-3, 100, 400), 4e-3),
        ),
    ],
}
