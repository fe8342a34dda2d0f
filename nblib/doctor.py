"""The doctor, under the name that the notebooks use. It is a package of its own, `train_doctor`, in the folder doctor/.

    with doctor.watch(model, optimizer=optimizer) as report: ...

Footgun: this is a list of names. What is not in it is inside the doctor and imported from `train_doctor`.
"""

from train_doctor import *  # noqa: F403
from train_doctor import __all__ as __all__
