"""A difference as the pages write it."""

import numpy as np
from numpy.typing import ArrayLike

from gtpo.reports.curves import half_width_of


def text_of(differences: ArrayLike, places: int = 2) -> str:
    """Mean and half of the 95 % interval of the differences of 20 seeds."""
    values = np.asarray(differences, dtype=float)
    assert values.shape == (20,)
    return f"{values.mean():+.{places}f} ± {half_width_of(float(values.std(ddof=1)), 20):.{places}f}"
