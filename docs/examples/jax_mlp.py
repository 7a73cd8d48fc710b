"""Train an MLP with JAX on four CPU devices: one device, data parallel, tensor parallel, both."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)  # as --xla_force_host_platform_device_count=4
STEPS, BATCH, WIDTH, HIDDEN, LR = 8, 16, 8, 32, 1.0
RNG = np.random.default_rng(0)
SHAPES = ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (STEPS, BATCH, WIDTH))
UP, DOWN, INPUTS = (RNG.normal(0, 0.5, shape).astype(np.float32) for shape in SHAPES)


def sample_loss(weights, x):
    """Mean squared error of one sample."""
    return jnp.mean((jax.nn.gelu(x @ weights[0]) @ weights[1] - jnp.sin(x)) ** 2)


def step(weights, batch):
    """Updated weights, and the mean loss of a batch."""
    mean_loss = lambda weights: jax.vmap(sample_loss, (None, 0))(weights, batch).mean()  # noqa: E731
    loss, gradients = jax.value_and_grad(mean_loss)(weights)
    return jax.tree.map(lambda weight, gradient: weight - LR * gradient, weights, gradients), loss


for data, model in ((1, 1), (4, 1), (1, 4), (2, 2)):
    mesh = jax.make_mesh((data, model), ("data", "model"), (AxisType.Auto, AxisType.Auto))
    specs = (P(None, "model"), P("model", None))  # column-wise, then row-wise
    weights = jax.device_put((UP, DOWN), tuple(NamedSharding(mesh, spec) for spec in specs))
    losses = []
    for batch in INPUTS:
        sharded_batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        weights, loss = jax.jit(step)(weights, sharded_batch)
        losses.append(float(loss))
    assert weights[0].sharding.shard_shape(weights[0].shape) == (WIDTH, HIDDEN // model)
    print(f"data {data}, model {model}:", *losses)
