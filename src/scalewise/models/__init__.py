"""What a model is: a census of weights, flops, and the module."""
