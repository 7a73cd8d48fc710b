"""Config composition: all code that imports Hydra or OmegaConf."""
