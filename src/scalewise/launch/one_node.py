"""Where the ranks of one node meet: elastic's own rendezvous waits up to 0.3 s to spread nodes."""

from __future__ import annotations

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


class OneNode(StaticTCPRendezvous):
    """A rendezvous of a node with itself, at a port that its store finds free."""

    def get_backend(self) -> str:
        """Returns its name, which is the job's."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns a store of this job's own; elastic's static one shares it among those of a port.

        Its ranks name their keys by the attempt alone.
        """
        self._server = TCPStore(ADDRESS, 0, is_master=True, timeout=self.timeout)
        met = RendezvousStoreInfo(ADDRESS, self._server.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._server), 0, 1, met)


def _of_job(parameters: RendezvousParameters) -> OneNode:
    return OneNode(ADDRESS, 0, 0, 1, parameters.run_id, timeout=60)


rendezvous_handler_registry.register(NAME, _of_job)
