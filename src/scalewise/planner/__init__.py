"""Memory, step time and cost of a run, predicted from its configs; imports no torch."""
