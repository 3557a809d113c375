"""Numbers that may be missing, infinite or NaN, where they are compared.

NaN compares as false with everything: in a sort, a minimum or a maximum its place decides.
"""

import math


def finite(value: float | None) -> float | None:
    """The number, or None if it is missing, infinite or NaN."""
    return value if value is not None and math.isfinite(value) else None


def lowest(*values: float | None) -> float | None:
    """The lowest of the finite numbers; None: there are none."""
    return min((known for value in values if (known := finite(value)) is not None), default=None)
