"""What tests of the wire share: what is read of files."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def lengths_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each `os.pread` gave, from now on."""
    read: list[int] = []
    pread = os.pread

    def counted(fd: int, num_bytes: int, offset: int) -> bytes:
        data = pread(fd, num_bytes, offset)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return read
