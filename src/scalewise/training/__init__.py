"""The LightningModule, the training loop and its callbacks."""
