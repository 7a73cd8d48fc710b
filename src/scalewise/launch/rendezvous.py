"""Where the ranks of one node meet: elastic's own rendezvous waits up to 0.3 s to spread nodes."""

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
"""What elastic knows it by."""
ADDRESS = "127.0.0.1"


class SingleNodeRendezvous(StaticTCPRendezvous):
    """A rendezvous of a node with itself, at a port that its store finds free."""

    def get_backend(self) -> str:
        """Returns its name, which is the job's."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns a store of this job's own; elastic's static one shares it among those of a port.

        Its ranks name their keys by the attempt alone.
        """
        self._server = store_server(ADDRESS, 0, 1, self.timeout)
        met = RendezvousStoreInfo(ADDRESS, self._server.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._server), 0, 1, met)


def store_server(address: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Returns a TCPStore server that listens on ``address`` only.

    torch binds its own listening socket to all interfaces. Port 0 selects a free port.
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
    """Binds the gloo sockets of this process to the loopback interface, unless one is named."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _job_rendezvous(parameters: RendezvousParameters) -> SingleNodeRendezvous:
    return SingleNodeRendezvous(ADDRESS, 0, 0, 1, parameters.run_id, timeout=60)


rendezvous_handler_registry.register(NAME, _job_rendezvous)
