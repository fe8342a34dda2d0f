"""lessons: code that only demonstrates, beside the notebooks that teach with it. The library itself is nblib.

    from lessons import check                   the judges of the exercises
    from lessons.trials import Trials           a pitfall's runs side by side
    from lessons.pitfalls import pitfall        the catalogue

Importing it is light: torch comes with the module that needs it.

Footgun: it is installed with the project (`make env`), so it imports from any folder; a copy of a notebook alone does
not bring it along.
"""

from collections.abc import Callable


def check(exercise: str, answer: Callable) -> bool:
    """Judge the answer to an exercise: `check("00.schedule", my_function)` prints the verdict and returns it."""
    from lessons import exercises  # imports torch

    return exercises.check(exercise, answer)
