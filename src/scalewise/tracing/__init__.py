"""Training steps and models run on fake tensors, which have shapes and dtypes but no memory."""
