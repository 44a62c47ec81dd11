"""What a user is told where a command cannot do what was asked."""

import pytest

from gtpo.errors import UsageError


def refused(match: str) -> pytest.RaisesExc[UsageError]:
    """A UsageError whose message has what this pattern says."""
    return pytest.raises(UsageError, match=match)
