"""Roofline times of operators on a device."""

from __future__ import annotations

from dataclasses import dataclass

from scalewise.models.op_graph import Op, OpGraph, OpWork


@dataclass(frozen=True)
class DeviceRates:
    """Sustained rates of a device."""

    matmul_flops_per_s: float
    """Matmul rate, in FLOP/s."""
    fp8_matmul_flops_per_s: float
    """fp8 matmul rate, in FLOP/s."""
    attention_flops_per_s: float
    """Attention rate, in FLOP/s."""
    memory_bytes_per_s: float
    """Memory bandwidth, in bytes/s."""
    launch_s: float
    """Launch time of one operator on the host, in seconds."""

    def op_seconds(
        self,
        work: OpWork,
        flops: float,
        moved_bytes: float,
        *,
        rate_share: float = 1.0,
        is_launched: bool = True,
    ) -> float:
        """Return the time of an operator, in seconds; collectives count elsewhere.

        Args:
            work: Resource that bounds its time.
            flops: Number of FLOPs.
            moved_bytes: Bytes read from memory and written to it.
            rate_share: Rate of the kernel, relative to the sustained rate of the device.
            is_launched: Whether the operator is a kernel of its own, or the last one of a kernel.
        """
        if work is OpWork.communication or not moved_bytes:
            return 0.0
        rates = {
            OpWork.attention: self.attention_flops_per_s,
            OpWork.matmul_fp8: self.fp8_matmul_flops_per_s,
        }
        rate = rates.get(work, self.matmul_flops_per_s)
        seconds = max(flops / (rate * rate_share), moved_bytes / self.memory_bytes_per_s)
        return max(seconds, self.launch_s) if is_launched else seconds


def forward_backward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    """Return the time of an operator in forward and backward, in seconds."""
    forward = forward_seconds(graph, operator, rates)
    return forward + _backward_seconds(graph, operator, rates) + inner_seconds(operator, rates, 1)


def _backward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    return rates.op_seconds(
        operator.work,
        operator.backward_flops,
        graph.backward_bytes(operator),
        rate_share=operator.rate_share,
        is_launched=_ends_kernel(graph, operator),
    )


def weight_backward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    """Return the time of the weight gradient of a matmul; other weight gradients are small."""
    if not operator.weight_gradient_bytes[0] or not operator.backward_flops:
        return 0.0
    share = min(1.0, operator.flops / operator.backward_flops)
    return share * _backward_seconds(graph, operator, rates)


def forward_seconds(graph: OpGraph, operator: Op, rates: DeviceRates) -> float:
    """Return the time of an operator in forward, in seconds."""
    forward = rates.op_seconds(
        operator.work,
        operator.flops,
        graph.forward_bytes(operator),
        rate_share=operator.rate_share,
        is_launched=_ends_kernel(graph, operator),
    )
    return forward + inner_seconds(operator, rates, 0)


def inner_seconds(operator: Op, rates: DeviceRates, index: int) -> float:
    """Return the time of elementwise kernels inside an operator; index: 0 forward, 1 backward."""
    inner_bytes = operator.cast_bytes[index] + operator.elementwise_bytes[index]
    return rates.op_seconds(OpWork.pointwise, 0.0, inner_bytes)


def _ends_kernel(graph: OpGraph, operator: Op) -> bool:
    return operator.writes[0] not in graph.fused_intermediates
