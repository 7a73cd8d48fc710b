"""Rendezvous of ranks on one node; that of torch elastic adds a random delay of up to 0.3 s."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no list of its exports
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

NAME = "one_node"
"""Name in the rendezvous registry of torch elastic."""
ADDRESS = "127.0.0.1"


class SingleNodeRendezvous(StaticTCPRendezvous):
    """Rendezvous for a single node, on a free port."""

    def get_backend(self) -> str:
        """Name in the rendezvous registry."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Rendezvous with a separate store for each job.

        The static rendezvous of torch elastic shares one store per port, where keys collide.
        """
        self._server = store_server(ADDRESS, 0, 1, self.timeout)
        store_info = RendezvousStoreInfo(ADDRESS, self._server.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._server), 0, 1, store_info)


def store_server(address: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """TCPStore server that listens on ``address`` only; port 0 selects a free port.

    The socket that torch creates itself listens on all interfaces.
    """
    family, *_, bound = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(bound[:2], family=family, backlog=max(128, 2 * world_size))
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def use_loopback() -> None:
    """Bind the gloo sockets of this process to the loopback interface, unless one is set."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _job_rendezvous(parameters: RendezvousParameters) -> SingleNodeRendezvous:
    return SingleNodeRendezvous(ADDRESS, 0, 0, 1, parameters.run_id, timeout=60)


rendezvous_handler_registry.register(NAME, _job_rendezvous)
