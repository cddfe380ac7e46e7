"""What a launcher's environment says."""

from __future__ import annotations

import os

from rankxform.transport.launcher import before_another_mpi


def test_open_mpi_has_no_shared_segments_where_it_is_initialized_again(monkeypatch):
    name = "OMPI_MCA_btl"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with before_another_mpi(True):
        assert os.environ[name] == "^sm"
    with before_another_mpi(False):
        assert name not in os.environ
    monkeypatch.setenv(name, "tcp,self")
    with before_another_mpi(True):
        assert os.environ[name] == "tcp,self"
    assert os.environ[name] == "tcp,self"
