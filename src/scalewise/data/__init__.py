"""Where rows of tokens come from, in which order, and as which batches."""
