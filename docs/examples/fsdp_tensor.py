"""Train with FSDP times tensor parallelism on four ranks, and compare with one device."""

import sys

import scalewise

SIZES = {"one device": [], "FSDP x TP": ["parallelism.shards=2", "parallelism.tensor=2"]}

if __name__ == "__main__":
    losses = []
    for name, sizes in SIZES.items():
        strategy = ["parallelism=mesh", *sizes] if sizes else ["parallelism=single"]
        common = ["experiment=smoke", "trainer.micro_batch=2", "hardware=cpu", "optimizer=sgd"]
        result = scalewise.train(scalewise.compose([*common, *strategy, *sys.argv[1:]]))
        if result.exit_code:
            sys.exit(result.exit_code)
        losses.append(result.summary["metrics"]["train/loss"])
        print(f"{name}: loss {losses[-1]:.6f}")
    print(f"difference: {abs(losses[0] - losses[1]):.1e}")
