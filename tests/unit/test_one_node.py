"""Where the ranks of one node meet."""

import socket

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from scalewise.launch import one_node


def test_jobs_of_one_process_meet_apart_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    monkeypatch.setattr("time.sleep", waited)
    asked = [RendezvousParameters(one_node.NAME, "127.0.0.1", job, 1, 1) for job in ("a", "b")]
    first, second = (get_rendezvous_handler(one).next_rendezvous() for one in asked)
    met = [one.bootstrap_store_info for one in (first, second)]
    assert met[0].master_port != met[1].master_port
    for one in met:
        socket.create_connection((one.master_addr, one.master_port), timeout=5).close()
    first.store.set("key", "of the first")
    assert first.store.get("key") == b"of the first"
    assert (first.rank, first.world_size) == (0, 1)
    assert not second.store.check(["key"])
