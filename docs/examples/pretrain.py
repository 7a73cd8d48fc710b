"""Pretrain a small decoder on two ranks and print its losses."""

import sys

import scalewise

if __name__ == "__main__":
    run = scalewise.compose(["experiment=smoke", "parallelism=ddp", *sys.argv[1:]])
    result = scalewise.train(run)
    metrics = result.summary["metrics"]
    print(result.status, metrics["train/loss"], metrics["val/loss"], result.folder)
    sys.exit(result.exit_code)
