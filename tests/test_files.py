"""Atomic writes."""

from pathlib import Path

import pytest

from gtpo.files import write_atomically


def test_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")  # cannot be encoded: fails while writing
    assert path.read_text() == "old"
