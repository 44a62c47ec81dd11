"""How long the threads of PyTorch wait actively for work."""

from collections.abc import MutableMapping

SPIN_COUNT = 3_000  # about a tenth of a millisecond


def bound_waiting(environment: MutableMapping[str, str]) -> None:
    """Let idle threads spin for a moment, then sleep; a policy of the user is kept. Before PyTorch is imported.

    The parallel regions of a small model are shorter than it takes to wake a thread that sleeps at once
    (``OMP_WAIT_POLICY=PASSIVE``). GNU OpenMP's own limit is a hundred times this one: threads then spin instead of
    working where another program uses a core.
    """
    if "OMP_WAIT_POLICY" not in environment:  # GOMP_SPINCOUNT would override it
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
