"""Configs of Accelerate and DeepSpeed, translated to overrides and back."""
