"""lessons: what only demonstrates, beside the notebooks that teach with it. The library itself is nblib.

    from lessons import check                   the judges of the exercises
    from lessons.trials import Trials           a pitfall's runs side by side
    from lessons.pitfalls import pitfall        the catalogue

Footgun: it is installed with the project (`make env`), so it imports from any folder; a copy of a notebook alone does
not bring it along.
"""

from lessons.exercises import check as check
