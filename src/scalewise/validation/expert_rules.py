"""Rules between a mixture of experts and the other parts of a run."""

from __future__ import annotations

from collections.abc import Iterator

from scalewise.adapters.target_modules import TARGETS_KEY
from scalewise.errors import ConfigIssue
from scalewise.models.base import TPStyle
from scalewise.models.decoder.config import DecoderConfig
from scalewise.parallelism.mesh import MeshConfig
from scalewise.precision import FloatFormat
from scalewise.precision.config import Float8
from scalewise.run_config import RunConfig


def expert_issues(model: DecoderConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield parts of a run that a mixture of experts does not support."""
    if not model.experts:
        return
    if run.shards_experts and isinstance(run.parallelism, MeshConfig):
        yield from _tensor_issues(run.parallelism, model, run)
    yield from quantized_expert_issues("model.experts", run)
    yield from _router_issues(model, run)


def quantized_expert_issues(experts: str, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield formats of 8 bits or fewer, which leave ``experts`` out."""
    if isinstance(run.precision, Float8):
        reason = f"does not quantize the matmuls of {experts}"
        yield ConfigIssue("precision", run.option("precision"), reason, "set precision=bf16_mixed")
    model, quantization = run.model, run.quantization
    if quantization.packed_layers(model) or quantization.fake_quantized_layers(model):
        reason = f"does not quantize the matrices of {experts}, which are most of the weights"
        fix = "set quantization=none"
        yield ConfigIssue("quantization", run.option("quantization"), reason, fix)


def expert_parallel_issues(mesh: MeshConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of an expert axis without experts, or of one that does not divide them."""
    experts, ranks = getattr(run.model, "routed_experts", 0), mesh.expert
    if ranks > 1 and not experts:
        reason = "requires a model with model.experts"
        yield ConfigIssue("parallelism.expert", ranks, reason, "set parallelism.expert=1")
    elif experts % ranks:
        reason = f"does not divide model.experts={experts}"
        fix = f"set model.experts={-(-experts // ranks) * ranks}"
        yield ConfigIssue("parallelism.expert", ranks, reason, fix)


def _tensor_issues(mesh: MeshConfig, model: DecoderConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield parts of a run that tensor parallelism of experts does not support."""
    reason = "is not supported with tensor parallelism of model.experts"
    without = "parallelism=fsdp parallelism.tensor=1"
    if run.is_compiled:
        fix = f"set compile=none, or {without}"
        yield ConfigIssue("compile", run.option("compile"), reason, fix)
    if model.width % (mesh.parameter_shards // mesh.expert):
        shards, context = mesh.sizes["shards"], mesh.sizes["context"]
        axes = f"context={context}" + f" and expert={mesh.expert}" * (mesh.expert > 1)
        reason = f"with {axes}, does not divide the {model.width} columns of experts, "
        reason += "which FSDP shards with parallelism.tensor"
        fix = f"set parallelism.shards={_column_shards(mesh, model.width)}"
        yield ConfigIssue("parallelism.shards", shards, reason, fix)
    yield from _adapter_issues(mesh, model, run)


def _adapter_issues(
    mesh: MeshConfig, model: DecoderConfig, run: RunConfig
) -> Iterator[ConfigIssue]:
    """Yield adapters of a mixture that tensor parallelism does not support."""
    adapter, tp_styles = run.adapter, model.tensor_parallel_styles()
    partial_rows = {
        name.removeprefix("blocks.*.")
        for name, style in tp_styles.items()
        if style is TPStyle.partial_row
    }
    scales = adapter.adapted_layers(model) if adapter.magnitudes else adapter.scaled_layers(model)
    for name in filter(partial_rows.__contains__, scales):
        reason = f"matches {name}, whose output adapter={run.option('adapter')} cannot scale "
        reason += "before tensor parallelism sums it"
        fix = "set adapter=lora, or parallelism=fsdp parallelism.tensor=1"
        yield ConfigIssue(TARGETS_KEY, [*adapter.targets], reason, fix)
    shards = mesh.parameter_shards // mesh.expert
    columns = [
        name
        for name in adapter.adapted_layers(model)
        if tp_styles[f"blocks.*.{name}"] is TPStyle.expert_column
    ]
    if columns and adapter.rank % shards:
        reason = f"is not a multiple of the {shards} ranks over which FSDP shards the columns of "
        reason += f"factor B of {columns[0]} with parallelism.tensor"
        fix = f"set adapter.rank={-(-adapter.rank // shards) * shards}"
        yield ConfigIssue("adapter.rank", adapter.rank, reason, fix)


def _column_shards(mesh: MeshConfig, width: int) -> int:
    """Largest divisor of ``shards`` by which FSDP can shard ``width`` columns of experts."""
    shards, context = mesh.sizes["shards"], mesh.sizes["context"]
    divisors = (it for it in range(shards, 0, -1) if shards % it == 0)
    valid = (it for it in divisors if it * context % mesh.expert == 0)
    return next((it for it in valid if width % (it * context // mesh.expert) == 0), 1)


def _router_issues(model: DecoderConfig, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues of the losses and biases that balance experts."""
    sizes = getattr(run.parallelism, "sizes", {})
    for name in ("aux_loss", "router_z_loss", "balance_rate"):
        key, value = f"model.{name}", getattr(model, name)
        if value and run.parallelism.flattens_parameters:
            reason = "is not supported with DeepSpeed, which scales gradients itself"
            yield ConfigIssue(key, value, reason, f"set {key}=0, or parallelism=fsdp")
        elif value and name != "balance_rate" and run.precision.compute is FloatFormat.fp16:
            reason = "is not supported with the loss scaling of fp16"
            yield ConfigIssue(key, value, reason, f"set {key}=0, or precision=bf16_mixed")
    is_balanced = model.aux_loss or model.router_z_loss or model.balance_rate
    has_capacity = model.capacity_factor is not None
    if (is_balanced or has_capacity) and run.global_batch % run.samples_per_forward:
        size = run.samples_per_forward
        reason = f"is not a multiple of {size}, so that padding is routed to experts too"
        fix = f"set trainer.global_batch={-(-run.global_batch // size) * size}"
        yield ConfigIssue("trainer.global_batch", run.global_batch, reason, fix)
    if model.aux_loss and (ranks := sizes.get("context", 1)) > 1:
        reason = f"requires the loads of whole sequences, and {ranks} context ranks have a part"
        fix = "set model.aux_loss=0 model.balance_rate=0.001"
        yield ConfigIssue("model.aux_loss", model.aux_loss, reason, fix)
    if model.balance_rate and run.precision.parameters is FloatFormat.bf16:
        reason = f"is lost in the bf16 biases of precision={run.option('precision')}"
        fix = "set precision=bf16_mixed, or model.balance_rate=0"
        yield ConfigIssue("model.balance_rate", model.balance_rate, reason, fix)
