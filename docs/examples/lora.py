"""Pretrain a small decoder, then train a LoRA adapter on its frozen weights.

For a model of your own: lora.py model.weights=my/llama data.tokenizer=my/llama/tokenizer.json
"""

import sys

import scalewise
from scalewise.cli import main

if __name__ == "__main__":
    base = scalewise.train(scalewise.compose(["experiment=smoke", *sys.argv[1:]]))
    exported = base.folder / "export"
    main(["export", str(base.folder), f"to={exported}"])

    overrides = ["experiment=smoke", "adapter=lora", "adapter.rank=8", "optimizer.lr=1e-2"]
    weights = [f"model.weights={exported}", f"data.tokenizer={exported}/tokenizer.json"]
    run = scalewise.compose([*overrides, *sys.argv[1:], *weights])
    print(f"{run.trainable_parameters:,} of {run.model.num_parameters:,} parameters are trained")
    result = scalewise.train(run)
    print(result.status, result.summary["metrics"]["val/loss"], result.folder)
    sys.exit(result.exit_code)
