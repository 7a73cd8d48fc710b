"""All of the suite's Hydra code: overrides in, a Run or every complaint out."""
