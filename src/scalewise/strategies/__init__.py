"""Lightning strategies: they build, shard, step, clip and checkpoint a model."""
