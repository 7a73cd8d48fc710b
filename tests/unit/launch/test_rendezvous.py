"""Rendezvous of the ranks of one node."""

import os
import socket

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from scalewise.launch import rendezvous


def test_concurrent_jobs_have_separate_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    monkeypatch.setattr("time.sleep", waited)
    job_parameters = [
        RendezvousParameters(rendezvous.NAME, "127.0.0.1", job, 1, 1) for job in ("a", "b")
    ]
    first, second = (get_rendezvous_handler(one).next_rendezvous() for one in job_parameters)
    store_infos = [one.bootstrap_store_info for one in (first, second)]
    assert store_infos[0].master_port != store_infos[1].master_port
    for one in store_infos:
        socket.create_connection((one.master_addr, one.master_port), timeout=5).close()
    first.store.set("key", "of the first")
    assert first.store.get("key") == b"of the first"
    assert (first.rank, first.world_size) == (0, 1)
    assert not second.store.check(["key"])


def test_rendezvous_store_listens_on_loopback_only() -> None:
    parameters = RendezvousParameters(rendezvous.NAME, "127.0.0.1", "job", 1, 1)
    rendezvous_info = get_rendezvous_handler(parameters).next_rendezvous()
    assert rendezvous_info.bootstrap_store_info is not None
    port = rendezvous_info.bootstrap_store_info.master_port
    addresses = [
        address.laddr for address in psutil.Process().net_connections("tcp") if address.laddr
    ]
    assert {address.ip for address in addresses if address.port == port} == {"127.0.0.1"}


def test_gloo_uses_loopback_unless_an_interface_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is restored
    del os.environ["GLOO_SOCKET_IFNAME"]
    rendezvous.use_loopback()
    name = os.environ["GLOO_SOCKET_IFNAME"]
    assert {address.address for address in psutil.net_if_addrs()[name]} & {"127.0.0.1"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    rendezvous.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
